"""What a layer's result depends on besides its arguments and weights: random state, settings.

[Note: checkpointing]
A streamed layer decides itself what it keeps until backward. A checkpoint around the layer would run it
forward a third time, only to find the inputs that the layer has kept. So what the layer saves goes past the
hooks of the checkpoints around it. A checkpoint inside of a layer runs a part of the layer again in the
middle of the layer's backward, when the modules must see the weights in the slot (`LayerRun.go_back`).
Hugging Face's layers checkpoint the whole of themselves where their ``gradient_checkpointing`` is set; the
flag is off while a layer runs that is recomputed anyway.

A checkpoint with ``use_reentrant=True`` runs its first forward without gradients, which looks like inference:
inside of such a checkpoint a layer runs once more than necessary.
"""

from __future__ import annotations

import abc
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from streamer.engine.tensors.attributes import Generator
from streamer.torch_private import (
    attention_order,
    pop_saved_hooks,
    push_saved_hooks,
    set_attention_order,
    top_saved_hooks,
)

#: Blocks of each visit that mostly have nothing to change share this one: a generator for each takes longer.
NOTHING = nullcontext()


class Autocast(NamedTuple):
    """The autocast settings of one moment, per device type: (type, enabled, dtype)."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now(device: torch.device) -> Autocast:
        """What holds in the calling thread."""
        types = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
        return Autocast(
            tuple((type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type)) for type in types)
        )

    def is_on(self) -> bool:
        """Whether it is enabled for any type of device."""
        return any(enabled for _, enabled, _ in self.settings)

    def uncached(self) -> AbstractContextManager[None]:
        """These settings without autocast's cache of cast weights.

        The cache would keep a cast copy of every layer's weights on the device until autocast ends.
        """
        if not self.is_on() and not any(torch.is_autocast_enabled(type) for type, _, _ in self.settings):
            return NOTHING
        return self._uncached()

    @contextmanager
    def _uncached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for type, enabled, dtype in self.settings:
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype if enabled else None, enabled=enabled, cache_enabled=False
                    )
                )
            yield


class Attention(NamedTuple):
    """Which implementations of scaled_dot_product_attention PyTorch may choose at one moment, and in what
    order (`torch.nn.attention.sdpa_kernel`)."""

    enabled: tuple[bool, ...]
    priority: tuple[int, ...]

    @staticmethod
    def now() -> Attention:
        """What holds in the process."""
        return Attention(tuple([is_enabled() for is_enabled, _ in _ATTENTIONS]), tuple(attention_order()))

    def again(self) -> AbstractContextManager[None]:
        """Set it up inside the block."""
        now = Attention.now()
        return NOTHING if now == self else self._in_place_of(now)

    @contextmanager
    def _in_place_of(self, now: Attention) -> Iterator[None]:
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for (_, enable), enabled in zip(_ATTENTIONS, self.enabled, strict=True):
            enable(enabled)
        set_attention_order(list(self.priority))


_cuda = torch.backends.cuda
#: For each implementation the function that tells whether it may be chosen, and the one that says so.
_ATTENTIONS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)


class RandomState(NamedTuple):
    """The states of random generators at one moment: Python's, NumPy's and PyTorch's own, and some others."""

    device: torch.device
    python: Any
    numpy: Any
    cpu: torch.Tensor
    on_device: torch.Tensor | None
    others: tuple[tuple[Generator, Any], ...]

    @staticmethod
    def now(device: torch.device, others: Iterable[Generator] = ()) -> RandomState:
        """What holds in the calling thread; of PyTorch's generators those of the CPU and of ``device``."""
        return RandomState(
            device,
            _python.get(),
            _numpy.get(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            tuple([(generator, _state_of(generator)) for generator in others]),
        )

    def has_moved_on(self) -> bool:
        """Whether random numbers of PyTorch were drawn since."""
        state = self.on_device
        return not torch.equal(torch.get_rng_state(), self.cpu) or (
            state is not None and not torch.equal(torch.cuda.get_rng_state(self.device), state)
        )

    def rewind(self) -> None:
        """Go back to this moment for good."""
        _python.set(self.python)
        _numpy.set(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)
        for generator, state in self.others:
            _set_state(generator, state)


class Ambient(NamedTuple):
    """The random state and the settings of autocast and attention at one moment, to be restored later."""

    autocast: Autocast
    attention: Attention
    random: RandomState

    @staticmethod
    def now(device: torch.device, generators: Iterable[Generator] = ()) -> Ambient:
        """What holds in the calling thread, and the states of these ``generators`` beside PyTorch's, Python's
        and NumPy's own."""
        return Ambient(Autocast.now(device), Attention.now(), RandomState.now(device, generators))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore this moment inside the block. What held before the block holds after it, even if random
        numbers were drawn inside."""
        random = self.random
        with self.autocast.uncached(), self.attention.again():
            now = RandomState.now(random.device, [generator for generator, _ in random.others])
            try:
                random.rewind()
                yield
            finally:
                now.rewind()


class Memory(ctypes.Array[ctypes.c_uint32]):
    """Of a Mersenne Twister."""

    _type_ = ctypes.c_uint32
    _length_ = 625


class _OwnState(abc.ABC):
    """The state of Python's or of NumPy's own generator, taken and given back where it has changed.

    Both take as long to give or to set their state as a small layer takes to run. The state is the same as
    long as the memory of the generator is.
    """

    def __init__(self) -> None:
        #: what was read, and the state that was found with it
        self._kept: tuple[object, Any] = None, None
        #: a generator, and its memory
        self._memory: tuple[object, Memory | None] = None, None

    def get(self) -> Any:
        """The state, as `set` takes it."""
        read = self._read()
        found, state = self._kept
        if read is None or read != found:
            state = self._get()
            self._kept = read if self._is_told_by_memory(state) else None, state
        return state

    def set(self, state: Any) -> None:
        """Go back to what `get` has returned."""
        if state is not self.get():
            self._set(state)
            self._kept = self._read() if self._is_told_by_memory(state) else None, state

    def _read(self) -> object:
        """What has changed where the state has, or None where nothing tells."""
        generator = self._generator()
        if self._memory[0] is not generator:
            self._memory = generator, self._memory_of(generator)
        memory = self._memory[1]
        return None if memory is None else (bytes(memory), self._beside(generator))

    def _beside(self, generator: Any) -> object:
        """What belongs to the state and is not in the memory."""
        return None

    def _is_told_by_memory(self, state: Any) -> bool:
        """Whether the state is another one only where what `_read` finds is."""
        return True

    @abc.abstractmethod
    def _generator(self) -> Any:
        """The generator; another one where somebody has exchanged it."""

    @abc.abstractmethod
    def _memory_of(self, generator: Any) -> Memory | None:
        """The 624 numbers of a Mersenne Twister and a position among them; None where they are not found."""

    @abc.abstractmethod
    def _get(self) -> Any: ...

    @abc.abstractmethod
    def _set(self, state: Any) -> None: ...


class _PythonState(_OwnState):
    def _generator(self) -> Any:
        return random._inst

    def _memory_of(self, generator: Any) -> Memory | None:
        # CPython has a position and the numbers behind the head of the object
        if not 0 <= generator.__sizeof__() - object.__basicsize__ - ctypes.sizeof(Memory) < 64:
            return None
        memory = Memory.from_address(id(generator) + object.__basicsize__)
        position, *numbers = memory
        return memory if (*numbers, position) == generator.getstate()[1] else None

    def _beside(self, generator: Any) -> object:
        return generator.gauss_next

    def _get(self) -> Any:
        return random.getstate()

    def _set(self, state: Any) -> None:
        random.setstate(state)


class _NumpyState(_OwnState):
    def _generator(self) -> Any:
        return np.random.mtrand._rand._bit_generator

    def _memory_of(self, generator: Any) -> Memory | None:
        if type(generator) is not np.random.MT19937:
            return None
        return Memory.from_address(generator.ctypes.state_address)

    def _is_told_by_memory(self, state: Any) -> bool:
        # the second of a pair of normal numbers waits outside
        return not state["has_gauss"]

    def _get(self) -> Any:
        return np.random.get_state(legacy=False)

    def _set(self, state: Any) -> None:
        np.random.set_state(state)


_python, _numpy = _PythonState(), _NumpyState()


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


_FLAG = "gradient_checkpointing"


def past_checkpoints() -> AbstractContextManager[None]:
    """Save for backward as if no checkpoint were around the block. [Note: checkpointing]"""
    return NOTHING if top_saved_hooks() is None else _past_checkpoints()


@contextmanager
def _past_checkpoints() -> Iterator[None]:
    hooks = []
    while (top := top_saved_hooks()) is not None:
        if getattr(top[0], "__module__", None) != torch.utils.checkpoint.__name__:
            break
        hooks.append(top)
        pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)


def without_own_checkpoint(layer: nn.Module) -> AbstractContextManager[None]:
    """Run the block with a layer of Hugging Face that does not checkpoint itself. [Note: checkpointing]"""
    is_set = layer.__dict__.get(_FLAG)
    return _without_own_checkpoint(layer, is_set) if is_set else NOTHING


@contextmanager
def _without_own_checkpoint(layer: nn.Module, is_set: object) -> Iterator[None]:
    setattr(layer, _FLAG, False)
    try:
        yield
    finally:
        setattr(layer, _FLAG, is_set)
