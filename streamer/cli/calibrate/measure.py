"""How fast this machine is at what a step consists of: products, attention, activations, copies and updates,
and transfers between disk and host memory if a folder is named.

They run on a backend's own lanes, with streamer's kernels. Every round measures each of them once, alone and
together with others, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
import streamer_native as native
from streamer.backends.base import COPIES, Backend, Event, Lane, Span
from streamer.backends.disk import Scratch
from streamer.backends.host_memory import mapped
from streamer.optim.update import ParamUpdate, UnitUpdate, update_shard
from streamer.planner.cost import Operations
from streamer.store.host import HostStore
from streamer.store.layout import Layout, Param
from streamer.store.purposes import FP32, GRADIENTS, MOMENTS

Work = Callable[[], object]
#: Rates (per second), seconds and shares of `Machine` and `KeptRates`, by field, one for each round.
Found = dict[str, list[float]]

#: The layers of the model that measures the caller's time, their features, and the tokens and the steps that
#: it is trained on in a round.
LAYERS, HIDDEN, TOKENS, STEPS = 8, 64, 16, 3
#: Host buffers that are copied in turn: a buffer that was copied just now would be in a cache.
HOST_BUFFERS = 4
#: Extents on disk that are read in turn, and as many that are written; together 1 GiB.
EXTENTS = 16
#: How often the small operations are run in a row.
REPEATS = 20
#: Pairs of lanes that are measured together: the first of each pair of groups.
PAIRS = {frozenset((a.group, b.group)): (a, b) for a, b in reversed([*itertools.combinations(Lane, 2)])}


@dataclass(frozen=True)
class Sizes:
    """What is measured: products of ``tokens`` with the matrices of a GPT of ``hidden`` features, its
    activations, attention over ``context`` tokens in heads of ``head``, all in ``dtype``; copies of
    ``copy_bytes``; transfers of ``disk_bytes`` from and to disk; updates of ``parameters``. A piece of work
    is repeated for ``seconds`` at least."""

    dtype: torch.dtype
    tokens: int
    hidden: int
    context: int
    head: int = 64
    copy_bytes: int = 32 << 20
    disk_bytes: int = 32 << 20  # as of one moment of a full chunk: see `streamer.store.on_disk`
    parameters: int = 16_000_000
    seconds: float = 0.08


# work for the lanes


def computing(device: torch.device, sizes: Sizes) -> dict[str, Work]:
    """Work for COMPUTE, forward and backward, by name: *products*, *attention*, *activations*, *small*
    operations, a *block* of the first three, and *fp32 products* where the dtype is another."""
    like: dict[str, Any] = {"device": device, "dtype": sizes.dtype}
    tokens, width = sizes.tokens, sizes.hidden

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(sizes.dtype).requires_grad_()

    products = _products(device, sizes, sizes.dtype)
    shape = max(1, tokens // sizes.context), max(1, width // sizes.head), sizes.context, sizes.head
    q, k, v = random(*shape), random(*shape), random(*shape)
    attention = _both_ways(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])
    # what a layer does apart from products: a norm and a residual sum, and a GELU four times as wide
    x, wide, norm = random(tokens, width), random(tokens, 4 * width), nn.LayerNorm(width, **like)
    residual = _both_ways(lambda: x + norm(x), [x, *norm.parameters()])
    gelu = _both_ways(lambda: F.gelu(wide, approximate="tanh"), [wide])
    # operations that take hardly longer than their launch
    mlp, little = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()).to(**like), random(4, 8)
    works: dict[str, Work] = {
        "products": products,
        "attention": attention,
        "activations": lambda: (residual(), gelu()),
        "small": _both_ways(lambda: mlp(little) + little, [little, *mlp.parameters()], times=REPEATS),
        "block": lambda: (products(), attention(), residual(), gelu()),
    }
    if sizes.dtype != torch.float32:
        works["fp32 products"] = _products(device, sizes, torch.float32)
    return works


def _products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Work:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    tokens, width = sizes.tokens, sizes.hidden
    weights = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    operands = [(random(tokens, in_), random(out, in_), random(tokens, out)) for out, in_ in weights]

    def run() -> None:
        for x, weight, grad in operands:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return run


def _both_ways(
    forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], *, times: int = 1
) -> Work:
    """``forward`` and its backward to ``leaves``, ``times`` in a row."""
    grad = torch.randn_like(forward())

    def run() -> None:
        for _ in range(times):
            torch.autograd.grad(forward(), leaves, grad)

    return run


def copies(backend: Backend, lane: Lane, nbytes: int) -> Work:
    """The next of the lane's copies of ``nbytes`` between page-locked host memory and the device."""
    on_device = backend.device_buffer(nbytes)
    hosts = [backend.host_buffer(nbytes) for _ in range(HOST_BUFFERS)]
    for host in hosts:
        host.fill_(1)  # pages that were never written may all be one page of zeros
    pairs = itertools.cycle((on_device, host) if lane is Lane.H2D else (host, on_device) for host in hosts)
    return lambda: backend.copy(*next(pairs))


