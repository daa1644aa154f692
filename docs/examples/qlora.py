"""QLoRA: adapters on a base in 4 bits: python docs/examples/qlora.py DIR FILE.txt"""

import sys

import peft
import torch
from transformers import AutoTokenizer

import streamer

folder, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
with open(file) as lines:
    tokens = torch.tensor(tokenizer(lines.read())["input_ids"])
batches = tokens[: len(tokens) // 64 * 64].view(-1, 2, 32)[:4]

config = peft.LoraConfig(target_modules="all-linear", r=16, task_type="CAUSAL_LM")
model = streamer.from_pretrained(
    folder,
    quantize="nf4",  # each tensor as it is read
    adapt=lambda model: peft.get_peft_model(model, config),
    dtype=torch.bfloat16,
)
optimizer = streamer.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for batch in batches:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    streamer.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
model.save_pretrained("adapters")

# merge into the base in its own precision
base = peft.PeftModel.from_pretrained(streamer.unwrap(streamer.from_pretrained(folder)), "adapters")
base.merge_and_unload().save_pretrained("merged")
