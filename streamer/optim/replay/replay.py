"""The steps of PyTorch's optimizers on the masters of a wrapped model.

    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()

`step` queues an update for each unit and returns, as `streamer.AdamW.step` does. The update of a unit, in the
HOST lane, goes through the unit's parameters in parts of a few million elements. Masters and gradients of a
part are widened into a scratch buffer, the optimizer's own class takes a step on them, and the masters are
split again. See `streamer.optim.replay.step`.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from typing import Any, cast
from zlib import crc32

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain, never_traced, unguarded
from streamer.engine.handle import home_of
from streamer.engine.paging.across_ranks import Reduced
from streamer.engine.paging.disk_pager import WholeUpdate
from streamer.engine.paging.early_updates import Update
from streamer.engine.unit import Unit
from streamer.optim.replay.probe import way_of
from streamer.optim.replay.room import held_bytes, needed_by
from streamer.optim.replay.rules import rule_of
from streamer.optim.replay.shadow import CoupledError, StandIns, Values, plain_step, stand_in_for
from streamer.optim.replay.shard_parts import (
    SCRATCH_BYTES,
    Member,
    OnShard,
    Part,
    members_of,
    parts_of,
    place,
    used_parts,
)
from streamer.optim.replay.spill import IN_MEMORY, Spill
from streamer.optim.replay.step import Call, Masters, StateInMemory, StateOnDisk, Step, Way
from streamer.optim.replay.waiting_state import WaitingState
from streamer.store import placement
from streamer.store.ledger import UNLIMITED, require
from streamer.store.purposes import ALL_MOMENTS, BF16, FP16, FP32, OPTIMIZER_STATE, UPDATE_SCRATCH
from streamer.store.shard import HostShard


class Replay:
    """The steps of one optimizer of PyTorch, which has this in its attribute ``_streamer``."""

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        self.executor = executor
        self._optimizer = weakref.ref(optimizer)
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._states = StateInMemory(optimizer)
        #: the identities of the parameters whose state is on disk
        self._on_disk = set[int]()
        #: the identities of the parameters that `prepare` has checked
        self._known: list[int] = []
        self._way: Way | None = None
        #: why no `Way` is exact; empty if one is, or before the search
        self._refusal = ""
        #: the step whose updates backward has begun (``update="backward"``)
        self._begun: Step | None = None
        self.check_ranks(type(optimizer).__name__)
        executor.across.divide_by_parameter()
        if not executor.gradients.are_kept:
            executor.gradients.early.add(self._update_in_backward)

    def take_over(self, params: Iterable[nn.Parameter]) -> None:
        """Become the one optimizer that updates ``params`` in backward, in place of an earlier one."""
        if not self.executor.gradients.are_kept:
            names = {home.slice.param.name: self for param in params if (home := home_of(param)) is not None}
            self.executor.updated_by.update(names)

    # before the first step

    def prepare(self, optimizer: Optimizer, call: Call) -> None:
        """Find a way to take steps, and check that the optimizer's state fits in host memory.

        Raises RuntimeError for an optimizer whose steps cannot be taken on 16-bit weights, MemoryError if
        the state does not fit, and any error of the optimizer in a step on tiny tensors.
        """
        if not isinstance(optimizer.state, WaitingState):  # new, or replaced by the user's code
            _widen_state(optimizer)
            optimizer.state = WaitingState(optimizer.state)
        if self._is_known(optimizer):
            return
        kind, executor = type(optimizer), self.executor
        if all(rule_of(kind, group, BF16) for group in optimizer.param_groups):  # no rule couples parameters
            self._way = Way.PARTS
        else:
            try:
                self._way = way_of(optimizer, call)
            except CoupledError as error:
                self._refuse(optimizer, str(error))
        if not self._refusal:
            if self._way is not Way.PARTS and executor.store.is_divided:
                raise RuntimeError(
                    f"{kind.__name__} looks at all parameters together, which machines divide: use a process "
                    "group of machines that are replicas (a mesh of two dimensions), or another optimizer"
                )
            is_alone = executor.ranks.is_alone
            if self._way is not Way.PARTS and not is_alone and None in map(home_of, _params(optimizer)):
                raise RuntimeError(
                    f"{kind.__name__} looks at all parameters together, and only one of several ranks takes "
                    "its step: use another optimizer for the parameters outside of the wrapped model"
                )
            self._require_room(optimizer, call)
            self._drop_state_of_others(optimizer)
        self._known = [*map(id, _params(optimizer))]

    def _is_known(self, optimizer: Optimizer) -> bool:
        """Whether `prepare` has checked the optimizer with its current parameters."""
        for param in _params(optimizer):
            if id(param) not in self._stand_ins:
                self._stand_ins[id(param)] = stand_in_for(param)
        return self._known == [*map(id, _params(optimizer))]

    def _refuse(self, optimizer: Optimizer, why: str) -> None:
        name, executor = type(optimizer).__name__, self.executor
        rounded = {str(param.dtype) for param in _params(optimizer) if param.dtype in (BF16, FP16)}
        remedy = "stream fp32 weights (streamer.wrap(dtype=torch.float32)), or use another optimizer"
        if rounded:
            raise RuntimeError(f"{name} cannot update the fp32 masters of 16-bit weights: {why}; {remedy}")
        if not (executor.gradients.are_kept and executor.ranks.is_alone):
            raise RuntimeError(f"{name} needs update='step' and one process: {why}; use another optimizer")
        self._refusal = why

    def _require_room(self, optimizer: Optimizer, call: Call) -> None:
        """Raise MemoryError unless the state fits in host memory and the model's disk."""
        executor, ranks, here = self.executor, self.executor.ranks, self.executor.store.division.ranks
        of_units = self._parts(optimizer, self._members(optimizer))
        parts = [*chain(*of_units.values())]
        needed = needed_by(optimizer, self._is_mine, call)
        held = sum(held_bytes(dict.__getitem__(optimizer.state, key)) for key in dict.keys(optimizer.state))
        counted = executor.host.optimizer_state.get(self, 0)
        # state that a constructor or a checkpoint has created is in memory, but under a limit not counted yet
        present = counted if executor.host.limit < UNLIMITED else max(held, counted)
        more = max(0, sum(needed.values()) - present)
        scratch = max((part.stop for part in parts), default=0) * SCRATCH_BYTES
        scratch = max(0, scratch - executor.host.scratch_bytes())
        ring = IN_MEMORY * max((sum(needed[id(p)] for p in part.params) for part in parts), default=0)
        # the rank with the most decides for all
        of_all = ranks.exchange("room for the state of an optimizer", (more, scratch, ring))
        more, scratch, ring = map(max, zip(*of_all, strict=True))
        remedy = "use streamer.AdamW with state_dtype='int8', or freeze parameters"
        what = f"the state of {type(optimizer).__name__}"
        room = executor.host.room_of_all({OPTIMIZER_STATE: more, UPDATE_SCRATCH: scratch}, remedy)
        room = replace(room, available=ranks.least("the bytes of free host memory", room.available))
        if not room.lacking:
            executor.host.optimizer_state[self] = sum(needed.values())
            return
        left = room.available // here - scratch - ring
        if not executor.store.can_move or self._way is not Way.PARTS or not executor.gradients.are_kept:
            require(what, room)
        require(what, replace(room, needed=(scratch + ring) * here))
        # the units updated first go first
        units = [[id(param) for part in of_unit for param in part.params] for of_unit in of_units.values()]
        sizes = {number: sum(needed[param] for param in params) for number, params in enumerate(units)}
        _, gone = placement.place([placement.Way(0, sizes)], left)
        self._spill(optimizer, {param for number in gone for param in units[number]})
        on_disk = sum(needed[param] for param in self._on_disk)
        executor.host.optimizer_state[self] = sum(needed.values()) - on_disk + ring
        executor.host.optimizer_state_on_disk[self] = on_disk

    def _spill(self, optimizer: Optimizer, params: set[int]) -> None:
        """Spill the state of these parameters to disk."""
        state = cast(WaitingState, optimizer.state)
        if state.spill is None:
            store = self.executor.store
            disk = store.disks.open(shared=False)
            store.scratch[f"{OPTIMIZER_STATE} {id(self)}"] = disk
            state.spill = Spill(disk, store.disks.buffer)
        spill = state.spill
        self._on_disk = params
        self._states = StateOnDisk(optimizer, spill, params)
        for part in chain(*self._parts(optimizer, self._members(optimizer)).values()):
            if id(part.params[0]) in params:
                self._states.keep(part.params, StateInMemory(optimizer).fetch(part.params))
        spill.finish()

    def _members(self, optimizer: Optimizer) -> dict[int, list[Member]]:
        """The optimizer's parameters by unit, in the order in which the executor issues updates."""
        return members_of(optimizer, (self.executor.root, *self.executor.units))

    def _parts(self, optimizer: Optimizer, members: Mapping[int, Sequence[Member]]) -> dict[int, list[Part]]:
        """The parts of those of ``members`` that this rank updates, by unit, each with its place in the
        scratch. Every rank has all units."""
        mine = {
            index: [each for each in of_unit if self._is_mine(each[1])] for index, of_unit in members.items()
        }
        parts = parts_of(optimizer, mine)
        place([*chain(*parts.values())], together=self._way is Way.WHOLE)
        return parts

    def _is_mine(self, param: nn.Parameter) -> bool:
        """Whether this rank updates the parameter, and has its state."""
        home = home_of(param)
        if home is None:
            return False
        if self._way is not Way.PARTS:
            return self.executor.ranks.is_first_of_machine
        return home.slice.index in self.executor.shard(home.unit).updated.elements

    def check_ranks(self, name: str) -> None:
        """Raise RuntimeError if there are several ranks and only streamer.AdamW supports the set-up."""
        executor = self.executor
        store = executor.store
        if executor.ranks.is_alone or store.division.by_parameter:
            return
        if store.on_disk() or not all(shard.weights_on_disk.is_empty for shard in store.shards):
            raise RuntimeError(
                f"{name} on several ranks needs weights and masters in host memory, and some are on disk: "
                "raise host_memory, or use streamer.AdamW for all parameters"
            )
        if store.is_divided and store.holds_some(ALL_MOMENTS):
            raise RuntimeError(
                f"{name} on several machines must be created before streamer.AdamW: create it first, or use "
                "streamer.AdamW for all parameters"
            )

    # a step

    @never_traced
    def step(self, optimizer: Optimizer, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """``optimizer.step(...)``."""
        executor = self.executor
        if executor.released:
            raise RuntimeError(
                "the model that this optimizer updates was unwrapped: create an optimizer for the plain model"
            )
        bound = inspect.signature(plain_step(type(optimizer))).bind(optimizer, *arguments, **options)
        closure = bound.arguments.get("closure")
        with unguarded():
            self.prepare(optimizer, _call(bound, closure and (lambda: torch.ones(()))))
        if self._refusal:
            return self._step_in_place(optimizer, bound, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), unguarded():
            result = self._step(optimizer, _call(bound, closure and (lambda: loss)))
            return loss if result is None else result

    def _step(self, optimizer: Optimizer, call: Call) -> Any:
        executor = self.executor
        for index in self._members(optimizer):
            executor.check_idle(executor.unit(index))
        early = executor.gradients.early
        if not executor.gradients.are_kept:
            executor.gradients.check_unwritten()
            early.next_step(self._update_in_backward)
        overflows, factor = _of_scaler(optimizer)
        if self._begun is not None and factor != 1:
            raise RuntimeError(
                "update='backward' has updated layers before GradScaler could unscale the gradients: wrap "
                "with update='step', or train in bfloat16 without a scaler"
            )
        if overflows:
            executor.skipped_steps += 1
            return None
        step = self._begun or self._new_step(optimizer, call)
        self._begun = None
        updates = self._updates(optimizer, step, executor.gradients.factor * factor)
        description = f"{type(optimizer).__name__}, checksum {crc32(repr(step.before.groups).encode()):08x}"
        plain = [param for param in _params(optimizer) if home_of(param) is None and param.grad is not None]
        elsewhere = [_Elsewhere(plain)] if plain else []
        result = None
        if self._way is Way.PARTS:
            for part in elsewhere:
                step.take(part)
            executor.step({index: (update, update.nbytes) for index, update in updates.items()}, description)
        else:
            result = self._step_together(step, updates, elsewhere, description)
        step.apply()
        return result

    def _updates(self, optimizer: Optimizer, step: Step, scale: float | None) -> dict[int, _UnitUpdate]:
        """By unit, the updates of the parameters with a gradient, or of all if ``scale`` is None."""
        members = self._members(optimizer)
        if scale is not None:
            members = {
                index: with_gradient
                for index, of_unit in members.items()
                if (with_gradient := [each for each in of_unit if each[1].grad is not None])
            }
        parts = self._parts(optimizer, members)
        scratch = self.executor.host.scratch(max((part.stop for part in chain(*parts.values())), default=0))
        updates = {
            index: _UnitUpdate([param for _, param in members[index]], of_unit, scratch, scale, step)
            for index, of_unit in parts.items()
        }
        for update, following in pairwise(updates.values()):
            update.following = following.parts[:1]
        return updates

    def _step_together(
        self, step: Step, updates: Mapping[int, _UnitUpdate], elsewhere: Sequence[Masters], description: str
    ) -> Any:
        """Update all parameters in one step, and wait for it; one rank of each machine takes the step."""
        executor = self.executor
        executor.synchronize()
        together = _TogetherUpdate(executor, updates, elsewhere, step, paged=self._way is Way.PAGED)
        # the update issued first updates all units
        work: dict[int, tuple[WholeUpdate, int]] = {
            index: (_Nothing(update.params), 0) for index, update in updates.items()
        }
        for index in [*updates][:1]:
            work[index] = together, sum(update.nbytes for update in updates.values())
        executor.step(work, description)
        if not updates:
            together.take()
        executor.synchronize()
        after = step.after
        mine = after.groups, after.attributes, after.state, together.result
        of_all = executor.ranks.exchange(f"the values after a step of {description}", mine)
        groups, attributes, others, result = executor.ranks.of_shares(of_all)[0]
        step.after = Values(groups, attributes, others, after.params)
        return result

    def _new_step(self, optimizer: Optimizer, call: Call) -> Step:
        step = Step(optimizer, self._stand_ins, call, self._states)
        if self._way is Way.PARTS:
            step.foresee()
        return step

    def call(self, optimizer: Optimizer, method: str) -> None:
        """Call a method without arguments that may change weights and state (``eval`` of schedule-free
        optimizers)."""
        with torch.no_grad(), unguarded():
            if self._refusal or (self._way is None and not dict.keys(optimizer.state)):
                getattr(type(optimizer), method)(optimizer)  # without state it changes no weights
                return
            step = Step(optimizer, self._stand_ins, Call(method=method), self._states)
            step.foresee()
            updates = self._updates(optimizer, step, scale=None)
            self.executor.step({index: (update, update.nbytes) for index, update in updates.items()}, method)
            step.apply()

    def state_dict(self, optimizer: Optimizer, *, from_disk: bool = True) -> dict[str, Any]:
        """``optimizer.state_dict()``, with the state of all ranks; every rank must call it. ``from_disk``
        reads tensors on disk, otherwise an `OnDisk` stands in their place, and of several ranks only the
        first one gets the state of all."""
        held = cast(WaitingState, optimizer.state)
        if not self.executor.ranks.is_alone:
            optimizer.state = self._state_of_all(optimizer, from_disk=from_disk)
        elif not from_disk:
            held.wait(dict.keys(held))
            optimizer.state = defaultdict(dict, {key: dict.__getitem__(held, key) for key in dict.keys(held)})
        try:
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state = held

    def _state_of_all(self, optimizer: Optimizer, *, from_disk: bool) -> defaultdict[Any, Any]:
        ranks, disks, found = self.executor.ranks, self.executor.store.disks, defaultdict[Any, Any](dict)
        # the state of others goes to files of its own, which are freed with the result
        spill = None
        if not from_disk and ranks.is_first and self.executor.store.can_move:
            spill = Spill(disks.open(shared=False), disks.buffer)
        for number, param in enumerate(_params(optimizer)):
            mine = optimizer.state.get(param)
            words = f"the state of parameter {number} of {type(optimizer).__name__}"
            held = [state for state in ranks.exchange(words, mine) if state]
            if held and (from_disk or ranks.is_first):
                state = mine or held[0]
                found[param] = state if spill is None else spill.write(state)
        return found

    def _drop_state_of_others(self, optimizer: Optimizer) -> None:
        for param in [*_params(optimizer)]:
            if home_of(param) is not None and not self._is_mine(param):
                dict.pop(optimizer.state, param, None)

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """``optimizer.load_state_dict(state_dict)``. PyTorch casts the state to the device and dtype of the
        parameters. Here these are stand-ins, so the state is in fp32 on the host."""
        params = [*_params(optimizer)]
        self._is_known(optimizer)
        param_of = {id(self._stand_ins[id(param)]): param for param in params}
        self.executor.synchronize()
        state, spill = optimizer.state, getattr(optimizer.state, "spill", None)
        try:
            optimizer.state = defaultdict(dict)
            self._swap(optimizer, self._stand_ins)
            type(optimizer).load_state_dict(optimizer, state_dict)
            loaded = optimizer.state
            state = WaitingState({param_of.get(id(key), key): loaded[key] for key in loaded})
            state.spill = spill
        finally:
            optimizer.state = state
            self._swap(optimizer, param_of)
        if self._on_disk:
            self._spill(optimizer, self._on_disk)
        if self._way is not None:
            self._drop_state_of_others(optimizer)

    @staticmethod
    def _swap(optimizer: Optimizer, others: Mapping[int, nn.Parameter]) -> None:
        for group in optimizer.param_groups:
            group["params"] = [others.get(id(param), param) for param in group["params"]]

    # update="backward"

    @as_plain
    def _update_in_backward(self, unit: Unit, used: Sequence[bool]) -> Update | None:
        """The update of ``unit`` in backward, from the gradients of its ``used`` parameters."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        owner = self.executor.updated_by
        wanted = {
            id(param)
            for (slice, param), is_used in zip(unit.placed(), used, strict=False)
            if is_used and owner.get(slice.param.name) is self
        }
        members = members_of(optimizer, [unit])
        mine = {
            index: [each for each in of_unit if id(each[1]) in wanted] for index, of_unit in members.items()
        }
        if not mine.get(unit.index):
            return None
        self.prepare(optimizer, Call())
        if self._way is not Way.PARTS:
            raise RuntimeError(
                f"{type(optimizer).__name__} looks at all parameters together, so it cannot update layers in "
                "backward: wrap with update='step'"
            )
        if self.executor.shard(unit).disk.own:
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot update layers in backward with masters on disk: wrap "
                "with update='step', or use streamer.AdamW"
            )
        parts = self._parts(optimizer, mine)[unit.index]
        scratch = self.executor.host.scratch(max((part.stop for part in parts), default=0))
        update = _UnitUpdate([param for _, param in mine[unit.index]], parts, scratch, 1.0, None)
        update.positions = {id(param): number for number, param in enumerate(unit.trainable)}

        def begin() -> None:
            self._begun = self._begun or self._new_step(optimizer, Call())
            update.step = self._begun

        return Update(update, update.nbytes, begin)

    # optimizers that need fp32 weights

    def _step_in_place(self, optimizer: Optimizer, bound: inspect.BoundArguments, closure: Any) -> Any:
        """A step on fp32 weights in their own memory, once all work on them is done."""
        executor = self.executor
        overflows, factor = _of_scaler(optimizer)
        if overflows:
            executor.skipped_steps += 1
            return None
        executor.gradients.rescale(factor)
        self._settle(optimizer)
        if closure is not None:

            def settled() -> Any:
                loss = closure()
                self._settle(optimizer)
                return loss

            bound.arguments["closure"] = settled
        try:
            return plain_step(type(optimizer))(*bound.args, **bound.kwargs)
        finally:
            # an optimizer may write weights without autograd's knowledge
            torch.autograd.graph.increment_version([*_params(optimizer)])
            executor.fit_budget()
            executor.end_pass()

    def _settle(self, optimizer: Optimizer) -> None:
        """Prepare gradients and weights for the optimizer's step."""
        executor = self.executor
        executor.check_thread(executor.caller())
        for index in self._members(optimizer):
            executor.check_idle(executor.unit(index))
        executor.synchronize()
        executor.gradients.settle()
        executor.gradients.narrow({*_params(optimizer)})
        torch.autograd.graph.increment_version([*_params(optimizer)])


class _Elsewhere:
    """Parameters outside of every wrapped model: they are their own masters."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params

    def load(self, stand_ins: StandIns) -> None:
        for param in self.params:
            stand_ins[id(param)].data, stand_ins[id(param)].grad = param.data, param.grad

    def store(self) -> None:
        torch.autograd.graph.increment_version([*self.params])


class _UnitUpdate(WholeUpdate):
    """The update of one unit's parts, in the HOST lane."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        parts: Sequence[Part],
        scratch: torch.Tensor,
        scale: float | None,
        step: Step | None,
    ) -> None:
        super().__init__(params)
        self.parts = parts
        self.scratch = scratch
        self.scale = scale
        self.step = step
        #: the part that is updated next in another unit, if any
        self.following: Sequence[Part] = ()
        #: a parameter's index in its unit, by the parameter's identity
        self.positions: Mapping[int, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(
        self, shard: HostShard, *, gradient: torch.Tensor | None = None, reduced: Reduced | None = None
    ) -> None:
        assert self.step is not None, "it begins when the update is issued"
        shard.about_to_change()
        if reduced is not None:
            self.parts = used_parts(self.parts, self.positions, reduced.used())
        for part, following in zip_longest(self.parts, [*self.parts[1:], *self.following]):
            if part is None:
                break
            self.step.states.begin_fetch(part.params)
            if following is not None:
                self.step.states.begin_fetch(following.params)
            memory = OnShard(part, shard, self.scratch, self.scale, gradient)
            if part.kind.rule is None or self.scale is None:
                self.step.take(memory)
            else:
                self.step.take_by_rule(part.kind.rule, memory, part.kind.group)


class _TogetherUpdate(WholeUpdate):
    """The update of all units' parts by one step, in the HOST lane."""

    def __init__(
        self,
        executor: Executor,
        updates: Mapping[int, _UnitUpdate],
        elsewhere: Sequence[Masters],
        step: Step,
        *,
        paged: bool,
    ) -> None:
        super().__init__([param for update in [*updates.values()][:1] for param in update.params])
        self._shards = {index: executor.shard(executor.unit(index)) for index in updates}
        self._updates = updates
        self._elsewhere = elsewhere
        self._step = step
        self._paged = paged
        #: the result of the optimizer's step
        self.result: Any = None

    def __call__(self, shard: HostShard) -> None:
        self.take()

    def take(self) -> None:
        """Take the step."""
        for each in self._shards.values():
            each.about_to_change()
        parts: list[Masters] = [
            OnShard(part, self._shards[index], update.scratch, update.scale)
            for index, update in self._updates.items()
            for part in update.parts
        ]
        if parts or not self._updates:  # else another rank of this machine takes the step
            self.result = self._step.take_all([*parts, *self._elsewhere], paged=self._paged)


class _Nothing(WholeUpdate):
    """The empty update of a unit that another unit's update includes."""

    def __call__(self, shard: HostShard) -> None:
        pass


def _of_scaler(optimizer: Optimizer) -> tuple[bool, float]:
    """Whether GradScaler has found a gradient that is not finite, and the factor that it wants gradients
    multiplied by."""
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    return found_inf is not None and bool(found_inf.item()), 1.0 if scale is None else 1 / float(scale)


def _call(bound: inspect.BoundArguments, closure: Callable[[], Any] | None) -> Call:
    """The call of a step with ``closure`` in place of the user's closure."""
    arguments = {**bound.arguments}
    if closure is not None:
        arguments["closure"] = closure
    again = inspect.BoundArguments(bound.signature, arguments)
    return Call(tuple(again.args[1:]), again.kwargs)


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _widen_state(optimizer: Optimizer) -> None:
    """Move state that the optimizer's constructor created in the dtype and on the device of 16-bit weights to
    fp32 on the host."""
    for param in [*dict.keys(optimizer.state)]:
        if isinstance(param, torch.Tensor) and home_of(param) is not None:
            state = dict.__getitem__(optimizer.state, param)
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "step" and value.is_floating_point():
                    state[name] = value.to("cpu", FP32)
