"""An optimizer's moments: their owner, their place in host memory, whether saved moments fit there, and the
conversion of moments between dtypes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from streamer.engine.executor import Executor
from streamer.engine.guard import TAG, Access, GuardedTensor, Kind, Tag, unguarded
from streamer.engine.handle import Home, require_home
from streamer.store.layout import num_blocks
from streamer.store.ledger import Ledger, host, require
from streamer.store.purposes import ALL_MOMENTS, BF16, FP32, INT8, MOMENTS, Purpose
from streamer.store.shard import with_own_storage
from streamer.torch_private import storage_owners
from streamer_native import QUANTUM

#: A code of an 8-bit second moment counts steps of this many bits of a float32: [Note: 8-bit moments].
_CODE_SHIFT, _SQ_CODES, _CODES = 20, 255, 127


def convert(
    moments: Mapping[str, torch.Tensor], held_in: torch.dtype, wanted: torch.dtype
) -> dict[str, torch.Tensor]:
    """Convert a parameter's ``moments`` between fp32, bf16 and int8, rounded to nearest. Returns the same
    tensors if they have that dtype already. Shapes are those of `Purpose.shape`."""
    if held_in == wanted:
        return dict(moments)
    exp_avg, exp_avg_sq = _widened(moments, held_in)
    if wanted in (FP32, BF16):
        return {"exp_avg": exp_avg.to(wanted), "exp_avg_sq": exp_avg_sq.to(wanted)}
    assert wanted == INT8
    return _narrowed(exp_avg, exp_avg_sq)


def _widened(moments: Mapping[str, torch.Tensor], held_in: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
    if held_in != INT8:
        return exp_avg.float(), exp_avg_sq.float()
    scale = _of_elements(moments["exp_avg_scale"], exp_avg)
    sq_bits = _of_elements(moments["exp_avg_sq_scale"], exp_avg).view(torch.int32)
    bits = sq_bits + (exp_avg_sq.to(torch.int32) << _CODE_SHIFT)
    return exp_avg.float() * scale, torch.where(exp_avg_sq == 0, 0.0, bits.view(FP32))


def _narrowed(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = _in_blocks(exp_avg.abs()).amax(1) / _CODES
    codes = torch.round(exp_avg / _of_elements(scale, exp_avg).clamp(min=torch.finfo(FP32).tiny))
    largest = _in_blocks(exp_avg_sq).amax(1).view(torch.int32)
    sq_scale = (largest - (_SQ_CODES << _CODE_SHIFT)).clamp(min=0).view(FP32)
    above = exp_avg_sq.contiguous().view(torch.int32) - _of_elements(sq_scale, exp_avg).view(torch.int32)
    # values below the first code get that code: an update must not divide by zero
    sq_codes = ((above + (1 << (_CODE_SHIFT - 1))) >> _CODE_SHIFT).clamp(1, _SQ_CODES)
    return {
        "exp_avg": codes.clamp(-_CODES, _CODES).to(INT8),
        "exp_avg_sq": torch.where(exp_avg_sq == 0, 0, sq_codes).to(torch.uint8),
        "exp_avg_scale": scale,
        "exp_avg_sq_scale": sq_scale,
    }


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """[blocks, 256], padded with zeros."""
    flat = values.reshape(-1)
    padded = torch.zeros(num_blocks(flat.numel()) * QUANTUM, dtype=flat.dtype)
    padded[: flat.numel()] = flat
    return padded.view(-1, QUANTUM)


def _of_elements(of_blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each block's value repeated for its elements, in the shape of ``like``."""
    return of_blocks.repeat_interleave(QUANTUM)[: like.numel()].view(like.shape)


_NAMES_OF_MOMENTS = frozenset(purpose.name for purpose in ALL_MOMENTS)

#: A parameter, its home in host memory, and its saved state.
Saved = tuple[torch.Tensor, Home, dict[str, Any] | None]


