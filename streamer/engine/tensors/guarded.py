"""Tensors that PyTorch asks before it touches them: parameters, gradients and optimizer state.

[Note: what the user sees]
`optimizer.step()` returns while updates are still running. A clipping coefficient may still have to be
applied to gradients. A layer's weights may be in a slot and in host memory at once. The user's code, and
every library that it calls, knows nothing of that, and does not have to. So

- a parameter of a wrapped model is an instance of a subclass of its class, and its gradient and the
  optimizer's state are `GuardedTensor`s: PyTorch calls `__torch_function__` of such a class in place of any
  function that is given one, in every thread, also of a tensor from a list that was made before `wrap`;
- a function that reads or writes the tensor waits first, for the work on that unit alone: see `Guard.before`.
  A function that only tells of the tensor (`METADATA`) does not wait;
- a tensor that shares memory with a parameter (``p.data``, ``p.detach()``, ``p.numpy()``) can be written
  without a trace, so the unit counts as lent from then on: see `Weights.lend`;
- what shares memory with a gradient keeps its values when the gradient is dropped: see
  `GradientViews.vacate`. It can be written without a trace too, so the gradient's norm is taken again
  whenever it is asked for;
- gradients that are multiplied by a number stay finite if they were: see `Norms.scaled`;
- a copy to or from the tensor is done when it returns, ``non_blocking`` or not: see `_at_once`.

Inside of the library these tensors are used as plain ones, in `unguarded` blocks.

C++ code that is given a tensor by other ways than PyTorch's functions does not wait: extensions, TorchScript,
`torch.func`'s transforms of a parameter, ``torch.tensor(param)``, ``torch.as_tensor(param, dtype=...)``
and ``to_dlpack(param)``. Call `streamer.synchronize` before it, as before compiled code of the user's that
reads parameters outside of layers and of the model's forward. Compiled code must not write through
``param.data``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from streamer.engine.tensors.nested import walk
from streamer.torch_private import (
    SubclassesOff,
    is_of_transform,
    is_sparse,
    skip_code,
    sparse_parts,
    storage_id,
)

F = TypeVar("F", bound=Callable[..., Any])


def never_traced(function: F) -> F:
    """Let ``function``, and all that it calls, run as it is where the user compiles what calls it.

    `torch.compiler.disable` does so with a wrapper, and imports the compiler, which takes seconds. It is the
    code of the function that is marked: it must not be a wrapper, whose code others have too.
    """
    run_as_it_is(function)
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="streamer pages weights in it; streamer.wrap(compile=True) compiles layers",
    )
    return function


def run_as_it_is(function: F) -> F:
    """Let ``function`` run as it is where what calls it was not compiled; what is compiled may take it in."""
    assert not hasattr(function, "__wrapped__")
    skip_code(function.__code__)
    return function


#: Inside of the block the tensors of this module are plain ones to PyTorch.
unguarded = SubclassesOff

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


def as_plain(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, to which guarded tensors are plain ones; it calls no code of the user's."""

    @wraps(function)
    @never_traced
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with unguarded():
            return function(*args, **kwargs)

    return call


