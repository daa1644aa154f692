"""A step of an optimizer of PyTorch, taken for one part of the parameters at a time.

The masters of bf16 and fp16 weights are not in memory as fp32 tensors that an optimizer could update. So an
optimizer takes a step on stand-ins: fp32 parameters that are views of a scratch buffer, which holds one
part's masters and gradients at a time. The state is the optimizer's own: ordinary tensors, which it creates
itself.

There are three ways to take a step. `streamer.optim.replay.probe` finds the first that is exact:

- `Way.PARTS`: a step for each part, on its own. A part may wait until a forward needs it;
- `Way.PAGED`: one step for all parameters. Each part is copied to the scratch when the optimizer's loop
  reaches it. For optimizers that sum over all parameters in one loop and update in a second (Prodigy);
- `Way.WHOLE`: one step for all parameters, with the masters and gradients of all of them in memory at once.
  For optimizers that look at all parameters together, or draw random numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from streamer.optim.replay.rules import Memory, Rule
from streamer.optim.replay.shadow import CoupledError, StandIns, Values, plain_step, stand_in_for
from streamer.optim.replay.spill import Key, Spill


class Way(enum.Enum):
    """A way to take an optimizer's step."""

    PARTS = enum.auto()
    PAGED = enum.auto()
    WHOLE = enum.auto()


class Masters(Protocol):
    """The fp32 masters of a part of the parameters, and their gradients."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters of the model; each has a gradient."""

    def load(self, stand_ins: StandIns) -> None:
        """Point the stand-ins at the part's masters, and their ``grad`` at the gradients."""

    def store(self) -> None:
        """Write the masters in the stand-ins back."""


@dataclass(frozen=True)
class Call:
    """A call of an optimizer's ``step``, with a closure that has run, or of another method."""

    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = "step"

    def run(self, shadow: Optimizer) -> Any:
        """Call the method of ``shadow``, without the hooks that PyTorch adds to a step."""
        kind = type(shadow)
        function = plain_step(kind) if self.method == "step" else getattr(kind, self.method)
        with torch.no_grad():
            return function(shadow, *self.arguments, **self.options)


class MastersInPlace(Masters, Protocol):
    """Masters that a rule updates in place."""

    def each(self) -> Iterable[Memory]:
        """The memory of each parameter."""

    def store_in_place(self) -> None:
        """Write back the masters on disk."""