def parse_state_dtype(value: torch.dtype | str) -> torch.dtype:
    """The dtype for ``state_dtype=value``. Raises ValueError for any but the three."""
    for dtype in (FP32, BF16, INT8):
        if value in (dtype, str(dtype).removeprefix("torch.")):
            return dtype
    raise ValueError(f"state_dtype={value!r} is unknown: use torch.float32, torch.bfloat16 or 'int8'")


def place_moments(executor: Executor, state_dtype: torch.dtype) -> frozenset[int]:
    """The positions of the units whose moments go to disk, after the model's current moments are freed.

    Raises MemoryError if there is no room.
    """
    store, purposes = executor.store, MOMENTS[state_dtype]
    if store.holds(purposes):
        return frozenset()
    if store.has_disks:
        return executor.host.place_moments(purposes, ALL_MOMENTS)
    layouts = [shard.layout for shard in store.shards]
    wanted, held = store.division.host_bytes(layouts, purposes), store.bytes_by_purpose()
    kept = {name: nbytes for name, nbytes in held.items() if name not in _NAMES_OF_MOMENTS}
    released = sum(held.values()) - sum(kept.values())
    needed, available = sum(wanted.values()), executor.host.available() + released
    remedy = (
        "choose a smaller state_dtype (torch.bfloat16 or 'int8', with bfloat16 parameters), or freeze "
        "parameters"
    )

    def table() -> str:
        ledger = Ledger(executor.device_bytes(), {**kept, **wanted})
        return ledger.table(host={"held already": sum(kept.values()), "free": available})

    require("the moments", host(needed, available, remedy), details=table)
    return frozenset()


def take_over(homes: Sequence[Home], state_dtype: torch.dtype, owner: object, *, is_new: bool) -> None:
    """Let ``owner``, ``is_new`` to their model, update these parameters from now on, with zero moments.
    Raises MemoryError, before any change, if there is no room."""
    executor = homes[0].executor
    placed = place_moments(executor, state_dtype) if is_new else frozenset()
    executor.host.wait_for_saving()  # of the moments that are freed or cleared
    are_zero = False
    if is_new:
        executor.synchronize()
        if not executor.store.holds(MOMENTS[state_dtype]):
            executor.host.add_moments(MOMENTS[state_dtype], placed, ALL_MOMENTS)
            executor.updated_by.clear()
            are_zero = True
    for home in homes:
        executor.updated_by[home.slice.param.name] = owner
        if home.slice.param.trainable and not are_zero:
            with executor.host.writing_state(f"clearing the moments of '{home.slice.param.name}'"):
                _clear(home, state_dtype)


def _guarded(home: Home, moment: torch.Tensor, *, is_copy: bool = False) -> torch.Tensor:
    """A moment for user code; a copy must not be written."""
    access: weakref.ref[Access] = weakref.ref(home.executor)
    unit = home.unit.index
    if is_copy:
        return GuardedTensor.of(moment, Tag(access, Kind.COPY, unit))
    tag = Tag(access, Kind.MOMENT, unit)
    guarded = GuardedTensor.of(with_own_storage(moment), tag)
    with unguarded():
        guarded.__dict__[TAG] = replace(tag, owners=storage_owners(guarded))
    return guarded


def check_once(params: Collection[torch.Tensor]) -> None:
    """Raise ValueError if ``params`` include one twice."""
    if len({*map(id, params)}) < len(params):
        raise ValueError(
            "a parameter is in the optimizer twice: leave one of them out (tied weights are one)"
        )


def is_owner(home: Home, owner: object) -> bool:
    """Whether ``owner`` updates the parameter."""
    return home.executor.updated_by.get(home.slice.param.name) is owner


def check_owner(home: Home, owner: object) -> None:
    """Raise RuntimeError if another optimizer updates the parameter, ValueError for a frozen one."""
    if not is_owner(home, owner):
        raise RuntimeError(
            f"'{home.slice.param.name}' now belongs to an optimizer created later, which has begun with "
            "moments of its own, or keeps those of its model in another state_dtype: use that one"
        )
    if not home.slice.param.trainable:
        home.unit.wanted()  # raises the ValueError


