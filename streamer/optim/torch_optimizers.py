"""Optimizers of PyTorch on a wrapped model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamer.engine.handle import home_of
from streamer.engine.paging.executor import Executor
from streamer.errors import warn

#: Dtypes in which a small update is rounded away unless an fp32 master keeps it.
_ROUNDING = (torch.bfloat16, torch.float16)


def serve_other_optimizers(executor: Executor) -> Callable[[], None]:
    """Let optimizers of PyTorch work on a wrapped model; the returned function ends that.

    They read and write ``p.grad`` and weights in place, and a fused one does not tell autograd that it
    does. Before such a step, and after its closure, updates and clipping are settled; from then on the
    weights count as written, since a step that fails may have written some, and once more after the step.
    The first step on 16-bit weights warns that updates are lost.
    """
    weakly = weakref.ref(executor)
    has_warned = False

    def touched(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        if getattr(optimizer, "updates_host_shards", False):
            return []
        params = (param for group in optimizer.param_groups for param in group["params"])
        homes = ((param, home_of(param)) for param in params)
        return [param for param, home in homes if home is not None and home.executor is weakly()]

    def settle(running: Executor, optimizer: torch.optim.Optimizer) -> None:
        running.synchronize()
        running.gradients.settle()
        theirs = set(touched(optimizer))
        running.gradients.narrow(theirs)
        torch.autograd.graph.increment_version(theirs)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        nonlocal has_warned
        running = weakly()
        if running is None or not touched(optimizer):
            return None
        if not running.gradients.are_kept:
            raise RuntimeError(
                f"update='backward' updates layers by streamer.AdamW, not {type(optimizer).__name__}: "
                "wrap with update='step' to use another optimizer"
            )
        if not running.ranks.is_alone:
            raise RuntimeError(
                f"{type(optimizer).__name__} would update the weights, which the ranks share, once for each "
                "rank: use streamer.AdamW, of which each rank updates a share"
            )
        running.check_thread(running.caller())
        for param in touched(optimizer):
            if param.grad is not None and (home := home_of(param)) is not None:
                running.check_idle(home.unit)
        if not has_warned and (rounded := _rounded(touched(optimizer))):
            has_warned = True
            warn(
                f"{type(optimizer).__name__} keeps no fp32 masters of {rounded} weights, so updates smaller "
                "than their rounding are lost: use streamer.AdamW, which keeps them, or stream fp32 weights "
                "(dtype=torch.float32)"
            )
        settle(running, optimizer)
        given = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
        closure = given.arguments.get("closure")
        if closure is None:
            return None

        def settled() -> Any:
            loss = closure()
            settle(running, optimizer)
            return loss

        given.arguments["closure"] = settled
        return given.args, given.kwargs

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        written = touched(optimizer)
        torch.autograd.graph.increment_version(written)
        if written and (running := weakly()) is not None:
            running.fit_budget()
            running.end_pass()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _rounded(params: Iterable[torch.Tensor]) -> str:
    """The names of the 16-bit dtypes of ``params`` that are trained; empty where there are none."""
    dtypes = {param.dtype for param in params if param.requires_grad}
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in _ROUNDING if dtype in dtypes)
