"""Quantized weights that are dequantized once in a visit of their layer.

[Note: dequantized once]
A library dequantizes a weight wherever it is used: in forward, where the layer is recomputed, in backward,
and all that for each micro-batch. During a visit of a layer its weights stay the same. So what a library
makes of a weight is kept until the visit ends (`Made`), and the next use has the same tensor:

- A subclass of torchao dequantizes in a method. On the weight that a layer sees, and on its transpose, the
  method keeps what it returns (`keeping`).
- bitsandbytes, and torchao's int8, turn codes into values by functions of PyTorch. So the codes are tensors
  of a class whose ``__torch_function__`` keeps what such a function returns (`codes`).

Which kernel multiplies is left to the library, so that results are the same to the bit. A kept tensor that
somebody has written is made anew.

The price is device memory: the values of all quantized weights of a layer, in place of one weight's. It is
paid where there is a second use. In forward that is a second micro-batch. In backward it is recomputation and
backward themselves, for a library that dequantizes again in backward (`Composite.is_made_again`), and where
autograd saves the values, a second micro-batch.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from streamer.bitsandbytes_private import dequantizes, product_with_4_bits
from streamer.torch_private import SubclassesOff, storage_id

#: The attribute of a tensor that has its `Made`.
_MADE = "_streamer_made"


class Made:
    """What was made of one weight in the visit that is under way."""

    def __init__(self) -> None:
        #: whether anything is kept in visits
        self.is_wanted = False
        self._kept: dict[Hashable, tuple[torch.Tensor, int]] | None = None
        self._is_making = False

    @property
    def is_kept(self) -> bool:
        """Whether a visit is under way, in which things are kept."""
        return self._kept is not None

    def begin(self) -> None:
        """Keep what is made from now on."""
        self._kept = {}

    def end(self) -> None:
        """Let go of all that was made."""
        self._kept = None

    def once(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` returns, which is called once for each ``key`` in a visit. What it makes on its way
        is not kept."""
        if self._kept is None or self._is_making:
            return make()
        found = self._kept.get(key)
        if found is not None and found[0]._version == found[1]:
            return found[0]
        self._is_making = True
        try:
            made = make()
        finally:
            self._is_making = False
        if not (made.requires_grad or made.is_inference()):
            self._kept[key] = made, made._version
        return made


@contextmanager
def kept(several: Sequence[Made]) -> Iterator[None]:
    """In the block each of ``several`` keeps what is made."""
    try:
        for made in several:
            made.begin()
        yield
    finally:
        for made in several:
            made.end()


def _with(tensor: Any, kind: Any, made: Made) -> Any:
    """``tensor``, made one of the class ``kind`` of which things are kept in ``made``."""
    if type(tensor) is not kind:
        tensor.__class__ = kind
    tensor.__dict__[_MADE] = made
    return tensor


def _made_of(tensor: Any) -> Any:
    """The `Made` of ``tensor``; None for a tensor that has none."""
    return tensor.__dict__.get(_MADE)


# weights that dequantize themselves

#: The methods by which tensor subclasses give their values: torchao's, and that of its NF4Tensor.
_METHODS = ("dequantize", "get_original_weight")


def is_made_again(kind: type) -> bool:
    """`Composite.is_made_again` for weights of the class ``kind``."""
    return hasattr(kind, "get_original_weight")


def keeping(weight: torch.Tensor, made: Made) -> torch.Tensor:
    """``weight``, of a tensor subclass; what its methods make of it is kept in ``made``."""
    kind: Any = type(weight)
    # attributes of the object, which Python finds before the methods: of another class it would be no tensor
    # that the library takes for its own
    own = {name: _kept_by(name, weight, made) for name in _methods(kind)}
    if own:
        vars(weight).update(own | {_MADE: made, "t": _transposed(weight, made)})
    return weight


