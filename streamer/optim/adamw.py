"""AdamW for a wrapped model: a PyTorch optimizer whose updates run on the host, one unit at a time. It takes
no step with gradients that are NaN or infinite.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, ParamsT

from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain, never_traced, unguarded
from streamer.engine.handle import Home, home_of, require_home
from streamer.engine.paging.across_ranks import Reduced
from streamer.engine.paging.disk_pager import ShardUpdate
from streamer.engine.paging.early_updates import Update, Updater
from streamer.engine.paging.host_gradient import is_summed
from streamer.engine.unit import Unit
from streamer.errors import shortened, warn
from streamer.optim.state import (
    State,
    begin_state,
    check_once,
    check_owner,
    is_owner,
    load_moments,
    pair_saved,
    parse_state_dtype,
    take_over,
)
from streamer.optim.update import (
    Launches,
    UnitUpdate,
    all_finite,
    check_state_dtype,
    update_shard,
    warm_up,
)
from streamer.store.shard import HostShard
from streamer.torch_private import without_compiler
from streamer_native import Hyper


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a hyperparameter out of its range, and for an option of `torch.optim.AdamW` that
    this optimizer does not support."""
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
    for option, changes_updates in (
        ("maximize=True", group.get("maximize")),
        ("amsgrad=True", group.get("amsgrad")),
        ("differentiable=True", group.get("differentiable")),
        (
            "decoupled_weight_decay=False",
            group["weight_decay"] and not group.get("decoupled_weight_decay", True),
        ),
    ):
        if changes_updates:
            raise ValueError(
                f"{option} in a parameter group is not supported by streamer.AdamW: leave it out"
            )


def hyper_of(group: dict[str, Any], step: int) -> Hyper:
    """The hyperparameters of an update of ``group``; ``step`` counts from 1."""
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step)


