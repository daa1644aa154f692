"""Guarded tensors: parameters, gradients and optimizer state, which wait for updates before user code reads
or writes them.

[Note: what the user sees]
`optimizer.step()` returns while updates are still running. A layer's weights may be in a slot and in host
memory at once. User code and libraries need not know. A parameter of a wrapped model is an instance of a
subclass of its class, and its gradient and the optimizer's state are `GuardedTensor`s. For any function with
such an argument, PyTorch calls the class's `__torch_function__` instead, in every thread, also for a tensor
from a list that was created before `wrap`. There

- a function that reads or writes the tensor waits for the work on that tensor's unit only. A function of its
  shape or dtype (`METADATA`) does not wait;
- a function that gives other access to the tensor's memory (``p.data``, ``p.detach()``, ``p.numpy()``) makes
  it *aliased*: `Access.after` notes that, because PyTorch reports no write through an alias;
- a copy to or from the tensor is complete when it returns, even with ``non_blocking``: see `_at_once`.

Inside the library these tensors are used as plain ones, in `unguarded` blocks.

C++ code does not wait if it gets a tensor without a function of PyTorch: extensions, TorchScript,
`torch.func`'s transforms of a parameter, ``torch.tensor(param)``, ``torch.as_tensor(param, dtype=...)`` and
``to_dlpack(param)``. Call `streamer.synchronize` before it, and before compiled user code that reads
parameters outside of layers and of the model's forward. Compiled code must not write through ``param.data``.
"""

from __future__ import annotations

import enum
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from streamer.engine.tensors import walk
from streamer.torch_private import (
    SubclassesOff,
    check_finite,
    is_of_transform,
    is_sparse,
    skip_code,
    sparse_parts,
    storage_id,
)

F = TypeVar("F", bound=Callable[..., Any])


def never_traced(function: F) -> F:
    """Exclude ``function``, and all functions that it calls, from compilation of the caller.
    `torch.compiler.disable` does so with a wrapper, and imports the compiler, which takes seconds. This marks
    the code of the function, so it must not be a wrapper: wrappers share their code with others.
    """
    run_as_it_is(function)
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="streamer pages weights in it; streamer.wrap(compile=True) compiles layers",
    )
    return function


def run_as_it_is(function: F) -> F:
    """Run ``function`` without compilation if its caller is not compiled. A compiled caller may include
    it."""
    assert not hasattr(function, "__wrapped__")
    skip_code(function.__code__)
    return function


#: Inside the block, PyTorch uses guarded tensors as plain ones.
unguarded = SubclassesOff

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


