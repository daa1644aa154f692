"""Several ranks train one model: torchrun --nproc-per-node 2 docs/examples/two_ranks.py DIR"""

import os
import sys

import torch
import torch.distributed as dist

import streamer

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
model = streamer.from_pretrained(sys.argv[1], dtype="bf16", device=device, process_group=dist.group.WORLD)
optimizer = streamer.AdamW(model.parameters(), lr=1e-4)

torch.manual_seed(0)  # the same batches on all ranks
for step in range(4):
    batch = torch.randint(260, (4, 32))
    mine = batch[rank::ranks]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()  # the gradient is the mean over ranks
    norm = streamer.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm {norm.item():.3f}")
streamer.save(model, optimizer, "checkpoint", step=4)
dist.destroy_process_group()
