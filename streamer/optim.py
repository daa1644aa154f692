"""AdamW for a wrapped model: a PyTorch optimizer whose updates run on the host, one unit at a time."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from streamer.engine.executor import Executor
from streamer.handle import Home, home_of
from streamer.host_adam import Run, merge, update_bytes, update_shard
from streamer.memory.host import ADAMW_PURPOSES, EXP_AVG, EXP_AVG_SQ
from streamer_native import Hyper


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019, algorithm 2), as `torch.optim.AdamW`.

    ``params`` are parameters, or parameter groups, of models that were wrapped. Updates run in host
    memory in exact fp32 whatever the dtype of the parameters, with fp32 moments. `step` returns once they
    are queued: the next forward waits for each layer's update as it comes to it, so nothing is stale.

    ``state[p]`` has ``step`` and, as views of host memory in the shape of ``p``, ``exp_avg`` and
    ``exp_avg_sq`` (fp32); call `streamer.synchronize` before reading them.

    A step whose gradients are not all finite changes nothing: with ``skip_nonfinite`` it warns and counts in
    ``streamer.stats(model).skipped_steps``, without it raises RuntimeError.

    Raises ValueError for a hyperparameter out of its range, or a parameter whose model is not wrapped.
    """

    #: its updates do not run where and when PyTorch's own do
    updates_host_shards = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        skip_nonfinite: bool = True,
    ) -> None:
        self._skip_nonfinite = skip_nonfinite
        self._executors: list[Executor] = []
        # not the optimizer itself, which its parameters shall not keep alive
        self._token = object()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with zero moments."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group)
        for param in group["params"]:
            home = _home(param)
            if home.executor not in self._executors:
                self._executors.append(home.executor)
                home.executor.synchronize()
                home.executor.store.add_state(ADAMW_PURPOSES)
            home.executor.updated_by[home.slice.param.name] = self._token
            if home.slice.param.trainable:
                for moment in self._moments(home).values():
                    moment.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update of every parameter that has a gradient; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_finite():
            return loss
        runs: dict[tuple[Executor, int], list[Run]] = defaultdict(list)
        for group in self.param_groups:
            _check(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                home = _home(param)
                if home.executor.updated_by[home.slice.param.name] is not self._token:
                    raise RuntimeError(
                        f"'{home.slice.param.name}' now belongs to an optimizer that was made later and has "
                        "begun with moments of its own: use that one"
                    )
                if not home.slice.param.trainable:
                    home.unit.written()  # says that there is no room for it
                state = self.state[param]
                if not state:
                    state.update(step=torch.tensor(0.0), **self._moments(home))
                state["step"] += 1
                beta1, beta2 = group["betas"]
                hyper = Hyper(
                    float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], int(state["step"])
                )
                runs[home.executor, home.unit.index].append(Run.of(home.slice, hyper))
        for executor in self._executors:
            self._queue(
                executor, {unit: merge(runs[owner, unit]) for owner, unit in runs if owner is executor}
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero once the updates that read them are done."""
        if not set_to_none:
            self._synchronize()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state once all updates are done; its tensors are views of host memory, as in PyTorch."""
        self._synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyperparameters and moments, the latter in fp32 whatever the parameters' dtype."""
        self._synchronize()
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            home = _home(param)
            if not home.slice.param.trainable:
                continue
            moments = self._moments(home)
            values = state_dict["state"].get(index)
            if values is None:
                for moment in moments.values():
                    moment.zero_()
                continue
            for name, moment in moments.items():
                moment.copy_(values[name])
            step = torch.as_tensor(values["step"], dtype=torch.float32, device="cpu").clone()
            self.state[param] = {"step": step, **moments}

    def _is_finite(self) -> bool:
        """Whether all gradients are; if not, counts and warns, or raises."""
        for executor in self._executors:
            executor.gradients.adopt_all()
        # meta tensors have no values
        real = [executor for executor in self._executors if executor.backend.device.type != "meta"]
        if all(math.isfinite(executor.norms.total(executor.gradients.scale)) for executor in real):
            return True
        message = "a gradient is NaN or infinite, or the square of the norm of all is beyond fp32"
        if not self._skip_nonfinite:
            raise RuntimeError(f"{message}: nothing was updated; AdamW(skip_nonfinite=True) skips such steps")
        for executor in real:
            executor.skipped_steps += 1
        warnings.warn(f"{message}: this step is skipped, nothing was updated", stacklevel=4)
        return False

    def _moments(self, home: Home) -> dict[str, torch.Tensor]:
        state = home.executor.shard(home.unit).state
        return {purpose: home.slice.state(state[purpose]) for purpose in (EXP_AVG, EXP_AVG_SQ)}

    def _queue(self, executor: Executor, runs: dict[int, list[Run]]) -> None:
        updates: dict[int, tuple[Callable[[], None], int]] = {}
        for unit in (executor.root, *executor.units):
            if unit.index in runs:
                # the root's gradients have been scaled already
                scale = 1.0 if unit is executor.root else executor.gradients.scale
                work = partial(update_shard, executor.shard(unit), runs[unit.index], scale)
                updates[unit.index] = (work, update_bytes(runs[unit.index]))
        executor.step(updates)

    def _synchronize(self) -> None:
        for executor in self._executors:
            executor.synchronize()


def _home(param: torch.Tensor) -> Home:
    home = home_of(param)
    if home is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} belongs to no wrapped model: call "
            "streamer.wrap(model, ...) before streamer.AdamW(model.parameters()), or use torch.optim.AdamW"
        )
    return home


def _check(group: dict[str, Any]) -> None:
    betas = group["betas"]
    for name, fits in (
        ("lr", 0 <= group["lr"] < math.inf),
        (
            "betas",
            isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        ),
        ("eps", 0 <= group["eps"] < math.inf),
        ("weight_decay", 0 <= group["weight_decay"] < math.inf),
    ):
        if not fits:
            raise ValueError(
                f"{name}={group[name]} is out of range: betas are two numbers in [0, 1), the others are "
                "finite and 0 or more"
            )