def pair_saved(
    state_dict: dict[str, Any], groups: Sequence[dict[str, Any]], state_dtype: torch.dtype
) -> list[Saved]:
    """Each trainable parameter of ``groups`` with its state in ``state_dict``, None if it has none.

    Raises ValueError if the layout of that state is not that of ``state_dtype``.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in groups for param in group["params"]]
    saved = [
        (param, require_home(param), state_dict["state"].get(index))
        for param, index in zip(params, indices, strict=False)
    ]
    trained = [(param, home, values) for param, home, values in saved if home.slice.param.trainable]
    for _, home, values in trained:
        if values is not None:
            _check_moments(home, values, state_dtype)
    return trained


class State(MutableMapping[str, Any]):
    """The state of one parameter: its step, its moments and the user's own entries.

    Steps of a unit's parameters are adjacent in memory (`Unit.steps`), to be read and counted in one
    operation. Moments are views of the host memory that updates use. Assigning a moment (zeros to begin
    anew, a tensor moved to another device) copies the value there, and a moment cannot be removed.

    Moments that are on disk, may be evicted to disk, or are divided among machines are fetched on every read.
    A moment on disk is a copy. A write into a copy, or into a view of memory since evicted to disk, would be
    lost: the next update refuses it. A moment divided among machines is a copy gathered from all of them, by
    a collective call of all ranks, and a write into it is refused at once.
    """

    def __init__(self, home: Home, state_dtype: torch.dtype, step: float = 0.0) -> None:
        """With the current moments, and this ``step``."""
        self._home = home
        self._purposes = _purposes(state_dtype)
        #: the parameter's position in `Unit.steps`
        self.place = next(place for place, each in enumerate(home.unit.layout.slices) if each is home.slice)
        self._values: dict[str, Any] = {"step": home.unit.steps[self.place].fill_(step)}
        store, shard = home.executor.store, home.executor.shard(home.unit)
        #: the moments that stay where they are in memory, and guarded views of those that were read
        self._fixed: dict[str, torch.Tensor] = {}
        if not (store.can_move or store.is_divided):
            self._fixed |= {name: shard.part(each, home.slice) for name, each in self._purposes.items()}
        self._views: dict[str, torch.Tensor] = {}
        #: the other tensors returned, each with its version, and whether it is a copy
        self._returned: list[tuple[weakref.ref[torch.Tensor], int, bool]] = []

    @staticmethod
    def of(home: Home, state_dtype: torch.dtype, values: Mapping[str, Any]) -> State:
        """A parameter's state with ``values``, set once updates are done."""
        state = State(home, state_dtype, float(values["step"]))
        for purpose in MOMENTS[state_dtype]:
            _set_moment(home, purpose, values[purpose.name])
        return state

    def check(self) -> None:
        """Raise RuntimeError if the next update would miss a write of the user's code."""
        if not self._returned:
            return
        returned, self._returned = self._returned, []
        is_on_disk = self._is_on_disk()
        for reference, version, was_copy in returned:
            if (moment := reference()) is None:
                continue
            if moment._version == version or not (was_copy or is_on_disk):
                self._returned.append((reference, moment._version, was_copy))
                continue
            raise RuntimeError(
                f"a moment of '{self._home.slice.param.name}' was written in place, but it is on disk "
                "and optimizer.state returns a copy: assign it (optimizer.state[p]['exp_avg'] = tensor)"
            )

    def _is_on_disk(self) -> bool:
        shard = self._home.executor.shard(self._home.unit)
        return any(shard.is_on_disk(purpose) for purpose in self._purposes.values())

    def __getitem__(self, name: str) -> Any:
        if name not in self._purposes:
            return self._values[name]
        if name not in self._fixed:
            return self._current(self._purposes[name])
        if name not in self._views:
            self._views[name] = _guarded(self._home, self._fixed[name])
        return self._views[name]

    def _current(self, purpose: Purpose) -> torch.Tensor:
        """The current value of a moment that does not stay in memory."""
        home = self._home
        shard = home.executor.shard(home.unit)
        home.executor.host.await_state(home.unit)
        whole = home.executor.across.whole_shard(home.unit, [purpose], only=home.slice)
        moment = whole.part(purpose, home.slice)
        is_copy = shard.is_on_disk(purpose)
        if whole is not shard:
            return _guarded(home, moment, is_copy=True)
        if not is_copy:
            moment = _guarded(home, moment)
        self._returned = [each for each in self._returned if each[0]() is not None]
        self._returned.append((weakref.ref(moment), moment._version, is_copy))
        return moment

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "step":
            with torch.no_grad():
                self._values[name].fill_(float(value))
        elif name not in self._purposes:
            self._values[name] = value
        elif value is not self._views.get(name):
            executor = self._home.executor
            executor.host.wait_for_saving()
            executor.synchronize()
            with executor.host.writing_state(f"setting {name} of '{self._home.slice.param.name}'"):
                _set_moment(self._home, self._purposes[name], value)

    def __delitem__(self, name: str) -> None:
        if name == "step" or name in self._purposes:
            raise RuntimeError(
                f"'{name}' cannot be removed from the state of '{self._home.slice.param.name}': assign "
                "its new value, or begin anew (del optimizer.state[p])"
            )
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._values, *self._purposes]))

    def __len__(self) -> int:
        return len(self._values) + len(self._purposes)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._purposes

    # the operators and the method of a dict that a mapping lacks

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __ior__(self, other: Any) -> State:
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        # a copy is a plain dict
        return dict, (dict(self),)


