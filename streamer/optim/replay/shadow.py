"""A step of any PyTorch optimizer for some of its parameters, on tensors that stand in for them.

    before = Values.of(optimizer)
    shadow = before.shadow(optimizer, stand_ins)     # an optimizer of the same class
    plain_step(type(shadow))(shadow)
    after = Values.of(shadow)
    after.apply_to(optimizer, before)

The *values* of an optimizer are everything that belongs to no single parameter: the options and counters of
its groups, its own attributes, state under keys that are not parameters. A step for some of the parameters
starts from the values before the step, and must leave the same values as a step for all parameters. Then
steps for parts of the parameters, one after another, equal one step for all of them.
"""

from __future__ import annotations

import copy
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

#: Attributes of `torch.optim.Optimizer` itself, of GradScaler, of schedulers, and ours. They are not values.
_OF_PYTORCH = frozenset(
    {
        "defaults",
        "state",
        "param_groups",
        "step",
        "load_state_dict",
        "state_dict",
        "grad_scale",
        "found_inf",
        "_streamer",
        "_opt_called",
        "_hook_for_profile",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    }
)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SCALER = ("grad_scale", "found_inf")

#: The tensor that stands in for each parameter, by the identity of the parameter.
StandIns = Mapping[int, nn.Parameter]


_STANDS_FOR = "_streamer_stands_for"


class CoupledError(RuntimeError):
    """An optimizer cannot take its step for one part of the parameters at a time."""


@dataclass(frozen=True)
class Values:
    """The values of an optimizer, which belong to no single parameter."""

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    state: dict[Any, Any]
    #: the parameters of each group
    params: list[list[nn.Parameter]]

    @staticmethod
    def of(optimizer: Optimizer) -> Values:
        """A copy of the values of ``optimizer``. Raises CoupledError if an attribute holds parameters, or
        another optimizer."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in _OF_PYTORCH and getattr(value, "__self__", None) is not optimizer
        }
        for name, value in attributes.items():
            if isinstance(value, Optimizer) or _holds(value, params):
                raise CoupledError(f"its attribute '{name}' holds parameters")
        # not by `items`, which waits for running updates
        others = {key: dict.__getitem__(optimizer.state, key) for key in dict.keys(optimizer.state)}
        others = {key: value for key, value in others.items() if not isinstance(key, torch.Tensor)}
        members = [[*group["params"]] for group in optimizer.param_groups]
        return Values(_copied(groups), _copied(attributes), _copied(others), members)

    def shadow(self, optimizer: Optimizer, stand_ins: StandIns, state: Mapping[int, Any]) -> Optimizer:
        """An optimizer of the same class with these values, over those ``stand_ins`` that exist. Each has the
        ``state`` of its parameter, by the parameter's identity."""
        shadow: Optimizer = object.__new__(type(optimizer))
        own = {
            name: value
            for name, value in vars(optimizer).items()
            if name in _OF_PYTORCH - {"step", "state_dict", "load_state_dict", *_SCALER}
        }
        vars(shadow).update(own, **_copied(self.attributes), **{name: {} for name in _HOOKS})
        shadow.state = defaultdict(dict, _copied(self.state))
        shadow.param_groups = []
        for members, values in zip(self.params, self.groups, strict=True):
            params = [param for param in members if id(param) in stand_ins]
            shadow.param_groups.append({**_copied(values), "params": [stand_ins[id(p)] for p in params]})
            for param in params:
                if id(param) in state:
                    shadow.state[stand_ins[id(param)]] = state[id(param)]
        return shadow

    def apply_to(self, optimizer: Optimizer, before: Values) -> None:
        """Set in ``optimizer`` the values that differ from ``before``. Other values keep changes since then
        (``lr`` by a scheduler)."""
        tables: list[dict[Any, Any]] = [*optimizer.param_groups, vars(optimizer), optimizer.state]
        new, old = ([*values.groups, values.attributes, values.state] for values in (self, before))
        for table, values, were in zip(tables, new, old, strict=True):
            for name, value in values.items():
                if name not in were or not same(value, were[name]):
                    table[name] = value

    def differing(self, other: Values) -> list[str]:
        """The names of values that differ."""
        found = []
        mine, others = ([*each.groups, each.attributes, each.state] for each in (self, other))
        for here, there in zip(mine, others, strict=True):
            names = dict.fromkeys([*here, *there])
            found += [str(name) for name in names if not same(here.get(name), there.get(name))]
        return [*dict.fromkeys(found)]


def stand_in_for(param: torch.Tensor) -> nn.Parameter:
    """An fp32 parameter on the host in the shape of ``param``, without memory of its own."""
    stand_in = nn.Parameter(torch.zeros((), dtype=torch.float32, device="cpu").expand(param.shape))
    vars(stand_in)[_STANDS_FOR] = param
    return stand_in


def original(param: torch.Tensor) -> torch.Tensor:
    """The parameter for which ``param`` stands in, or ``param`` itself."""
    found: torch.Tensor = vars(param).get(_STANDS_FOR, param)
    return found


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The ``step`` of a class without the hooks that PyTorch adds to it."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _copied(value: Any) -> Any:
    """A copy of values; functions, modules and similar objects are not copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {name: _copied(item) for name, item in value.items()})
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(map(_copied, value))
    is_plain = value is None or callable(value) or isinstance(value, int | float | str | types.ModuleType)
    return value if is_plain else copy.deepcopy(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are bitwise equal; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(
            torch.isnan(one), torch.isnan(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and one != one:
        return bool(other != other)
    is_plain = all("__eq__" not in vars(kind) for kind in type(one).__mro__[:-1])
    if hasattr(one, "__dict__") and is_plain and not callable(one):
        return same(vars(one), vars(other))
    return bool(one == other)


def _holds(value: Any, params: set[int]) -> bool:
    """Whether a value holds one of the parameters with these identities."""
    return any(id(each) in params for each in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _leaves(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