class StateInMemory:
    """The state of an optimizer's parameters, by the methods of ``dict``, which do not wait for updates."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def begin_fetch(self, params: Sequence[nn.Parameter]) -> None:
        """Announce that the state of ``params`` is needed after the next fetch."""

    def fetch(self, params: Sequence[nn.Parameter]) -> list[Any]:
        """The state of each of ``params``, empty if it has none."""
        held = self._optimizer.state
        return [dict.__getitem__(held, p) if dict.__contains__(held, p) else {} for p in params]

    def keep(self, params: Sequence[nn.Parameter], states: Sequence[Any]) -> None:
        """Store these states for ``params``."""
        for param, state in zip(params, states, strict=True):
            if state:
                dict.__setitem__(self._optimizer.state, param, state)


class StateOnDisk(StateInMemory):
    """The same, with the state of ``params`` (by identity) on disk."""

    def __init__(self, optimizer: Optimizer, spill: Spill, params: Collection[int]) -> None:
        super().__init__(optimizer)
        self._spill = spill
        self._params = params

    def begin_fetch(self, params: Sequence[nn.Parameter]) -> None:
        if id(params[0]) in self._params:
            self._spill.begin_read(_key(params), partial(super().fetch, params))

    def fetch(self, params: Sequence[nn.Parameter]) -> list[Any]:
        if id(params[0]) not in self._params:
            return super().fetch(params)
        return self._spill.fetch(_key(params), partial(super().fetch, params))

    def keep(self, params: Sequence[nn.Parameter], states: Sequence[Any]) -> None:
        if id(params[0]) not in self._params:
            super().keep(params, states)
            return
        old, keep = partial(super().fetch, params), partial(super().keep, params)
        self._spill.put_back(_key(params), old, states, keep)


def _key(params: Sequence[nn.Parameter]) -> Key:
    return tuple(map(id, params))


class Step:
    """One step of ``optimizer``, with the current options of its groups. Parts may be updated later."""

    def __init__(
        self, optimizer: Optimizer, stand_ins: StandIns, call: Call, states: StateInMemory | None = None
    ) -> None:
        self._optimizer = optimizer
        self.states = states or StateInMemory(optimizer)
        self._stand_ins = stand_ins
        self._call = call
        self.before = Values.of(optimizer)
        #: the values after the step
        self.after = self.before

    def foresee(self) -> None:
        """Find the values after the step, before any part is updated: a step without gradients only changes
        counters. Raises any error of the optimizer without gradients."""
        # not the stand-ins, which updates of the last step may still use
        blank = {key: stand_in_for(stand_in) for key, stand_in in self._stand_ins.items()}
        without_gradients = self.before.shadow(self._optimizer, blank, {})
        self._call.run(without_gradients)
        self.after = Values.of(without_gradients)

    def take(self, part: Masters) -> None:
        """Update ``part`` on its own. Raises CoupledError, and leaves its masters unchanged, if the
        optimizer's values depend on the part."""
        stand_ins = {id(param): self._stand_ins[id(param)] for param in part.params}
        part.load(stand_ins)
        shadow = self._shadow(stand_ins, part.params)
        self._call.run(shadow)
        if names := Values.of(shadow).differing(self.after):
            raise CoupledError(f"it sets {', '.join(names)} from single parameters")
        self._keep_state(shadow, part.params)
        part.store()

    def take_by_rule(self, rule: Rule, part: MastersInPlace, group: int) -> None:
        """Update the parameters of ``part``, which are of one group, in place."""
        states = self.states.fetch(part.params)
        for memory, state in zip(part.each(), states, strict=True):
            rule(memory, state, self.before.groups[group])
        self.states.keep(part.params, states)
        part.store_in_place()

    def take_all(self, parts: Sequence[Masters], *, paged: bool) -> Any:
        """Update all ``parts`` in one step, with all of them in memory at once unless it is ``paged``.
        Returns the result of the optimizer's ``step``."""
        params = [param for part in parts for param in part.params]
        shadow = self._shadow({id(param): self._stand_ins[id(param)] for param in params}, params)
        pager = _Pager(parts, self._stand_ins)
        if paged:
            for group in shadow.param_groups:
                group["params"] = _PagedParameters(group["params"], pager)
        else:
            for part in parts:
                part.load(self._stand_ins)
        result = self._call.run(shadow)
        if paged:
            pager.put_back()
        else:
            for part in parts:
                part.store()
        self._keep_state(shadow, params)
        self.after = Values.of(shadow)
        return result

    def apply(self) -> None:
        """Set the optimizer's values to those after the step."""
        self.after.apply_to(self._optimizer, self.before)

    def _shadow(self, stand_ins: StandIns, params: Sequence[nn.Parameter]) -> Optimizer:
        states = zip(params, self.states.fetch(params), strict=True)
        own = {id(param): state for param, state in states if state}
        return self.before.shadow(self._optimizer, stand_ins, own)

    def _keep_state(self, shadow: Optimizer, params: Sequence[nn.Parameter]) -> None:
        states = [shadow.state.get(self._stand_ins[id(param)], {}) for param in params]
        self.states.keep(params, states)


class _Pager:
    """Copies a part to the scratch when a loop over parameters reaches it."""

    def __init__(self, parts: Sequence[Masters], stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._part_of = {id(stand_ins[id(param)]): part for part in parts for param in part.params}
        self._here: Masters | None = None

    def fetch(self, stand_in: nn.Parameter) -> nn.Parameter:
        part = self._part_of[id(stand_in)]
        if part is not self._here:
            self.put_back()
            part.load(self._stand_ins)
            self._here = part
        return stand_in

    def put_back(self) -> None:
        if self._here is not None:
            self._here.store()
            self._here = None


class _PagedParameters(list[nn.Parameter]):
    """A group's parameters; each is in the scratch during its turn in a loop."""

    def __init__(self, params: Sequence[nn.Parameter], pager: _Pager) -> None:
        super().__init__(params)
        self._pager = pager

    def __iter__(self) -> Iterator[nn.Parameter]:
        for param in list.__iter__(self):
            yield self._pager.fetch(param)
        self._pager.put_back()
