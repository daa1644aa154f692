"""What guarded tensors of one wrapped model wait for. [Note: what the user sees]"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from zlib import crc32

import torch

from streamer.backends.ranks import together
from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule.op import ROOT
from streamer.engine.tensors.guarded import (
    GUARD,
    Function,
    Guarded,
    GuardedTensor,
    guard_parameter,
    is_in_graph,
    unguard_parameter,
    unguarded,
    written_by,
)
from streamer.engine.tensors.nested import walk
from streamer.memory.host import with_own_storage
from streamer.torch_private import check_finite, storage_owners, take_copies

#: Of weights on disk, those of so many units stay in memory until others are asked for.
KEPT_UNITS = 2


class _UnitGuard:
    """Waits for the update of ``unit``.

    It holds neither the executor nor the unit: the garbage collector does not see that a parameter holds its
    gradient, nor thus a circle through both.
    """

    def __init__(self, executor: Executor, unit: Unit) -> None:
        self._executor = weakref.ref(executor)
        self._index = unit.index
        self.lock = executor.lock

    def before(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if (executor := self._executor()) is None:
            return True
        executor.await_update(executor.unit(self._index))
        self._await_copies(executor, function, args, kwargs)
        if executor.across is None or executor.released:
            return True
        return _begin_writing(executor.across, function, args, kwargs)

    def _await_copies(
        self, executor: Executor, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Wait for the numbers that PyTorch lets a GPU copy to the host, if ``function`` is given some."""
        if function not in take_copies:
            return
        # for the first of the tensors, once for all
        first = next((vars(item).get(GUARD) for item in args[0] if isinstance(item, Guarded)), self)
        numbers = [item for item in (*args[1:], *kwargs.values()) if isinstance(item, torch.Tensor)]
        if numbers and first is self and numbers[0].device.type == "cpu":
            executor.backend.finish_compute()

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        if (executor := self._executor()) is not None and executor.across is not None:
            _end_writing(executor, executor.across, function, args)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("what belongs to a wrapped model cannot be pickled: save model.state_dict()")