def transfers(scratch: Scratch, nbytes: int) -> dict[Lane, Work]:
    """The next of `EXTENTS` reads of ``nbytes`` from ``scratch``, and of as many writes, for their lanes.
    First every extent is written once: a drive knows what was never written, and reads nothing. Raises
    DiskError, and allocates nothing, where the disk has no room for them."""
    read, written = ([scratch.extent(nbytes) for _ in range(EXTENTS)] for _ in range(2))
    scratch.allocate()
    source, into = (mapped(scratch.padded(nbytes), in_forks=False) for _ in range(2))
    source.random_(0, 256)  # some drives compress
    for extent in (*read, *written):
        scratch.write(extent, source)
    reads, writes = itertools.cycle(read), itertools.cycle(written)
    return {
        Lane.DISK_READ: lambda: scratch.read(next(reads), into),
        Lane.DISK_WRITE: lambda: scratch.write(next(writes), source),
    }


def update(backend: Backend, sizes: Sizes) -> tuple[int, Work]:
    """The bytes that an update of ``sizes.parameters`` moves, and that update, for HOST."""
    layout = Layout.of([Param("", (sizes.parameters,), sizes.dtype, True)])
    store = HostStore([layout], backend.host_buffer)
    store.add([GRADIENTS, *MOMENTS[FP32]])
    (shard,) = store.shards
    hyper = native.Hyper(1e-6, 0.9, 0.95, 1e-8, 0.1, 1)
    update = UnitUpdate.of([ParamUpdate(slice, hyper) for slice in layout.trainable], FP32)
    return update.launches.nbytes(shard.share.elements), lambda: update_shard(shard, update, 1.0)