class Guard(Protocol):
    """What a guarded tensor asks. [Note: what the user sees]"""

    def before(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return when ``function`` may read and write the tensor, which is one of ``args`` and ``kwargs``, or
        in one of them: whether this process is to write it, if it is written."""

    def after(
        self, function: Function, args: Sequence[Any], tensor: torch.Tensor, result: object, gave: bool
    ) -> None:
        """``function`` was called with ``args``, of which ``tensor`` is one or holds one; its ``result`` gave
        access to the memory of ``tensor``, or did not."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held from `before` to `after`, so that no other thread begins an update in between."""


class Guarded:
    """A tensor with a `Guard`, which is its attribute of the name `GUARD`."""

    @classmethod
    @run_as_it_is
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            with unguarded():
                return function(*args, **kwargs or {})
        return _touch(function, types, args, kwargs or {})


#: The attribute of a guarded tensor that holds its `Guard`.
GUARD = "_streamer_guard"


class GuardedTensor(Guarded, torch.Tensor):
    """A view of memory that lanes read and write: a gradient, or the state of the optimizer."""

    @staticmethod
    def of(tensor: torch.Tensor, guard: Guard) -> GuardedTensor:
        """``tensor``, guarded."""
        with unguarded():
            guarded = tensor.as_subclass(GuardedTensor)
        guarded.__dict__[GUARD] = guard
        return guarded

    def detach_(self) -> torch.Tensor:
        """`torch.Tensor.detach_`, which there is nothing to do for; of a view PyTorch refuses it."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # what is saved is a plain tensor, to be loaded without this library
        return self.detach().__reduce_ex__(protocol)


class GuardedParameter(Guarded):
    """A parameter of a wrapped model."""

    def register_hook(self: Any, hook: Callable[..., Any]) -> Any:
        """`torch.Tensor.register_hook`, where the guard allows it."""
        vars(self)[GUARD].check_hook()
        return torch.Tensor.register_hook(self, hook)  # type: ignore[no-untyped-call]

    def detach(self: Any) -> torch.Tensor:
        """`torch.Tensor.detach`."""
        detached = torch.Tensor.detach(self)
        # `nn.Parameter(param)` wants that of its own class, from any class but two
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            detached = torch.Tensor._make_subclass(type(self), detached)
        return detached

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        copy: nn.Parameter = plain_class(type(self))(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class LayerParameter(GuardedParameter):
    """A parameter of a streamed layer. `torch.compile` must not look behind it: code that it compiles breaks
    its graph there, and waits. The layer's own code has views of a slot in its place."""

    @classmethod
    @never_traced
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _touch(function, types, args, kwargs or {})


@cache
def _guarded_class(kind: type[nn.Parameter], of: type[GuardedParameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (of, kind), {"_plain_class": kind})


def plain_class(kind: type[Any]) -> type[Any]:
    """The class that parameters of class ``kind`` had when they were not guarded."""
    plain: type[Any] = getattr(kind, "_plain_class", kind)
    return plain


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is nothing but a tensor or a parameter, guarded or not."""
    kind = type(tensor)
    return kind in _PLAIN or plain_class(kind) is nn.Parameter


_PLAIN = (torch.Tensor, nn.Parameter, GuardedTensor)


def guard_parameter(param: nn.Parameter, guard: Guard, *, in_layer: bool) -> None:
    """Let ``guard`` be asked before ``param``, of a layer or of the root unit, is touched."""
    param.__dict__[GUARD] = guard
    param.__class__ = _guarded_class(type(param), LayerParameter if in_layer else GuardedParameter)


def unguard_parameter(param: nn.Parameter) -> None:
    """Let ``param`` be a plain parameter again."""
    param.__dict__.pop(GUARD, None)
    param.__class__ = plain_class(type(param))


def not_a_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN, [], 0 of a dtype that has no NaN: what parameters show whose values are on disk alone."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def is_in_graph(result: object) -> bool:
    """Whether ``result`` is a tensor of autograd's, or several, which nobody writes without autograd's
    knowing."""
    return all(isinstance(item, torch.Tensor) and item.requires_grad for item in walk((result,)))


def _memory_given(function: Function, tensors: Sequence[torch.Tensor], result: object) -> set[int]:
    """The ids of the storages to which ``result``, which ``function`` has made of ``tensors``, gives access:
    as another tensor, an array, or an address."""
    if function in _GIVES_MEMORY:
        return {storage_id(tensor) for tensor in tensors}
    own = {id(tensor) for tensor in tensors}
    return {
        storage_id(part)
        for item in walk((result,))
        if isinstance(item, torch.Tensor) and id(item) not in own
        for part in (sparse_parts(item) if is_sparse(item) else [item])
        if part.layout is torch.strided and not (part.is_nested or is_of_transform(part))
    }


def _write_rest(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], others: Collection[int]
) -> Any:
    """Call ``function`` for what it would write, but for the tensors that another process writes, of which
    ``others`` are the ids. What it returns."""
    with unguarded():
        for tensor in written_by(function, args, kwargs):
            if id(tensor) in others:
                torch.autograd.graph.increment_version(tensor)  # as a write of this process would
        if "out" in kwargs or not isinstance(args[0], list | tuple):
            return kwargs.get("out", args[0] if args else None)
        kept = [place for place, tensor in enumerate(args[0]) if id(tensor) not in others]

        def of_kept(given: Any) -> Any:
            of_each = isinstance(given, list | tuple) and len(given) == len(args[0])
            return [given[place] for place in kept] if of_each else given

        if kept:
            function(*map(of_kept, args), **{key: of_kept(given) for key, given in kwargs.items()})
        return None


@never_traced
def _touch(function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``function``, which is given guarded tensors, with what their guards have to do around it."""
    if function in METADATA:
        with unguarded():
            return function(*args, **kwargs)
    if function in _COPIES:
        args, kwargs = _at_once(args, kwargs)
    touched: list[tuple[Guard, Any]] = [
        (guard, tensor)
        for tensor in walk((*args, *kwargs.values()))
        if isinstance(tensor, Guarded) and (guard := vars(tensor).get(GUARD)) is not None
    ]
    with _held(guard.lock for guard, _ in touched):
        others = [id(tensor) for guard, tensor in touched if not guard.before(function, args, kwargs)]
        if others:
            result = _write_rest(function, args, kwargs, others)
        elif all(map(_is_touched_plainly, types)):
            with unguarded():
                result = function(*args, **kwargs)
        else:
            # other subclasses have a say too, as they would beside a plain parameter
            with _plain_for_now(tensor for _, tensor in touched):
                result = function(*args, **kwargs)
        with unguarded():
            given = _memory_given(function, [tensor for _, tensor in touched], result)
            for guard, tensor in touched:
                gave = bool(given) and storage_id(tensor) in given
                guard.after(function, args, tensor, result, gave)
    return result


@cache
def _is_touched_plainly(kind: type[Any]) -> bool:
    """Whether tensors of a class are plain ones but for their guard; a quantized weight has a say itself."""
    plain = plain_class(kind)
    own = plain.__torch_function__ is not nn.Parameter.__torch_function__
    return issubclass(kind, Guarded) and (plain is kind or not own)


def _held(locks: Iterable[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """All of ``locks``, always in the same order."""
    found = {id(lock): lock for lock in locks}
    if len(found) == 1:
        return found.popitem()[1]
    with ExitStack() as stack:
        for _, lock in sorted(found.items()):
            stack.enter_context(lock)
        return stack.pop_all()


@contextmanager
def _plain_for_now(tensors: Iterable[Any]) -> Iterator[None]:
    kinds = {id(tensor): (tensor, type(tensor)) for tensor in tensors}
    try:
        for tensor, kind in kinds.values():
            tensor.__class__ = torch.Tensor if kind is GuardedTensor else plain_class(kind)
        yield
    finally:
        for tensor, kind in kinds.values():
            tensor.__class__ = kind


def _functions(names: str) -> Iterator[Any]:
    """The properties, methods and functions of PyTorch of these names, as `__torch_function__` gets them."""
    for name in names.split():
        for home in (torch.Tensor, torch):
            found: Any = getattr(home, name, None)
            if hasattr(found, "__get__") and not callable(found):
                yield found.__get__
                if hasattr(found, "__set__"):
                    yield found.__set__
            elif found is not None:
                yield found


#: What tells of a tensor, or belongs to it, without touching its values.
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


def written_by(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that ``function`` is about to write in place.

    As PyTorch names its functions, those that end with an underscore and Python's operators write their first
    argument, others what is given as ``out``.
    """
    name = getattr(function, "__name__", "")
    is_operator = name.startswith("__") and name.endswith("__")
    in_place = name in _WRITING_OPERATORS if is_operator else name.endswith("_")
    places = (args[:1] if in_place else (), kwargs.get("out"))
    return [item for item in walk(places) if isinstance(item, torch.Tensor)]


#: Python's operators that write their first operand.
_WRITING_OPERATORS = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    )
)

#: What copies between the host and a device, and may return before it has, as ``non_blocking`` says.
_COPIES = frozenset(_functions("to cuda type copy_ _foreach_copy_"))


def _at_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of one of `_COPIES`, without leave to return early.

    Parameters and gradients of layers are in pinned memory, which the user, whose parameters were on the GPU,
    does not know. There the next operation would wait for the copy; on the host it would not.
    """
    # by position it is the first boolean
    place = next((place for place, item in enumerate(args) if isinstance(item, bool)), None)
    if place is not None and args[place]:
        args = [*args[:place], False, *args[place + 1 :]]
    return args, {**kwargs, "non_blocking": False} if kwargs.get("non_blocking") else kwargs


#: What gives memory away in another form than that of a tensor.
_GIVES_MEMORY = frozenset(
    _functions("data_ptr numpy __array__ __dlpack__ __cuda_array_interface__ untyped_storage storage")
)