def as_plain(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` in an `unguarded` block. It must not call user code."""

    @wraps(function)
    @never_traced
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with unguarded():
            return function(*args, **kwargs)

    return call


class Kind(enum.Enum):
    """The kinds of guarded tensors."""

    PARAMETER = enum.auto()
    GRADIENT = enum.auto()
    MOMENT = enum.auto()
    #: a copy of a moment
    COPY = enum.auto()


@dataclass(frozen=True, eq=False)
class Tag:
    """The place of a guarded tensor in a wrapped model: the number of its unit and, for a parameter, its
    position among the unit's `params` and its name."""

    #: weak, because the garbage collector cannot follow references of a parameter's gradient
    access: weakref.ref[Access]
    kind: Kind
    unit: int
    position: int = -1
    name: str = ""
    #: for a moment: the number of owners of its storage when user code holds none
    owners: int = 0

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("what belongs to a wrapped model cannot be pickled: save model.state_dict()")


@dataclass
class Touch:
    """A call of a PyTorch function with guarded tensors among its arguments."""

    function: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tagged: Sequence[tuple[Tag, torch.Tensor]]
    #: the ids of tensors that another rank writes for this one
    not_written: set[int] = field(default_factory=set)
    #: whether all ranks make this write
    is_of_ranks: bool = False
    result: object = None
    #: the ids of the storages to which the result gives access
    shared_storages: frozenset[int] = frozenset()

    @cached_property
    def written(self) -> list[torch.Tensor]:
        """The tensors that are written in place.

        By PyTorch's naming, functions that end with an underscore and Python's in-place operators write their
        first argument; others write ``out``.
        """
        if self.function is check_finite and float(self.args[2]) == 1.0:
            return []  # a GradScaler checks that values are finite, and does not unscale
        name = getattr(self.function, "__name__", "")
        is_operator = name.startswith("__") and name.endswith("__")
        in_place = name in _WRITING_OPERATORS if is_operator else name.endswith("_")
        places = (self.args[:1] if in_place else (), self.kwargs.get("out"))
        return [item for item in walk(places) if isinstance(item, torch.Tensor)]

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is written in place."""
        return any(tensor is each for each in self.written)

    def shrinks(self) -> bool:
        """Whether the function has multiplied the written tensors by a number from -1 to 1; valid after the
        call."""
        power = _MULTIPLIES.get(self.function, 0)
        number = self.args[1] if power and len(self.args) == 2 else None
        if isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_complex():
            number = number.item()
        return isinstance(number, int | float) and (abs(number) <= 1 if power == 1 else abs(number) >= 1)

    def of(self, access: Access) -> list[tuple[Tag, torch.Tensor]]:
        """The guarded tensors of one wrapped model."""
        return [(tag, tensor) for tag, tensor in self.tagged if tag.access() is access]

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Whether the result gives access to the memory of ``tensor``."""
        return bool(self.shared_storages) and storage_id(tensor) in self.shared_storages


class Access(Protocol):
    """Decides when guarded tensors of a wrapped model may be read and written."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held from `before` to `after`, so that no other thread begins an update in between."""

    def before(self, touch: Touch) -> None:
        """Return when the function may read and write its arguments."""

    def after(self, touch: Touch) -> None:
        """The function was called."""


class Guarded:
    """A tensor with a `Tag`, its attribute of the name `TAG`."""

    @classmethod
    @run_as_it_is
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            with unguarded():
                return function(*args, **kwargs or {})
        return _touch(function, types, args, kwargs or {})


#: The attribute of a guarded tensor that holds its `Tag`.
TAG = "_streamer_tag"


def tag_of(tensor: Any) -> Tag | None:
    """The tag of a guarded tensor; None for other tensors."""
    return vars(tensor).get(TAG) if isinstance(tensor, Guarded) else None


class GuardedTensor(Guarded, torch.Tensor):
    """A view of memory that lanes read and write: a gradient, or the state of the optimizer."""

    @staticmethod
    def of(tensor: torch.Tensor, tag: Tag) -> GuardedTensor:
        """``tensor``, guarded."""
        with unguarded():
            guarded = tensor.as_subclass(GuardedTensor)
        guarded.__dict__[TAG] = tag
        return guarded

    def detach_(self) -> torch.Tensor:
        """`torch.Tensor.detach_`: does nothing, since PyTorch refuses it for views."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # saved as a plain tensor, which can be loaded without this library
        return self.detach().__reduce_ex__(protocol)


class GuardedParameter(Guarded):
    """A parameter of a wrapped model."""

    def detach(self: Any) -> torch.Tensor:
        """`torch.Tensor.detach`."""
        detached = torch.Tensor.detach(self)
        # `nn.Parameter(param)` expects a result of the parameter's own class, except for two classes
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            detached = torch.Tensor._make_subclass(type(self), detached)
        return detached

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        copy: nn.Parameter = plain_class(type(self))(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class LayerParameter(GuardedParameter):
    """A parameter of a streamed layer. `torch.compile` must not trace through it: compiled code has a graph
    break there, and waits. The layer's own code uses views of a slot instead."""

    @classmethod
    @never_traced
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _touch(function, types, args, kwargs or {})

    def register_hook(self: Any, hook: Callable[..., Any]) -> Any:
        """Refuse `torch.Tensor.register_hook`: the gradient does not pass through the user's graph."""
        raise RuntimeError(
            f"'{vars(self)[TAG].name}' is in a streamed layer, where a tensor hook would not run: use "
            "param.register_post_accumulate_grad_hook, or look at p.grad after backward"
        )


@cache
def _guarded_class(kind: type[nn.Parameter], of: type[GuardedParameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (of, kind), {"_plain_class": kind})


def plain_class(kind: type[Any]) -> type[Any]:
    """The class of parameters of the guarded class ``kind`` before they were guarded."""
    plain: type[Any] = getattr(kind, "_plain_class", kind)
    return plain


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of no subclass of tensors or parameters, except a guarded one."""
    kind = type(tensor)
    return kind in _PLAIN or plain_class(kind) is nn.Parameter


_PLAIN = (torch.Tensor, nn.Parameter, GuardedTensor)


def guard_parameter(param: nn.Parameter, tag: Tag, *, in_layer: bool) -> None:
    """Guard ``param``, of a layer or of the root unit."""
    param.__dict__[TAG] = tag
    param.__class__ = _guarded_class(type(param), LayerParameter if in_layer else GuardedParameter)


def unguard_parameter(param: nn.Parameter) -> None:
    """Undo `guard_parameter`."""
    param.__dict__.pop(TAG, None)
    param.__class__ = plain_class(type(param))


def not_a_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN, []; 0 for a dtype without NaN. The values of parameters that are only on disk."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def is_in_graph(result: object) -> bool:
    """Whether all tensors in ``result`` require gradients, so that autograd registers writes to them."""
    return all(isinstance(item, torch.Tensor) and item.requires_grad for item in walk((result,)))


def _shared_storages(touch: Touch) -> frozenset[int]:
    """The ids of the storages to which the result gives access: a tensor, an array, or an address."""
    if touch.function in _GIVES_MEMORY:
        return frozenset(storage_id(tensor) for _, tensor in touch.tagged)
    own = {id(tensor) for _, tensor in touch.tagged}
    return frozenset(
        storage_id(part)
        for item in walk((touch.result,))
        if isinstance(item, torch.Tensor) and id(item) not in own
        for part in (sparse_parts(item) if is_sparse(item) else [item])
        if part.layout is torch.strided and not (part.is_nested or is_of_transform(part))
    )


def _write_rest(touch: Touch) -> Any:
    """Call the function without the tensors that another rank writes. Returns its result."""
    function, args, kwargs, others = touch.function, touch.args, touch.kwargs, touch.not_written
    for tensor in touch.written:
        if id(tensor) in others:
            torch.autograd.graph.increment_version(tensor)  # as a write of this process would
    if "out" in kwargs or not isinstance(args[0], list | tuple):
        return kwargs.get("out", args[0] if args else None)
    kept = [place for place, tensor in enumerate(args[0]) if id(tensor) not in others]

    def of_kept(value: Any) -> Any:
        of_each = isinstance(value, list | tuple) and len(value) == len(args[0])
        return [value[place] for place in kept] if of_each else value

    if kept:
        function(*map(of_kept, args), **{key: of_kept(value) for key, value in kwargs.items()})
    return None


@never_traced
def _touch(function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``function`` with guarded tensors among its arguments, between `Access.before` and
    `Access.after`."""
    if function in METADATA:
        with unguarded():
            return function(*args, **kwargs)
    if function in _COPIES:
        args, kwargs = _at_once(args, kwargs)
    tagged = [(tag, item) for item in walk((*args, *kwargs.values())) if (tag := tag_of(item)) is not None]
    touch = Touch(function, args, kwargs, tagged)
    found = {id(access): access for tag, _ in tagged if (access := tag.access()) is not None}
    accesses = [found[key] for key in sorted(found)]  # always in the same order
    with ExitStack() as held:
        for access in accesses:
            held.enter_context(access.lock)
        for access in accesses:
            access.before(touch)
        if touch.not_written:
            with unguarded():
                touch.result = _write_rest(touch)
        elif all(map(_is_touched_plainly, types)):
            with unguarded():
                touch.result = function(*args, **kwargs)
        else:
            # other subclasses handle the call, as with a plain parameter
            with _plain_for_now(tagged):
                touch.result = function(*args, **kwargs)
        with unguarded():
            touch.shared_storages = _shared_storages(touch)
            for access in accesses:
                access.after(touch)
    return touch.result


@cache
def _is_touched_plainly(kind: type[Any]) -> bool:
    """Whether a class has no `__torch_function__` except the guard's; a quantized weight has its own."""
    plain = plain_class(kind)
    own = plain.__torch_function__ is not nn.Parameter.__torch_function__
    return issubclass(kind, Guarded) and (plain is kind or not own)


@contextmanager
def _plain_for_now(tagged: Sequence[tuple[Tag, Any]]) -> Iterator[None]:
    kinds = {id(tensor): (tensor, type(tensor)) for _, tensor in tagged}
    try:
        for tensor, kind in kinds.values():
            tensor.__class__ = torch.Tensor if kind is GuardedTensor else plain_class(kind)
        yield
    finally:
        for tensor, kind in kinds.values():
            tensor.__class__ = kind


def _functions(names: str) -> Iterator[Any]:
    """The properties, methods and functions of PyTorch with these names, as `__torch_function__` gets
    them."""
    for name in names.split():
        for home in (torch.Tensor, torch):
            found: Any = getattr(home, name, None)
            if hasattr(found, "__get__") and not callable(found):
                yield found.__get__
                if hasattr(found, "__set__"):
                    yield found.__set__
            elif found is not None:
                yield found


#: Functions that do not read or write values of a tensor.
METADATA = frozenset(
    _functions(
        "shape dtype device layout ndim names requires_grad is_leaf itemsize nbytes is_cpu is_cuda is_meta "
        "is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xpu is_vulkan grad grad_fn "
        "grad_dtype retains_grad output_nr _version _base _backward_hooks _post_accumulate_grad_hooks "
        "size dim ndimension numel nelement element_size is_floating_point is_complex "
        "is_inference is_conj is_neg get_device requires_grad_ register_hook "
        "register_post_accumulate_grad_hook retain_grad backward is_distributed has_names is_signed "
        "is_same_size is_shared is_pinned is_coalesced __len__ new_empty new_empty_strided new_zeros "
        "new_ones new_full empty_like zeros_like ones_like full_like rand_like randn_like "
        "randint_like"
    )
)


#: Python's operators that write their first operand.
_WRITING_OPERATORS = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    )
)

#: In-place functions that multiply by a power of a number, with the exponent.
_MULTIPLIES = {
    torch.Tensor.mul_: 1,
    torch.Tensor.__imul__: 1,
    torch._foreach_mul_: 1,
    torch.Tensor.div_: -1,
    torch.Tensor.__itruediv__: -1,
    torch._foreach_div_: -1,
}

#: Functions that copy between host and device, and with ``non_blocking`` may return early.
_COPIES = frozenset(_functions("to cuda type copy_ _foreach_copy_"))


def _at_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of one of `_COPIES`, with ``non_blocking`` off. Parameters and gradients of layers are in
    pinned memory, where the next operation on the host would not wait for the copy. User code that was
    written for parameters on a GPU does not expect that.
    """
    # by position it is the first boolean
    place = next((place for place, item in enumerate(args) if isinstance(item, bool)), None)
    if place is not None and args[place]:
        args = [*args[:place], False, *args[place + 1 :]]
    return args, {**kwargs, "non_blocking": False} if kwargs.get("non_blocking") else kwargs


#: Functions that return a tensor's memory in another form than a tensor.
_GIVES_MEMORY = frozenset(
    _functions("data_ptr numpy __array__ __dlpack__ __cuda_array_interface__ untyped_storage storage")
)
