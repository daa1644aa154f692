"""transformers' Trainer on a streamed model: python docs/examples/trainer.py DIR FILE.txt"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

import streamer
from streamer.integrations.transformers import Trainer

folder, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(file) as lines:
    rows = [tokenizer(line, truncation=True, max_length=64) for line in lines if line.strip()]
dataset = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])

model = streamer.from_pretrained(folder, dtype="bf16")
arguments = TrainingArguments(
    "runs/trainer",
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-5,
    logging_steps=1,
    save_steps=2,
    report_to="none",
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collator)
trainer.train()
trainer.save_model()
