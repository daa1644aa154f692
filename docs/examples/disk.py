"""State that spills to disk: python docs/examples/disk.py SCRATCH

The budget of 12 MB is for this small model. Without `host_memory=` the limit is the free memory.
"""

import sys

import torch
from torch.nn import functional as F

import streamer
from models.gpt2 import GPT

torch.manual_seed(0)
model = GPT(vocab_size=256, block_size=64, n_layer=8, n_head=2, n_embd=128)
streamer.wrap(
    model, layers="transformer.h", dtype=torch.bfloat16, host_memory="12MB", disk=sys.argv[1], num_slots=2
)
optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(256, (4, 65))
for step in range(4):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].to(logits.device).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
streamer.synchronize(model)
stats = streamer.stats(model)
print(f"host memory: {sum(stats.host_bytes.values()):,} bytes; on disk: {stats.disk_bytes}")
