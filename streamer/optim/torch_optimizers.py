"""Optimizers of PyTorch over parameters of a wrapped model: `Replay` takes their steps.

PyTorch calls `Optimizer.add_param_group` for every group of every optimizer. There `attach` checks whether
the parameters belong to a wrapped model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from streamer.engine.handle import home_of, shares_memory
from streamer.optim.replay.replay import Replay
from streamer.optim.state import check_once
from streamer.torch_private import without_compiler

_add_param_group = Optimizer.add_param_group


def attach(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Let `Replay` take the steps of ``optimizer``, if parameters of ``group`` belong to a wrapped model.

    Raises ValueError if they are of two wrapped models, share the memory of one, or include one twice.
    """
    params = group["params"]
    homes = [home for param in params if (home := home_of(param)) is not None]
    for param in params:
        if home_of(param) is None and shares_memory(param):
            raise ValueError(
                "a parameter of the optimizer shares the memory of a wrapped model: pass the optimizer the "
                "model's own parameters"
            )
    if not homes or getattr(optimizer, "updates_host_shards", False):
        return
    check_once(params)
    replay = vars(optimizer).get("_streamer")
    executors = {id(home.executor) for home in homes} | ({id(replay.executor)} if replay else set())
    if len(executors) > 1:
        raise ValueError("an optimizer has parameters of two wrapped models: create one for each model")
    if replay is None:
        vars(optimizer)["_streamer"] = Replay(homes[0].executor, optimizer)
        # GradScaler leaves the scale to the step, which removes it in fp32
        vars(optimizer)["_step_supports_amp_scaling"] = True
        # an attribute of the instance, as learning rate schedulers set one
        optimizer.step = MethodType(_step, optimizer)  # type: ignore[method-assign]
        optimizer.state_dict = MethodType(_state_dict, optimizer)  # type: ignore[method-assign]
        optimizer.load_state_dict = MethodType(_load_state_dict, optimizer)  # type: ignore[method-assign]
        for name, method in (("train", _train), ("eval", _eval)):  # schedule-free ones change weights here
            if hasattr(type(optimizer), name):
                setattr(optimizer, name, MethodType(method, optimizer))
    vars(optimizer)["_streamer"].take_over(params)


# `AdamW` calls the wrapped function, which must run outside the compiler
@wraps(without_compiler(_add_param_group))
def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
    without_compiler(_add_param_group)(self, param_group)
    try:
        attach(self, self.param_groups[-1])
    except BaseException:
        self.param_groups.pop()
        raise


# PyTorch's hooks on steps, and its profiler, work as for any step
@Optimizer.profile_hook_step
def _step(self: Any, *arguments: Any, **options: Any) -> Any:
    return self._streamer.step(self, arguments, options)


def _state_dict(self: Any) -> dict[str, Any]:
    found: dict[str, Any] = self._streamer.state_dict(self)
    return found


def _load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    self._streamer.load_state_dict(self, state_dict)


def _train(self: Any) -> None:
    self._streamer.call(self, "train")


def _eval(self: Any) -> None:
    self._streamer.call(self, "eval")


def _check_attached(optimizer: Optimizer, arguments: Any, options: Any) -> None:
    """Raise RuntimeError for a step of an optimizer created before its model was wrapped."""
    if getattr(optimizer, "updates_host_shards", False) or "_streamer" in vars(optimizer):
        return
    if any(home_of(param) is not None for group in optimizer.param_groups for param in group["params"]):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was created before streamer.wrap: create it after, with "
            "model.parameters()"
        )


Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
register_optimizer_step_pre_hook(_check_attached)
