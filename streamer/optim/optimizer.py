"""`streamer.Optimizer`: an optimizer of any class, with all checks at its construction.

optimizer = streamer.Optimizer(torch.optim.Muon, model.parameters(), lr=1e-3)
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from streamer.engine.guard import unguarded
from streamer.engine.handle import require_home
from streamer.optim.replay.shadow import original, plain_step, stand_in_for
from streamer.optim.replay.step import Call
from streamer.optim.torch_optimizers import attach

Kind = TypeVar("Kind", bound=TorchOptimizer)


def Optimizer(  # noqa: N802  # it constructs an object, as a class does
    kind: type[Kind], params: Iterable[Any], **options: Any
) -> Kind:
    """An optimizer of the class ``kind`` over parameters of a wrapped model; ``options`` are the class's own.

    The result is the object ``kind(params, **options)``, and takes the same exact steps on fp32 masters.
    Two things happen earlier. An optimizer whose steps cannot be exact is refused here, as is one whose state
    does not fit in host memory. State that the constructor creates (`torch.optim.Adagrad`) is in fp32 from
    the start.

    ``params`` are parameters, parameter groups or (name, parameter) pairs, of one wrapped model. Raises
    ValueError for parameters of no wrapped model or of two, RuntimeError for an optimizer that needs fp32
    weights, and MemoryError if the state does not fit.
    """
    items = [params] if isinstance(params, torch.Tensor) else [*params]
    stand_ins: dict[int, nn.Parameter] = {}

    def stand_in(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            require_home(item)
            if id(item) not in stand_ins:
                stand_ins[id(item)] = stand_in_for(item)
            return stand_ins[id(item)]
        if isinstance(item, Mapping):
            inside = item["params"]
            inside = [inside] if isinstance(inside, torch.Tensor) else [*inside]
            return {**item, "params": [stand_in(each) for each in inside]}
        name, param = item
        return name, stand_in(param)

    optimizer = kind([stand_in(item) for item in items], **options)
    with unguarded():
        for group in optimizer.param_groups:
            group["params"] = [original(param) for param in group["params"]]
        state = {_original_key(key): value for key, value in optimizer.state.items()}
        optimizer.state = defaultdict(dict, state)
        for group in optimizer.param_groups:
            attach(optimizer, group)
        optimizer._streamer.prepare(optimizer, _usual_call(kind))  # type: ignore[attr-defined]
    return optimizer


def _original_key(key: Any) -> Any:
    return original(key) if isinstance(key, torch.Tensor) else key


def _usual_call(kind: type[TorchOptimizer]) -> Call:
    """A call of ``step``, with a closure if the class requires one."""
    parameters = inspect.signature(plain_step(kind)).parameters
    wants = "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty
    return Call((lambda: torch.ones(()),)) if wants else Call()