class _CopyGuard(_UnitGuard):
    """Refuses writes in place into a copy of the optimizer's state, which would reach nothing."""

    def before(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if any(tensor.__dict__.get(GUARD) is self for tensor in written_by(function, args, kwargs)):
            raise RuntimeError(
                "this is a copy of a moment that is divided among machines: assign what you want it to be "
                "(optimizer.state[p]['exp_avg'] = tensor), on all ranks"
            )
        return True

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        return


class _MomentGuard(_UnitGuard):
    """Sees also who can read and write the moment without waiting."""

    #: of the moment's memory
    holders = 0

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        super().after(function, args, tensor, result, gave)
        if gave and (executor := self._executor()) is not None:
            executor.lend_moment(executor.unit(self._index), tensor, self.holders)


class _ParameterGuard(_UnitGuard):
    """Sees also who can write the parameter at ``position`` unseen. [Note: lent parameters]"""

    def __init__(self, executor: Executor, unit: Unit, position: int) -> None:
        super().__init__(executor, unit)
        self._position = position

    def check_hook(self) -> None:
        """Raise RuntimeError for a parameter of a layer, whose gradient does not pass the user's graph."""
        executor = self._executor()
        if executor is not None and self._index != ROOT:
            raise RuntimeError(
                f"{self._name(executor)} is in a streamed layer, where a tensor hook would not run: use "
                "param.register_post_accumulate_grad_hook, or look at p.grad after backward"
            )

    def _name(self, executor: Executor) -> str:
        return f"'{executor.unit(self._index).layout.slices[self._position].param.name}'"

    def before(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if (
            function is torch.autograd.grad
            and self._index != ROOT
            and (executor := self._executor()) is not None
        ):
            raise RuntimeError(
                f"torch.autograd.grad does not go to {self._name(executor)}, which is in a streamed layer: "
                "call loss.backward() and take p.grad"
            )
        is_to_write = super().before(function, args, kwargs)
        across = None if (executor := self._executor()) is None else executor.across
        if across is not None and across.writing is args:
            across.written.add(self._index)
            if self._index == ROOT:
                across.written_of_root.add(self._position)
        # each rank has the root's weights on its device
        return is_to_write or self._index == ROOT

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        is_copied = function is torch.Tensor.copy_ and args[0] is tensor
        if is_copied and (executor := self._executor()) is not None and not executor.released:
            # before other ranks go on
            executor.weights.copied_in(executor.unit(self._index), self._position, args[1])
        super().after(function, args, tensor, result, gave)
        if gave and (executor := self._executor()) is not None:
            unit = executor.unit(self._index)
            executor.weights.lend(unit, self._position, to_read=is_in_graph(result))
        if (executor := self._executor()) is not None:
            # not sooner: a function may take parameters of several layers
            executor.weights.send_back(keep=KEPT_UNITS)


class _GradientGuard(_UnitGuard):
    """Applies what clipping has left to be applied, and waits for the update that reads the gradient."""

    _is_scaling = False

    def before(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if (executor := self._executor()) is None or executor.released:
            return True
        unit = executor.unit(self._index)
        executor.gradients.before_access(unit, in_use=unit.index in executor.weights.in_flight)
        self._await_copies(executor, function, args, kwargs)
        self._is_scaling = function in _SCALING and executor.norms.begin_scaling(unit)
        return executor.across is None or _begin_writing(executor.across, function, args, kwargs)

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        super().after(function, args, tensor, result, gave)
        if gave and (executor := self._executor()) is not None and not executor.released:
            executor.gradients.held[self._index].lend(tensor)
        if self._is_scaling and len(args) == 2 and _is_small(_SCALING[function], args[1]):
            executor = self._executor()
            assert executor is not None, "it has begun"
            executor.norms.scaled(executor.unit(self._index))


#: In-place functions that multiply gradients by a number: the power of that number by which they do.
_SCALING = {
    torch.Tensor.mul_: 1,
    torch.Tensor.__imul__: 1,
    torch._foreach_mul_: 1,
    torch.Tensor.div_: -1,
    torch.Tensor.__itruediv__: -1,
    torch._foreach_div_: -1,
}


def _begin_writing(
    across: AcrossRanks, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """If ``function`` writes what all ranks see: wait until none of them reads the values of before. Whether
    this rank is to write it: the first one of each machine does, once for all of them there.
    """
    written = written_by(function, args, kwargs)
    if not any(isinstance(tensor, Guarded) for tensor in written) or _only_checks(function, args):
        return True
    if across.writing is not args:  # a function of many tensors asks for each of them
        mine = {id(tensor) for tensor in written}
        with unguarded():
            given = [item for item in walk((*args, *kwargs.values())) if isinstance(item, torch.Tensor)]
            checksum = 0
            for item in given:
                if id(item) not in mine and not isinstance(item, Guarded):
                    values = item.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    checksum = crc32(values.numpy().tobytes(), checksum)
        numbers = [item for item in walk((*args, *kwargs.values())) if isinstance(item, int | float)]
        across.ranks.meet(
            f"writing what the ranks share by {function.__name__} ({numbers}, checksum {checksum:08x})"
        )
        across.writing = args
        across.written.clear()  # of a function that has failed
        across.written_of_root.clear()
    return across.ranks.leads_machine


def _end_writing(executor: Executor, across: AcrossRanks, function: Function, args: Sequence[Any]) -> None:
    """All ranks may read what has been written, and know what a GradScaler has found in it."""
    if across.writing is not args:
        return
    across.writing = None
    units = [executor.unit(index) for index in sorted(across.written)]
    across.written.clear()
    on_disk = [unit for unit in units if executor.shard(unit).uses_disk]
    with together(across.ranks, "what the ranks share was written"):
        if across.ranks.leads_machine:
            executor.weights.write_through(on_disk)
    if across.written_of_root:
        _compare_root(executor.root, across, function)
    if function is check_finite:
        found_inf = args[1]
        found_inf.fill_(max(across.ranks.meet("what is not finite in gradients", float(found_inf))))
    if on_disk:
        with together(across.ranks, "what the ranks share is on disk"):
            executor.weights.follow(on_disk)


def _compare_root(root: Unit, across: AcrossRanks, function: Function) -> None:
    """Raise RuntimeError on all ranks where ``function`` has given a parameter of the root, which each rank
    has on its device and writes there, other values on one of them."""
    positions = sorted(across.written_of_root)
    across.written_of_root.clear()
    with unguarded():
        values = [root.params[position].detach().cpu().contiguous().view(-1) for position in positions]
        mine = [crc32(each.view(torch.uint8).numpy().tobytes()) for each in values]
    everyone: list[list[int]] = across.ranks.meet("comparing what is in no layer", mine)
    for rank, found in enumerate(everyone):
        for position, here, there in zip(positions, everyone[0], found, strict=True):
            if here != there:
                name = root.layout.slices[position].param.name
                raise RuntimeError(
                    f"{function.__name__} gave '{name}' other values on rank {rank} than on rank 0, and each "
                    "has it on its device: call torch.manual_seed with one seed on all ranks before, or "
                    "write values that are the same on all"
                )


def _only_checks(function: Function, args: Sequence[Any]) -> bool:
    """Whether a GradScaler looks for values that are not finite, and takes no scale out."""
    return function is check_finite and float(args[2]) == 1.0


def _is_small(power: int, number: Any) -> bool:
    """Whether multiplying by ``number`` to the ``power`` makes nothing larger."""
    if isinstance(number, torch.Tensor):
        if number.numel() != 1 or number.is_complex():
            return False
        number = number.item()
    if not isinstance(number, int | float):
        return False
    return abs(number) <= 1 if power == 1 else abs(number) >= 1


def guard_model(executor: Executor) -> None:
    """Let parameters and gradients of the wrapped model be guarded."""
    for unit in (*executor.units, executor.root):
        for position, param in enumerate(unit.params):
            guard_parameter(param, _ParameterGuard(executor, unit, position), in_layer=unit.index != ROOT)
        for each in unit.in_parts:
            guard = _ParameterGuard(executor, unit, each.positions[0])
            guard_parameter(each.param, guard, in_layer=unit.index != ROOT)
        executor.gradients.held[unit.index].guard_with(_GradientGuard(executor, unit))
    executor.weights.guard()


def unguard_model(executor: Executor) -> None:
    """Let parameters be plain ones again."""
    for unit in (*executor.units, executor.root):
        for param in (*unit.params, *(each.param for each in unit.in_parts)):
            unguard_parameter(param)


def guarded_state(
    executor: Executor, unit: Unit, state: torch.Tensor, *, is_copy: bool = False
) -> torch.Tensor:
    """A tensor of the optimizer's state of ``unit``, for the user; a copy is not to be written."""
    if is_copy:
        return GuardedTensor.of(state, _CopyGuard(executor, unit))
    guard = _MomentGuard(executor, unit)
    shown = GuardedTensor.of(with_own_storage(state), guard)
    with unguarded():
        guard.holders = storage_owners(shown)
    return shown
