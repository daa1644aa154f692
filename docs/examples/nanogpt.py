"""nanoGPT's training loop with streamed layers: python docs/examples/nanogpt.py [TEXT]

The lines with `streamer` are the difference to a plain loop. Any nn.Module with a list of layers works.
"""

import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import streamer
from models.gpt2 import GPT

BATCH, CONTEXT, STEPS, WARMUP, LR = 8, 64, 20, 5, 1e-3

torch.manual_seed(1337)
file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(torch.__file__)
data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (BATCH,))
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def get_lr(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


model = GPT(vocab_size=256, block_size=CONTEXT, n_layer=4, n_head=2, n_embd=64)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
streamer.wrap(model, layers="transformer.h", dtype=torch.bfloat16, micro_batch_size=4)
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = streamer.AdamW(groups, lr=LR, betas=(0.9, 0.95))

for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    x, y = get_batch()
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), y.to(logits.device).flatten())
    loss.backward()
    streamer.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 5 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.3f}")

torch.save(streamer.unwrap(model).state_dict(), "ckpt.pt")
