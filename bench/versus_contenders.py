"""The contenders of bench/versus.py: each trains the model of a `Task` as its users do."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import streamer
from models.gpt2 import GPT

#: the largest number of tokens that occur: few enough to be learned in some tens of steps
ALPHABET = 1024
#: the batch for reported losses; training begins with batch 0
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


MAX_NORM, WEIGHT_DECAY = 1.0, 0.1
PLAIN_FP32, PLAIN_BF16 = PLAIN = "plain-fp32", "plain-bf16"


class CannotRun(Exception):
    """A contender that is not installed, or cannot run on this device; the message is the reason."""


class Contender:
    """A contender. This class trains as plain PyTorch does, once ``model`` and ``optimizer`` are set.

    ``exact`` says that masters are fp32, whatever is computed in; ``clips`` that gradients are clipped; and
    ``remark`` what else a reader of its figures must know.
    """

    exact = True
    clips = True
    remark = ""
    model: nn.Module
    optimizer: Any

    def __init__(self, task: Task, *, autocast: bool = False) -> None:
        self._autocast = partial(
            torch.autocast, task.device.type, dtype=torch.bfloat16, enabled=autocast and not task.is_fp32
        )

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy, in fp32, of ``tokens`` [batch_size, context + 1]."""
        with self._autocast():
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step(self, tokens: torch.Tensor) -> None:
        """One step of training; updates on the host may still be running when it returns."""
        self.loss(tokens).backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> float:
        return self.loss(tokens).item()

    def settle(self) -> None:
        """Wait for work of `step` that still runs on the host."""

    def close(self) -> None:
        """Release resources that the garbage collector would not."""

    def stats(self) -> streamer.Stats | None:
        """The bytes that streamer reports."""
        return None


class Plain(Contender):
    """Everything on the device: bf16 weights, or fp32 ones under autocast."""

    def __init__(self, task: Task, *, exact: bool) -> None:
        super().__init__(task, autocast=exact)
        self.exact = exact
        self.model = checkpointed(task.model() if exact else task.model().bfloat16())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), task.lr, weight_decay=WEIGHT_DECAY, fused=True
        )


class Streamer(Contender):
    """This library; ``options`` are arguments of `streamer.wrap`."""

    def __init__(self, task: Task, **options: Any) -> None:
        super().__init__(task)
        self.model = streamer.wrap(
            task.model().cpu(),
            layers="transformer.h",
            device=task.device,
            dtype=task.dtype,
            **options,
        )
        self.optimizer = streamer.AdamW(self.model.parameters(), task.lr, weight_decay=WEIGHT_DECAY)

    def clip(self) -> None:
        streamer.clip_grad_norm_(self.model, MAX_NORM)

    def settle(self) -> None:
        streamer.synchronize(self.model)

    def close(self) -> None:
        # updates under way hold on to the model
        self.settle()

    def stats(self) -> streamer.Stats | None:
        return streamer.stats(self.model)


class TorchAO(Contender):
    """torchao's CPUOffloadOptimizer: weights and gradients on the device, moments and update on the host."""

    clips = False
    remark = "cannot clip: its gradients leave for the host during backward"

    def __init__(self, task: Task, *, exact: bool) -> None:
        super().__init__(task, autocast=exact)
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise CannotRun(f"torchao is not installed ({error})") from error
        if task.device.type != "cuda":
            raise CannotRun("torchao's CPUOffloadOptimizer needs a GPU")
        # its pinned weight and gradient, which PyTorch rounds up to powers of two, and two moments
        task.require_host_memory(20 if exact else 10)
        self.exact = exact
        self.model = checkpointed(task.model() if exact else task.model().bfloat16())
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=task.lr, weight_decay=WEIGHT_DECAY, fused=True
        )

    def clip(self) -> None:
        pass


class FSDP2(Contender):
    """PyTorch's fully_shard with CPUOffloadPolicy, one process; AdamW updates its fp32 weights on the CPU."""

    remark = "as the only process it fetches weights in the compute stream, not ahead of it"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        # pinned weights and gradients, which PyTorch rounds up to powers of two, and two moments
        task.require_host_memory(20)
        task.join_process_group()
        on_cuda = task.device.type == "cuda"
        how = {
            "mesh": init_device_mesh(task.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=None if task.is_fp32 else task.dtype),
            # without a GPU there is nothing to pin memory for, and PyTorch cannot
            "offload_policy": CPUOffloadPolicy(pin_memory=on_cuda),
        }
        self.model = checkpointed(task.model().cpu())
        for layer in self.model.transformer.h:
            fully_shard(layer, **how)
        fully_shard(self.model, **how)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), task.lr, weight_decay=WEIGHT_DECAY, fused=True
        )


class DeepSpeed(Contender):
    """DeepSpeed's ZeRO-3, one process, with weights and optimizer on the CPU."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        os.environ.setdefault("DS_ACCELERATOR", task.device.type)
        # what its launcher would set
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        try:
            import deepspeed
        except ImportError as error:
            raise CannotRun(f"deepspeed is not installed ({error})") from error
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # PyTorch says so at each of its copies, which takes time
        warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
        # bf16 weight, fp32 master, gradient and moments, pinned in large blocks
        task.require_host_memory(26)
        task.join_process_group()
        model = checkpointed(task.model().cpu())
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(task)
        )

    def step(self, tokens: torch.Tensor) -> None:
        # clips, and drops the gradients, by itself
        self.model.backward(self.loss(tokens))
        self.model.step()

    def close(self) -> None:
        self.model.destroy()


def deepspeed_config(task: Task) -> dict[str, Any]:
    """ZeRO-3 with both offloads, all else as DeepSpeed has it."""
    offload = {"device": "cpu", "pin_memory": task.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": task.batch_size,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": not task.is_fp32},
        "optimizer": {"type": "AdamW", "params": {"lr": task.lr, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            # it would replace torch.nn.functional.linear for every other contender too
            "memory_efficient_linear": False,
        },
    }


def checkpointed(model: GPT) -> GPT:
    """``model`` with checkpointed layers: only their inputs are kept for backward."""
    for layer in model.transformer.h:
        # hooks, with which some contenders fetch weights, run around it
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def contenders(task: Task, *, num_slots: int) -> dict[str, Callable[[], Contender]]:
    """Constructors by name; the plain ones come first."""
    builders: dict[str, Callable[[], Contender]] = {PLAIN_FP32: partial(Plain, task, exact=True)}
    if not task.is_fp32:
        builders[PLAIN_BF16] = partial(Plain, task, exact=False)
    for slots in dict.fromkeys((min(2, num_slots), num_slots)):
        builders[f"streamer-{slots}"] = partial(Streamer, task, num_slots=slots)
    builders["torchao-fp32"] = partial(TorchAO, task, exact=True)
    if not task.is_fp32:
        builders["torchao-bf16"] = partial(TorchAO, task, exact=False)
    return builders | {"fsdp2": partial(FSDP2, task), "deepspeed": partial(DeepSpeed, task)}
