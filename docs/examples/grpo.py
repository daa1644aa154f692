"""GRPO: python docs/examples/grpo.py DIR PROMPTS.jsonl

The trainer generates answers with the streamed model and trains it on their rewards. Each new token copies
all layers once: let `num_generations` and the batch be large. A line of PROMPTS.jsonl has "prompt".
"""

import sys

import peft
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import streamer
from streamer.integrations.transformers import Streamed


class StreamedGRPOTrainer(Streamed, GRPOTrainer):
    pass


def variety(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of different words."""
    return [len({*text.split()}) / max(1, len(text.split())) for text in completions]


folder, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
config = peft.LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")

plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = peft.get_peft_model(plain, config)
streamer.wrap(model)
arguments = GRPOConfig(
    "runs/grpo",
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-3,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
)
prompts = load_dataset("json", data_files=file)["train"]
trainer = StreamedGRPOTrainer(model, variety, arguments, train_dataset=prompts, processing_class=tokenizer)
trainer.train()
model.save_pretrained("runs/grpo/adapters")
