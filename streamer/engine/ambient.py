"""What a layer's result depends on besides its arguments and weights: random state, settings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streamer.engine.containers import Generator


@dataclass(frozen=True)
class Autocast:
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

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """These settings without autocast's cache of cast weights.

        The cache would keep a cast copy of every layer's weights on the device until autocast ends.
        """
        with ExitStack() as stack:
            for type, enabled, dtype in self.settings:
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype if enabled else None, enabled=enabled, cache_enabled=False
                    )
                )
            yield


@dataclass(frozen=True)
class Attention:
    """Which implementations of scaled_dot_product_attention PyTorch may choose at one moment, and in what
    order (`torch.nn.attention.sdpa_kernel`)."""

    enabled: tuple[bool, ...]
    priority: tuple[int, ...]

    _NAMES = ("flash", "mem_efficient", "math", "cudnn")

    @staticmethod
    def now() -> Attention:
        """What holds in the process."""
        cuda = torch.backends.cuda
        enabled = tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in Attention._NAMES)
        return Attention(enabled, tuple(torch._C._get_sdp_priority_order()))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set it up inside the block."""
        now = Attention.now()
        if now == self:
            yield
            return
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for name, enabled in zip(self._NAMES, self.enabled, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
        torch._C._set_sdp_priority_order(list(self.priority))


@dataclass(frozen=True)
class Ambient:
    """Random state and settings of autocast and attention of one moment, to be set up again at another."""

    device: torch.device
    autocast: Autocast
    attention: Attention
    python_random_state: Any
    numpy_random_state: Any
    cpu_random_state: torch.Tensor
    device_random_state: torch.Tensor | None
    #: of others than PyTorch's, Python's and NumPy's own
    generators: tuple[tuple[Generator, Any], ...]

    @staticmethod
    def now(device: torch.device, generators: Iterable[Generator] = ()) -> Ambient:
        """What holds in the calling thread, and the states of these ``generators``."""
        device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return Ambient(
            device,
            Autocast.now(device),
            Attention.now(),
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            device_state,
            tuple((generator, _state_of(generator)) for generator in generators),
        )

    def has_moved_on(self) -> bool:
        """Whether random numbers of PyTorch were drawn since."""
        state = self.device_random_state
        return not torch.equal(torch.get_rng_state(), self.cpu_random_state) or (
            state is not None and not torch.equal(torch.cuda.get_rng_state(self.device), state)
        )

    def rewind(self) -> None:
        """Go back to this moment's random state for good."""
        random.setstate(self.python_random_state)
        np.random.set_state(self.numpy_random_state)
        torch.set_rng_state(self.cpu_random_state)
        if self.device_random_state is not None:
            torch.cuda.set_rng_state(self.device_random_state, self.device)
        for generator, state in self.generators:
            _set_state(generator, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set it up inside the block; what held before holds after it, random numbers drawn or not."""
        devices = [] if self.device_random_state is None else [self.device]
        with torch.random.fork_rng(devices=devices), self.autocast.uncached(), self.attention.again():
            now = random.getstate(), np.random.get_state()
            generators = [(generator, _state_of(generator)) for generator, _ in self.generators]
            try:
                self.rewind()
                yield
            finally:
                random.setstate(now[0])
                np.random.set_state(now[1])
                for generator, state in generators:
                    _set_state(generator, state)


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