def small_model(device: torch.device) -> tuple[nn.Module, Work]:
    """A model with layers so small that a step takes as long as issuing it, and its training step. Each layer
    has as many parameters as a layer of GPT-2, since every parameter has views and hooks."""

    def layer() -> nn.Module:
        attention = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
        mlp = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)]
        return nn.Sequential(*attention, *mlp)

    layers = nn.Sequential(*(layer() for _ in range(LAYERS)))
    model = streamer.wrap(nn.Sequential(layers), layers="0", device=device, num_slots=2)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-6)
    inputs = torch.randn(TOKENS, HIDDEN, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # learns the order
    return model, step


def counted(work: Work) -> Operations:
    """What ``work`` runs, as the virtual backend counts it."""
    counter = Operations()
    with counter:
        work()
    return counter


# measurements


class Measurements:
    """All that is measured on ``backend``, which must be idle, a round at a time; ``disk`` is the work of
    `transfers`, if a drive is measured."""

    def __init__(self, backend: Backend, sizes: Sizes, disk: Mapping[Lane, Work] | None = None) -> None:
        self._backend, self._sizes = backend, sizes
        self._computing = computing(backend.device, sizes)
        self._counts = {name: counted(work) for name, work in self._computing.items()}
        update_bytes, updating = update(backend, sizes)
        self._lanes: dict[Lane, Work] = {
            Lane.COMPUTE: self._computing["block"],
            **{lane: copies(backend, lane, sizes.copy_bytes) for lane in COPIES},
            Lane.HOST: updating,
            **(disk or {}),
        }
        self._nbytes = {**dict.fromkeys(COPIES, sizes.copy_bytes), Lane.HOST: update_bytes}
        self._nbytes |= dict.fromkeys(disk or (), sizes.disk_bytes)
        self._model, self._step = small_model(backend.device)
        self._ops_of_step = counted(self._step).ops
        for lane, work in self._lanes.items():
            self._alone(lane, work)  # the first time is slower than all others

    def round(self) -> dict[str, float]:
        """Fields of `Machine` and `KeptRates`, each measured once."""
        values = self._rates_of_compute()
        values["seconds_per_visit"] = self._seconds_per_use()
        alone = {lane: self._alone(lane, work) for lane, work in self._lanes.items()}
        for lane, nbytes in self._nbytes.items():
            values[f"{lane.value}_bytes_per_second"] = nbytes / alone[lane]
        shares = defaultdict(list)
        for pair in PAIRS.values():
            if self._lanes.keys() >= {*pair}:
                together = self._together({lane: self._lanes[lane] for lane in pair}, alone)
                for lane, other in (pair, reversed(pair)):
                    shares[f"{lane.group}_{other.group}"].append(min(1.0, alone[lane] / together[lane]))
        # lanes of one group keep different shares, of which the planner knows the mean
        return values | {name: statistics.fmean(kept) for name, kept in shares.items()}

    def close(self) -> None:
        """Unwrap the model; the caller closes the backend."""
        streamer.unwrap(self._model)

    def _rates_of_compute(self) -> dict[str, float]:
        seconds = {name: self._alone(Lane.COMPUTE, work) for name, work in self._computing.items()}
        fields = {
            "products": "flops_per_second",
            "fp32 products": "fp32_flops_per_second",
            "attention": "attention_flops_per_second",
        }
        rates = {fields[name]: self._counts[name].flops / seconds[name] for name in fields.keys() & seconds}
        per_op = seconds["small"] / self._counts["small"].ops
        # large operations wait for the memory, but not while they are launched
        moving = seconds["activations"] - per_op * self._counts["activations"].ops
        moving = max(moving, 0.5 * seconds["activations"])
        rates["device_bytes_per_second"] = self._counts["activations"].nbytes / moving
        return {**rates, "seconds_per_op": per_op}

    def _seconds_per_use(self) -> float:
        """Seconds of the library for a forward or a backward of a layer, less its operations: what those take
        is measured before every step, so that other load on the machine affects both alike."""
        of_library = []
        for _ in range(STEPS):
            per_op = self._alone(Lane.COMPUTE, self._computing["small"]) / self._counts["small"].ops
            began = time.perf_counter()
            self._step()
            of_library.append(time.perf_counter() - began - per_op * self._ops_of_step)
        return max(0.0, statistics.median(of_library)) / (2 * LAYERS)

    def _alone(self, lane: Lane, work: Work) -> float:
        """The median seconds of ``work``, repeated for ``sizes.seconds``."""
        once = _span(self._submit(lane, work))
        return self._together({lane: work}, {lane: max(once.end - once.start, 1e-6)})[lane]

    def _together(self, works: Mapping[Lane, Work], alone: Mapping[Lane, float]) -> dict[Lane, float]:
        """The median seconds of each of ``works`` while all are under way; ``alone`` has those alone."""
        # every lane has to outlast a few pieces of the slowest one's work
        seconds = max(self._sizes.seconds, *(2 * alone[lane] for lane in works))
        events: dict[Lane, list[Event]] = {}
        for lane in works:
            if lane is not Lane.COMPUTE:
                count = max(2, math.ceil(seconds / alone[lane]))
                events[lane] = [self._submit(lane, works[lane]) for _ in range(count)]
        if Lane.COMPUTE in works:
            others = [theirs[-1] for theirs in events.values()]
            mine: list[Event] = []
            until = time.perf_counter() + seconds
            while len(mine) < 2 or (
                any(event.span() is None for event in others) if others else time.perf_counter() < until
            ):
                mine.append(self._submit(Lane.COMPUTE, works[Lane.COMPUTE]))
                mine[-1].wait()
            events[Lane.COMPUTE] = mine
        return while_all_work({lane: list(map(_span, mine)) for lane, mine in events.items()})

    def _submit(self, lane: Lane, work: Work) -> Event:
        return self._backend.submit(lane, work, (), 0)


def measure(measurements: Measurements, *, rounds: int, budget_seconds: float) -> Found:
    """The values of ``rounds`` rounds, or of fewer (at least two) to stay within ``budget_seconds``."""
    began = time.perf_counter()
    found: Found = defaultdict(list)
    for number in range(rounds):
        passed = time.perf_counter() - began
        if number >= 2 and passed * (number + 1) / number > budget_seconds:
            break
        for name, value in measurements.round().items():
            found[name].append(value)
    return found


def _span(event: Event) -> Span:
    event.wait()
    span = event.span()
    assert span is not None, "it has been waited for"
    return span


def while_all_work(spans: Mapping[Lane, Sequence[Span]]) -> dict[Lane, float]:
    """The median seconds, by lane, of the pieces that lie within the time when all lanes have work. Where no
    piece lies within it, of the pieces of which the largest share does."""
    begin = max(mine[0].start for mine in spans.values())
    end = min(mine[-1].end for mine in spans.values())

    def inside(span: Span) -> float:
        return (min(span.end, end) - max(span.start, begin)) / max(span.end - span.start, 1e-9)

    found = {}
    for lane, mine in spans.items():
        most = max(map(inside, mine))
        kept = [span for span in mine if inside(span) >= most - 1e-9]
        found[lane] = max(statistics.median(span.end - span.start for span in kept), 1e-9)
    return found