def keeping_as(weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``weight``, which keeps what is made of it where ``other`` does."""
    made = _made_of(other)
    return weight if made is None else keeping(weight, made)


@cache
def _methods(kind: type) -> list[str]:
    return [name for name in _METHODS if isinstance(inspect.getattr_static(kind, name, None), FunctionType)]


def _kept_by(name: str, weight: torch.Tensor, made: Made) -> Callable[..., torch.Tensor]:
    method, own = getattr(type(weight), name), weakref.ref(weight)

    def once(*args: Any, **kwargs: Any) -> torch.Tensor:
        this: Any = own()
        places = [_place(getattr(this, part)) for part in this.__tensor_flatten__()[0]]
        key = name, repr(args), repr(kwargs), this.shape, *places
        return made.once(key, lambda: method(this, *args, **kwargs))

    return once


def _transposed(weight: torch.Tensor, made: Made) -> Callable[[], torch.Tensor]:
    own = weakref.ref(weight)

    def transposed() -> torch.Tensor:
        this: Any = own()
        return keeping(type(this).t(this), made)

    return transposed


def _place(tensor: torch.Tensor) -> Hashable:
    """Which part of a weight ``tensor`` shows, and in which order."""
    with SubclassesOff():
        return tensor.storage_offset(), tensor.shape, tensor.stride()


# codes that functions of PyTorch make values of


def codes(tensor: torch.Tensor, made: Made, *, are_scaled_in_place: bool = False) -> Any:
    """``tensor``; the values that functions of PyTorch make of it are kept in ``made``.
    ``are_scaled_in_place`` says that a library casts the codes, and multiplies what it gets in place."""
    return _with(tensor, _codes(type(tensor), are_scaled_in_place=are_scaled_in_place), made)


@cache
def _codes(kind: Any, *, are_scaled_in_place: bool) -> Any:
    return type(kind)(
        kind.__name__, (Codes, kind), {"_plain_class": kind, "_are_scaled_in_place": are_scaled_in_place}
    )


class Codes:
    """Codes of a quantized weight."""

    _are_scaled_in_place = False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own: Any = next((each for each in args if isinstance(each, Codes)), None)
        made: Made | None = None if own is None else _made_of(own)

        def result() -> Any:
            with SubclassesOff():
                return function(*args, **kwargs)

        if made is None:
            return result()
        name = getattr(getattr(function, "overloadpacket", function), "_qualified_op_name", None)
        if name == "bitsandbytes::gemm_4bit" and made.is_kept and dequantizes(*args):
            return product_with_4_bits(*args, **kwargs)
        if name == "bitsandbytes::dequantize_4bit" and "out" not in kwargs:
            # but for the scales, which belong to the codes
            key = name, _place(own), repr(args[2:]), repr(kwargs)
            return made.once(key, result)
        if function is torch.Tensor.to and (dtype := _dtype_in(args, kwargs)) is not None:
            if cls._are_scaled_in_place and made.is_kept:
                return _Unscaled.of(own, dtype, made)
            return made.once((dtype, _place(own)), result)
        found = result()
        if type(found) is torch.Tensor and found.dtype == own.dtype and storage_id(found) == storage_id(own):
            return codes(found, made, are_scaled_in_place=cls._are_scaled_in_place)
        return found


def _dtype_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of floating-point numbers that is named in arguments of `torch.Tensor.to`."""
    dtypes = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


class _Unscaled(torch.Tensor):
    """Codes as floating-point numbers, which a library is about to multiply with their scales in place. They
    are made where anything else is done with them: this tensor has no values of its own."""

    _make: Callable[[], torch.Tensor]
    _key: Hashable

    @staticmethod
    def of(own: torch.Tensor, dtype: torch.dtype, made: Made) -> Any:
        """``own`` in ``dtype``; products are kept in ``made``."""
        with SubclassesOff():
            plain = own.as_subclass(torch.Tensor)
            found = torch.empty((), dtype=dtype, device=own.device).expand(own.shape)
        found = _with(found, _Unscaled, made)
        found._key, found._make = ("scaled", dtype, _place(own)), lambda: plain.to(dtype, copy=True)
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.mul_ and isinstance(args[0], _Unscaled):
            own = args[0]
            return _made_of(own).once(own._key, lambda: own._make().mul_(*args[1:]))

        def values(each: Any) -> Any:
            return each._make() if isinstance(each, _Unscaled) else each

        return function(*tree_map(values, tuple(args)), **tree_map(values, dict(kwargs or {})))