@cache
def _purposes(state_dtype: torch.dtype) -> dict[str, Purpose]:
    return {purpose.name: purpose for purpose in MOMENTS[state_dtype]}


def _set_moment(home: Home, purpose: Purpose, value: Any) -> None:
    with torch.no_grad():
        home.executor.shard(home.unit).set_part(purpose, home.slice, torch.as_tensor(value))


def begin_state(
    home: Home, entries: Mapping[str, Any], state_dtype: torch.dtype, *, was_updated: bool
) -> State:
    """The state of a parameter without `State`: the user's ``entries`` or, if there are none,
    zero moments."""
    if entries or was_updated:
        home.executor.host.wait_for_saving()
        home.executor.synchronize()
    if not (entries or was_updated):
        return State(home, state_dtype)
    with home.executor.host.writing_state(f"beginning the moments of '{home.slice.param.name}'"):
        if not entries:
            _clear(home, state_dtype)
            return State(home, state_dtype)
        return State.of(home, state_dtype, entries)


def load_moments(saved: Iterable[Saved], state_dtype: torch.dtype) -> dict[torch.Tensor, State]:
    """Copy saved moments into host memory, zeros if there are none; returns the optimizer's state, whose
    tensors are views of it."""
    state: dict[torch.Tensor, State] = {}
    for param, home, values in saved:
        if values is not None:
            state[param] = State.of(home, state_dtype, values)
        else:
            _clear(home, state_dtype)
    return state


def _clear(home: Home, state_dtype: torch.dtype) -> None:
    """Set a parameter's moments to zero."""
    for purpose in MOMENTS[state_dtype]:
        _set_moment(home, purpose, torch.zeros(purpose.shape(home.slice), dtype=purpose.dtype))


def _check_moments(home: Home, saved: dict[str, Any], state_dtype: torch.dtype) -> None:
    """Raise ValueError if the layout of ``saved`` state is not that of the parameter's moments."""

    def described(dtype: torch.dtype, shape: Sequence[int]) -> tuple[Any, ...]:
        return (str(dtype).removeprefix("torch."), *shape)

    tensors = {key: torch.as_tensor(value) for key, value in saved.items() if key != "step"}
    there = {key: described(tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    here = {
        name: described(purpose.dtype, purpose.shape(home.slice))
        for name, purpose in _purposes(state_dtype).items()
    }
    if there != here:
        raise ValueError(
            f"the state of '{home.slice.param.name}' is {there} and this optimizer keeps {here}: use AdamW "
            "with the state_dtype that it was saved with"
        )
