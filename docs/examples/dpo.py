"""DPO with adapters: python docs/examples/dpo.py DIR PAIRS.jsonl

The order: adapters, then wrap, then the trainer. The reference of DPOTrainer is the base without adapters, so
one model is enough. A line of PAIRS.jsonl has "prompt", "chosen" and "rejected".
"""

import sys

import peft
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import streamer
from streamer.integrations.transformers import Streamed


class StreamedDPOTrainer(Streamed, DPOTrainer):
    pass


folder, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
config = peft.LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")

plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = peft.get_peft_model(plain, config)
streamer.wrap(model)
arguments = DPOConfig(
    "runs/dpo",
    max_steps=2,
    per_device_train_batch_size=2,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
)
pairs = load_dataset("json", data_files=file)["train"]
trainer = StreamedDPOTrainer(model, None, arguments, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
model.save_pretrained("runs/dpo/adapters")
