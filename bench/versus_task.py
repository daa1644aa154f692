"""What all contenders of bench/versus.py share: the model, the batches, the precision."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from functools import cached_property

import psutil
import torch
import torch.distributed as dist

from models.gpt2 import GPT

#: the largest number of tokens that occur: few enough to be learned in some tens of steps
ALPHABET = 1024
#: the batch that losses are told of; training begins with batch 0
EVALUATION = -1


@dataclass(frozen=True)
class Task:
    """The model, the data and the precision that all contenders share.

    ``exits`` ends what outlives a contender: the process group that some of them need.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: dict[str, int]
    batch_size: int
    lr: float
    exits: contextlib.ExitStack = field(repr=False)

    def model(self) -> GPT:
        """With the same fp32 weights at each call, on the device, where a large one is drawn in no time."""
        torch.manual_seed(0)
        with self.device:
            return GPT(**self.sizes)

    @cached_property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in GPT(**self.sizes).parameters())

    @property
    def is_fp32(self) -> bool:
        return self.dtype is torch.float32

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sizes["block_size"]

    def batch(self, number: int) -> torch.Tensor:
        """Tokens [batch_size, context + 1] on the device: random walks by 1 to 4, so that there is
        something to learn at once (which tokens occur) and something more after that."""
        draws = torch.Generator().manual_seed(1 + number)
        alphabet = min(ALPHABET, self.sizes["vocab_size"])
        start = torch.randint(alphabet, (self.batch_size, 1), generator=draws)
        moves = torch.randint(1, 5, (self.batch_size, self.sizes["block_size"]), generator=draws)
        return (torch.cat((start, moves), dim=1).cumsum(1) % alphabet).to(self.device)

    def join_process_group(self) -> None:
        """Be the only process of a group, if that has not been done yet."""
        if dist.is_initialized():
            return
        # nobody else is there to talk to, and a machine may have no other interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = self.exits.enter_context(tempfile.TemporaryDirectory())
        # gradients that are on the host are clipped there, which NCCL cannot
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        self.exits.callback(dist.destroy_process_group)

    def require_host_memory(self, bytes_per_parameter: int) -> None:
        """Raise MemoryError rather than let the system end this process."""
        needed, free = bytes_per_parameter * self.num_parameters, psutil.virtual_memory().available
        if needed > free:
            amounts = f"about {needed / 2**30:.1f} GiB of host memory and {free / 2**30:.1f} GiB are free"
            raise MemoryError(f"needs {amounts}: give it a group of its own (--groups)")
