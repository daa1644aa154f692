"""TRL's SFTTrainer with LoRA: python docs/examples/sft.py DIR CHATS.jsonl"""

import sys

import peft
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig

import streamer
from streamer.integrations.trl import ROWS, SFTTrainer

folder, file = sys.argv[1:]
config = peft.LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")
model = streamer.from_pretrained(
    folder,
    dtype="bf16",
    adapt=lambda model: peft.get_peft_model(model, config),
    micro_batch_size=1,
    batch_dims=ROWS,
)
arguments = SFTConfig(
    "runs/sft",
    max_steps=4,
    per_device_train_batch_size=2,
    max_length=64,
    packing=True,
    bf16=False,  # the dtype of computation is from_pretrained's
    gradient_checkpointing=False,  # layers are recomputed anyway
    report_to="none",
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=load_dataset("json", data_files=file)["train"],
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
trainer.save_model()  # the adapters
