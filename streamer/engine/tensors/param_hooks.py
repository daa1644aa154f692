"""The user's hooks on parameters of layers.

[Note: parameter hooks]
The gradient of a layer's parameter is made in the layer's own graph and leaves for the host from there, so
the hooks on the parameter are called there, with the gradient that is about to leave (`Collector.finish`).
The user's graph has the parameter too ([Note: parameters in the graph]), but brings it no gradient: PyTorch
then calls the hooks with None, which no hook expects. `shield` prevents that.

A hook on a plain parameter sees the sum of all gradients of a backward. Here it would see those of two visits
of a layer, or of a layer and of a penalty on its weights, one after the other, so that is refused. So it is
for a parameter of the root that layers use: the backward of each layer adds to its gradient by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from streamer.engine.tensors.guarded import as_plain
from streamer.memory.layout import Slice
from streamer.torch_private import backward_number

Hook = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class _Shielded:
    """A hook that is called for gradients only, not for None."""

    hook: Hook

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self.hook(gradient)


class OwnHook:
    """What a hook of streamer's own inherits from, in place of a hook of the user's."""


_HOOKS = attrgetter("_backward_hooks")
_ACCUMULATION_HOOKS = attrgetter("_post_accumulate_grad_hooks")


@as_plain
def hooks_of_all(params: Iterable[torch.Tensor]) -> list[list[Hook]]:
    """The hooks that the user has put on each of ``params``."""
    all_hooks = [hooks or {} for hooks in map(_HOOKS, params)]
    # asked at every visit, and most parameters have none of the user's
    kinds = {*map(type, chain.from_iterable(map(dict.values, all_hooks)))}
    if all(issubclass(kind, OwnHook) for kind in kinds):
        return [[]] * len(all_hooks)
    return [[hook for hook in hooks.values() if not isinstance(hook, OwnHook)] for hooks in all_hooks]


def hooks_of(param: torch.Tensor) -> list[Hook]:
    """The hooks that the user has put on ``param``."""
    return hooks_of_all((param,))[0]


@as_plain
def shield(params: Iterable[nn.Parameter]) -> None:
    """Let the hooks of the user's that are on ``params`` now not be called with None. [Note: parameter
    hooks]"""
    for param in params:
        hooks = param._backward_hooks or {}
        for key, hook in list(hooks.items()):
            if not isinstance(hook, OwnHook | _Shielded):
                hooks[key] = _Shielded(hook)


@as_plain
def check_hooks(slices: Iterable[Slice], params: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for a hook that cannot be served."""
    params = [*params]
    if not any(map(_ACCUMULATION_HOOKS, params)):
        return
    for slice, param in zip(slices, params, strict=False):
        if param._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{slice.param.name}' has a post-accumulate-grad hook, which would not run: use "
                "param.register_hook, or look at p.grad after backward; update='backward' updates layers as "
                "their gradients come"
            )


class OncePerBackward:
    """Checks that a hook is called with one gradient in a backward. [Note: parameter hooks]"""

    def __init__(self) -> None:
        self._task = -1
        self._seen: set[int] = set()
        #: the backward in which a layer's own backward is running
        self._outer: int | None = None

    @contextmanager
    def in_layer(self) -> Iterator[None]:
        """A layer's own backward runs inside the block: it belongs to the backward that is running."""
        before = self._outer
        if before is None:
            self._outer = backward_number()
        try:
            yield
        finally:
            self._outer = before

    def check(self, slices: Iterable[Slice], params: Sequence[torch.Tensor]) -> None:
        """Note that ``params`` get a gradient each. Raise RuntimeError if one of them has a hook, and got a
        gradient before in the backward that is running."""
        all_hooks = hooks_of_all(params)
        if any(all_hooks):
            for slice, param, hooks in zip(slices, params, all_hooks, strict=True):
                if hooks:
                    self._check(slice, param)

    def check_added(self, slice: Slice, param: torch.Tensor) -> None:
        """Note that autograd is about to add to the gradient of ``param``. Raise RuntimeError as `check`
        does, for a hook that runs after that too."""
        after = (_ACCUMULATION_HOOKS(param) or {}).values()
        if hooks_of(param) or not all(isinstance(hook, OwnHook) for hook in after):
            self._check(slice, param)

    def _check(self, slice: Slice, param: torch.Tensor) -> None:
        task = backward_number() if self._outer is None else self._outer
        if self._task != task:
            self._task = task
            self._seen.clear()
        if id(param) in self._seen:
            raise RuntimeError(
                f"'{slice.param.name}' has a hook and is used more than once in this backward (its layer was "
                "called twice, or it is used outside of it too, or in several layers or micro-batches), so "
                "that the hook would see its gradient in parts: change p.grad after backward instead"
            )
        self._seen.add(id(param))