def check_unchanged(used_in_backward: Mapping[int, Hyper], groups: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError if layers were updated in backward with hyperparameters that differ from those of
    ``groups``; ``used_in_backward`` has the ones used, by the identity of a group."""
    for group in groups:
        if used_in_backward.get(id(group), hyper_of(group, 1)) != hyper_of(group, 1):
            raise RuntimeError(
                "hyperparameters of a group (lr?) were changed between backward and step(), but "
                "update='backward' has updated layers with the old ones: change them before backward"
            )


NO_PARAMETERS = (
    "streamer.AdamW got no parameters, so nothing would be trained: add adapters, or unfreeze parameters, "
    "before streamer.wrap (in adapt= of streamer.from_pretrained, which freezes a quantized base)"
)


class NonFiniteError(RuntimeError):
    """A refused step, since a gradient is NaN or infinite; ``what`` names the first unit, in the order of
    backward, whose gradient is not finite."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what + remedy)
        self.what = what


def may_step(
    executor: Executor,
    not_updated: Sequence[str],
    *,
    skip_nonfinite: bool,
    found_inf: torch.Tensor | None,
) -> bool:
    """Whether a step may be taken: all gradients are finite, and backward has left no layer ``not_updated``.
    If not, count and warn, or raise NonFiniteError.

    ``found_inf`` is the result of a GradScaler, None without one. A GradScaler looks for the scale at which
    steps overflow, so some steps overflow by design: those are counted without a warning.
    """
    gradients = executor.gradients
    gradients.take_in()
    if found_inf is not None:
        finite = not found_inf.item()
    else:
        # meta tensors have no values
        finite = executor.backend.device.type == "meta" or gradients.are_finite()
    if finite and not not_updated:
        return True
    if gradients.are_kept:
        what = "a gradient is NaN or infinite, or the square of the norm of all is beyond fp32"
        if found_inf is None and (names := gradients.norms.not_finite()):
            what = f"the gradient of {shortened(names, most=1)} is NaN or infinite, or its square beyond fp32"
        skipped = ": this step is skipped, nothing was updated"
        remedy = ": nothing was updated; AdamW(skip_nonfinite=True) skips such steps"
    else:
        names = [*not_updated, *(() if finite else ("parameters outside of the layers",))]
        what = f"the gradient of {', '.join(names)} is NaN or infinite"
        skipped, remedy = ": not updated", ": not updated: AdamW(skip_nonfinite=True) goes on without"
    if not skip_nonfinite and found_inf is None:
        raise NonFiniteError(what, remedy)
    executor.skipped_steps += 1 if gradients.are_kept else gradients.early.newly_skipped(step_too=not finite)
    if found_inf is None:
        warn(what + skipped)
    return finite


def begin_step(
    executor: Executor, updater: Updater, *, skip_nonfinite: bool, found_inf: torch.Tensor | None
) -> list[str]:
    """Begin a step of the optimizer of ``updater``, and return the names of the layers not updated since the
    last. Raises RuntimeError for a model that was unwrapped."""
    if executor.released:
        raise RuntimeError(
            "the model that this optimizer updates was unwrapped: create a new optimizer, of torch.optim for "
            "a plain model"
        )
    if executor.gradients.are_kept:
        return []
    if found_inf is None:
        executor.gradients.check_unwritten()
    if not skip_nonfinite:
        executor.synchronize()
    names = executor.gradients.early.next_step(updater)
    if found_inf is not None:
        raise RuntimeError(
            "update='backward' has updated the layers before GradScaler could unscale the gradients: wrap "
            "with update='step', or train in bfloat16 without a scaler"
        )
    return names


class _Member(NamedTuple):
    """A parameter of an optimizer, its home in host memory, and its group."""

    param: torch.Tensor
    home: Home
    group: dict[str, Any]
    #: the index of its group in the optimizer, and of the parameter in the group
    place: tuple[int, int]

    def is_in(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the parameter is still in its place in these groups."""
        group, number = self.place
        params = self.group["params"]
        return (
            group < len(groups)
            and groups[group] is self.group
            and number < len(params)
            and params[number] is self.param
            and home_of(self.param) is self.home
        )


class _Members:
    """An optimizer's parameters of one unit."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.params = [member.param for member in members]
        groups = {id(member.group): member.group for member in members}
        self.groups = [*groups.values()]
        #: for each parameter, the index of its group in `groups`
        self._group_of = [[*groups].index(id(member.group)) for member in members]
        self.executor, self.unit = members[0].home.executor, members[0].home.unit
        self._slices = [member.home.slice for member in members]
        self._names = [slice.param.name for slice in self._slices]
        self._are_trained = all(slice.param.trainable for slice in self._slices)
        places = {id(slice): place for place, slice in enumerate(self.unit.layout.slices)}
        #: the positions of their step counts in `Unit.steps`
        self._places = np.array([places[id(slice)] for slice in self._slices])
        self._part: tuple[tuple[bool, ...], _Members] | None = None
        self._launches: tuple[object, Launches] | None = None

    def only(self, mask: Sequence[bool]) -> _Members | None:
        """The members for which ``mask`` is True, None if there are none."""
        if all(mask):
            return self
        key = tuple(mask)
        if self._part is None or self._part[0] != key:
            if not any(key):
                return None
            # nearly always the same members
            self._part = key, _Members([*compress(self.members, key)])
        return self._part[1]

    def with_gradient(self) -> _Members | None:
        """The members with a gradient, None if there are none."""
        return self.only([param.grad is not None for param in self.params])

    def check_owner(self, owner: object) -> None:
        """Raise RuntimeError if another optimizer updates one of them, ValueError for a frozen one."""
        # nearly always passes, so it avoids a call for each parameter
        owners = map(self.executor.updated_by.get, self._names)
        if not self._are_trained or any(map(is_not, owners, repeat(owner))):
            for member in self.members:
                check_owner(member.home, owner)

    def update(self, state_dtype: torch.dtype) -> UnitUpdate:
        """The next update of these parameters."""
        steps = (self.unit.steps.numpy()[self._places] + 1).tolist()
        # parameters of one group at the same step share hyperparameters
        numbers: dict[tuple[int, float], int] = {}
        keys = zip(self._group_of, steps, strict=True)
        of_each = [numbers.setdefault(key, len(numbers)) for key in keys], [*map(is_summed, self.params)]
        if self._launches is None or self._launches[0] != of_each:
            params = zip(self._slices, *of_each, strict=True)
            self._launches = of_each, Launches(params, state_dtype)
        hypers = [hyper_of(self.groups[group], int(step)) for group, step in numbers]
        return UnitUpdate(self._launches[1], hypers)

    def count(self, mask: Sequence[bool] | None = None, by: int = 1) -> None:
        """Add ``by`` to the step counts of the members, or of those for which ``mask`` is True."""
        # NumPy writes this: PyTorch would first run the update that has just been queued
        steps = self.unit.steps.numpy()
        steps[self._places if mask is None else self._places[np.array(mask)]] += by


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019, algorithm 2), as `torch.optim.AdamW`.

    ``params`` are parameters, (name, parameter) pairs or parameter groups of a wrapped model. Updates run in
    host memory in exact fp32 whatever the dtype of the parameters. `step` returns once they are queued: the
    next forward waits for each layer's update before it uses the layer, so no weight is stale.

    ``state_dtype`` is the dtype in which the moments of bfloat16 parameters are stored: ``torch.float32`` (8
    bytes for each parameter), ``torch.bfloat16`` (4; the second moment is rounded stochastically) or
    ``"int8"`` (2, in blocks of 256 with fp32 scales, rounded stochastically). Other parameters need float32.
    ``state[p]`` has ``step`` and, as views of host memory, ``exp_avg`` and ``exp_avg_sq`` in the shape of
    ``p``; in 8 bits these are codes, and ``exp_avg_scale`` and ``exp_avg_sq_scale`` the scales of their
    blocks (streamer_native's [Note: 8-bit moments] defines them). Reading them waits for the running update.

    A step with a gradient that is not finite changes nothing: with ``skip_nonfinite`` it warns and counts in
    ``streamer.stats(model).skipped_steps``, without it raises RuntimeError. `torch.amp.GradScaler` works: the
    update unscales the gradients in the same pass, and a step that overflows changes nothing.

    Raises ValueError for a hyperparameter out of its range, for options of `torch.optim.AdamW` in a group
    that would change updates (``maximize``, ``amsgrad``), for a ``state_dtype`` that a parameter cannot have,
    for a parameter whose model is not wrapped, for those of two models, and for no parameters at all. Raises
    MemoryError, before allocation, if there is no room for the moments.
    """

    #: its updates run on host shards, so `Replay` does not take its steps
    updates_host_shards = True
    #: GradScaler leaves the unscaling, and the decision to skip, to `step`
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | str = torch.float32,
        skip_nonfinite: bool = True,
    ) -> None:
        self.state_dtype = parse_state_dtype(state_dtype)
        self._skip_nonfinite = skip_nonfinite
        #: the parameters by the identity of their unit, and the groups, parameters and homes that this was
        #: built from
        self._by_unit: dict[int, _Members] = {}
        self._known: list[Any] = []
        #: by the identity of a group, the hyperparameters with which backward updated layers
        self._used_in_backward: dict[int, Hyper] = {}
        #: the identities of the parameters that were updated
        self._updated: set[int] = set()
        #: stands for the optimizer: parameters refer to it without keeping the optimizer alive
        self.token = object()
        self._is_initialized = False
        if not isinstance(params, torch.Tensor):  # which PyTorch refuses
            params = [*params]
            if not params:
                raise ValueError(NO_PARAMETERS)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        homes = [member.home for mine in self._members() for member in mine.members]
        if not homes:
            raise ValueError(NO_PARAMETERS)
        self._executor = executor = homes[0].executor
        self._check_model(homes)
        # for all groups at once: on an error an earlier optimizer keeps its moments
        take_over(homes, self.state_dtype, self.token, is_new=True)
        executor.prepare(
            partial(warm_up, [shard.layout for shard in executor.store.shards], self.state_dtype)
        )
        executor.gradients.early.add(self._update_in_backward)
        self._is_initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with zero moments."""
        without_compiler(Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            check_once(group["params"])
            homes = [*map(require_home, group["params"])]
            for home in homes:
                check_state_dtype(home.slice.param, self.state_dtype)
            if self._is_initialized and homes:
                self._check_model(homes)
                take_over(homes, self.state_dtype, self.token, is_new=False)
                self._members()
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_model(self, homes: Iterable[Home]) -> None:
        if any(home.executor is not self._executor for home in homes):
            raise ValueError("an optimizer has parameters of two wrapped models: create one for each model")

    @torch.no_grad()
    @never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update of every parameter that has a gradient; returns the result of ``closure``."""
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with unguarded():
                self._step()
        except BaseException:
            # GradScaler deletes these only if the step returns
            self.__dict__.pop("found_inf", None)
            self.__dict__.pop("grad_scale", None)
            raise
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            check_group(group)
        updated = [mine for each in self._members() if (mine := each.with_gradient()) is not None]
        for mine in updated:
            mine.check_owner(self.token)
        for mine in updated:
            mine.executor.check_idle(mine.unit)
        check_unchanged(self._used_in_backward, self.param_groups)
        # GradScaler sets both and deletes them: whether an element was not finite, and the scale to remove
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        skips = self._skip_nonfinite
        not_updated = begin_step(
            self._executor, self._update_in_backward, skip_nonfinite=skips, found_inf=found_inf
        )
        self._used_in_backward.clear()
        if not may_step(self._executor, not_updated, skip_nonfinite=skips, found_inf=found_inf):
            return
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        updates = {mine.unit.index: each for mine, each in zip(updated, self._updates(updated), strict=True)}
        self._queue(updates, unscale)
        # only now: a refused step does not count
        for mine in updated:
            self._count(mine)

    @as_plain
    def _update_in_backward(self, unit: Unit, used: Sequence[bool]) -> Update | None:
        """The update of ``unit`` in backward, from the gradients of its ``used`` parameters."""
        used_ids = {id(param) for param, is_used in zip(unit.params, used, strict=False) if is_used}
        of_unit = self._by_unit.get(id(unit))
        # runs for each layer, so it does not look at all parameters of the optimizer
        if of_unit is not None and not all(member.is_in(self.param_groups) for member in of_unit.members):
            self._members()
            of_unit = self._by_unit.get(id(unit))
        mine = of_unit and of_unit.only(
            [id(param) in used_ids and is_owner(home, self.token) for param, home, *_ in of_unit.members]
        )
        if mine is None:
            return None
        for group in mine.groups:
            check_group(group)
        executor = mine.executor
        early = executor.gradients.early
        [next_update] = self._updates([mine])
        stretches = unit.layout.stretches(used)
        is_finite, number = list[bool](), early.number
        places = {id(param): place for place, param in enumerate(unit.params)}

        # refers to no optimizer: a queued update must not keep it alive
        def update(shard: HostShard, *, gradient: torch.Tensor, reduced: Reduced | None) -> None:
            nonlocal next_update
            if not is_finite:  # of state on disk each chunk comes here
                finite = all_finite(gradient, stretches) if reduced is None else reduced.is_finite()
                is_finite.append(finite)
                if not finite:
                    mine.count(by=-1)
                    early.not_finite.append((number, unit.name))
                elif reduced is not None:
                    by_all = reduced.used()
                    are_used = [by_all[places[id(param)]] for param in mine.params]
                    mine.count([not is_used for is_used in are_used], by=-1)
                    next_update = next_update._replace(launches=next_update.launches.only(are_used))
            if is_finite[0]:
                update_shard(shard, next_update, 1.0, seed=unit.index + 1, gradient=gradient)

        def begin() -> None:
            self._used_in_backward |= {id(group): hyper_of(group, 1) for group in mine.groups}
            self._count(mine)

        return Update(update, next_update.launches.nbytes(executor.shard(unit).range), begin)

    def _members(self) -> list[_Members]:
        """The optimizer's parameters, by unit."""
        # the groups too, since a parameter may move between groups
        now = [item for group in self.param_groups for item in (group, *group["params"])]
        params = [param for group in self.param_groups for param in group["params"]]
        homes = [*map(home_of, params)]
        now += homes
        if len(now) != len(self._known) or any(map(is_not, now, self._known)):
            members: dict[int, list[_Member]] = defaultdict(list)
            for number, group in enumerate(self.param_groups):
                for place, param in enumerate(group["params"]):
                    if (home := home_of(param)) is not None:
                        members[id(home.unit)].append(_Member(param, home, group, (number, place)))
            self._by_unit = {key: _Members(of_unit) for key, of_unit in members.items()}
            self._known = now
        return [*self._by_unit.values()]

    def _updates(self, of_units: Sequence[_Members]) -> list[UnitUpdate]:
        """The next updates of these parameters. `_count` counts their steps once no check refuses them."""
        new = []
        for mine in of_units:
            for member, state in zip(mine.members, map(self.state.get, mine.params), strict=True):
                if isinstance(state, State):
                    state.check()
                else:
                    new.append(member)
        # `state_dict` lists them as PyTorch does, in the order of the groups
        for member in sorted(new, key=attrgetter("place")):
            self._begin_state(member.param, member.home)
        return [mine.update(self.state_dtype) for mine in of_units]

    def _count(self, mine: _Members) -> None:
        """Increment the step count of each of these parameters."""
        mine.count()
        self._updated.update(map(id, mine.params))

    def _begin_state(self, param: torch.Tensor, home: Home) -> State:
        """Create the state of a parameter that is about to be updated and has no `State` yet."""
        was_updated = id(param) in self._updated
        entries = self.state[param]
        state = begin_state(home, entries, self.state_dtype, was_updated=was_updated)
        self.state[param] = state
        return state

    @never_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero once the updates that read them are done."""
        if not set_to_none:
            self._executor.before_zeroing()
        self._executor.zero_grad()
        with unguarded():
            without_compiler(Optimizer.zero_grad)(self, set_to_none)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "this optimizer cannot be copied or pickled, its state is that of a wrapped model: save "
            "optimizer.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state once all updates are done. Its tensors are views of host memory, not copies."""
        self._executor.synchronize()
        state_dict = without_compiler(Optimizer.state_dict)(self)
        return state_dict | {"state": {key: dict(state) for key, state in state_dict["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and moments; moments keep their dtype.

        Raises ValueError, and changes nothing, if they were saved with another ``state_dtype``, or with
        hyperparameters out of their range.
        """
        for group in state_dict["param_groups"]:
            check_group(group)
        self._executor.synchronize()
        self._executor.host.wait_for_saving()
        saved = pair_saved(state_dict, self.param_groups, self.state_dtype)
        # without the state, which PyTorch would copy in the parameters' dtype
        without_compiler(Optimizer.load_state_dict)(self, {**state_dict, "state": {}})
        with self._executor.host.writing_state("loading optimizer state"):
            self.state.update(load_moments(saved, self.state_dtype))
        self._used_in_backward.clear()

    def restart(self, state: dict[torch.Tensor, State]) -> None:
        """Continue from this state, whose tensors are views of host memory."""
        self._used_in_backward.clear()
        self.state.clear()
        self.state.update(state)

    def _queue(self, updates: dict[int, UnitUpdate], unscale: float) -> None:
        executor = self._executor
        work: dict[int, tuple[ShardUpdate, int]] = {}
        for unit in (executor.root, *executor.units):
            if unit.index in updates:
                scale = unscale * executor.gradients.factor
                # each unit has its own seed; ROOT is -1
                of_unit = updates[unit.index]
                update = partial(update_shard, update=of_unit, grad_scale=scale, seed=unit.index + 1)
                work[unit.index] = update, of_unit.launches.nbytes(executor.shard(unit).range)
        description = (
            "" if executor.ranks.is_alone else _same_on_all(updates, unscale * executor.gradients.factor)
        )
        executor.step(work, description)


def _same_on_all(updates: Mapping[int, UnitUpdate], scale: float) -> str:
    """A summary of the updates by unit that must be the same on all ranks; gradients are multiplied by
    ``scale``."""
    hypers = sorted({hyper for update in updates.values() for hyper in update.hypers})
    of_all = crc32(repr((hypers, scale, sorted(updates))).encode())
    description = ", ".join(f"lr {hyper.lr:.6g} in step {hyper.step}" for hyper in hypers[:2])
    return f"{description}, gradients times {scale:.9g}, checksum {of_all:08x}"
