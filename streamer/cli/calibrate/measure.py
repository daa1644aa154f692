"""How fast this machine is at what a step consists of: products, attention, activations, copies and updates,
and transfers between disk and host memory if a folder is named.

They run on a backend's own lanes, with streamer's kernels. Every round measures each of them once, alone and
together with others, so that other load on the machine affects all alike. `VisitCosts` measures the caller's
time in the library itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

LAYERS, HIDDEN, TOKENS = 8, 64, 16
#: Steps of a round.
STEPS = 3


class VisitCosts:
    """Trains layers so small that a step takes as long as issuing it. Each has as many parameters as a layer
    of GPT-2, since every parameter has views and hooks. ``seconds_per_op`` measures what an operation takes
    now that takes hardly longer than its launch."""

    def __init__(self, device: torch.device, seconds_per_op: Callable[[], float]) -> None:
        self._seconds_per_op = seconds_per_op
        layers = nn.Sequential(*(_layer() for _ in range(LAYERS)))
        self._model = streamer.wrap(nn.Sequential(layers), layers="0", device=device, num_slots=2)
        self._optimizer = streamer.AdamW(self._model.parameters(), lr=1e-6)
        self._inputs = torch.randn(TOKENS, HIDDEN, device=device)
        self._step()  # learns the order
        self._ops = counted(self._step).ops

    def seconds(self) -> float:
        """Seconds per layer call, less its operations: what those take is measured before every step, so that
        other load on the machine affects both alike."""
        of_library: list[float] = []
        for _ in range(STEPS):
            of_operations = self._seconds_per_op() * self._ops
            began = time.perf_counter()
            self._step()
            of_library.append(time.perf_counter() - began - of_operations)
        # each layer's forward and its backward
        return max(0.0, statistics.median(of_library)) / (2 * LAYERS)

    def close(self) -> None:
        """Unwrap the model."""
        streamer.unwrap(self._model)

    def _step(self) -> None:
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _layer() -> nn.Module:
    attention = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
    mlp = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)]
    return nn.Sequential(*attention, *mlp)


Work = Callable[[], object]

#: Host buffers that are copied in turn: a buffer that was copied just now would be in a cache.
HOST_BUFFERS = 4
#: Extents on disk that are read in turn, and as many that are written; together 1 GiB.
EXTENTS = 16
#: How often the small operations are run in a row.
REPEATS = 20


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


def computing(backend: Backend, sizes: Sizes) -> dict[str, Work]:
    """Work for COMPUTE, forward and backward, by name: *products*, *attention*, *activations*, *small*
    operations, a *block* of the first three, and *fp32 products* where the dtype is another."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=backend.device).to(sizes.dtype).requires_grad_()

    def norm(features: int) -> nn.LayerNorm:
        return nn.LayerNorm(features, device=backend.device, dtype=sizes.dtype)

    products = _products(backend, sizes, sizes.dtype)
    heads = max(1, sizes.hidden // sizes.head)
    shape = (max(1, sizes.tokens // sizes.context), heads, sizes.context, sizes.head)
    q, k, v = random(*shape), random(*shape), random(*shape)
    attention = _both_ways(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])
    # what a layer does apart from products: a norm and a residual sum, and a GELU four times as wide
    x, wide = random(sizes.tokens, sizes.hidden), random(sizes.tokens, 4 * sizes.hidden)
    of_hidden = norm(sizes.hidden)
    residual = _both_ways(lambda: x + of_hidden(x), [x, *of_hidden.parameters()])
    gelu = _both_ways(lambda: F.gelu(wide, approximate="tanh"), [wide])
    # operations that take hardly longer than their launch
    mlp = nn.Sequential(norm(8), nn.Linear(8, 8), nn.GELU()).to(device=backend.device, dtype=sizes.dtype)
    little = random(4, 8)
    works: dict[str, Work] = {
        "products": products,
        "attention": attention,
        "activations": lambda: (residual(), gelu()),
        "small": _both_ways(lambda: mlp(little) + little, [little, *mlp.parameters()], times=REPEATS),
        "block": lambda: (products(), attention(), residual(), gelu()),
    }
    if sizes.dtype != torch.float32:
        works["fp32 products"] = _products(backend, sizes, torch.float32)
    return works


def _products(backend: Backend, sizes: Sizes, dtype: torch.dtype) -> Work:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=backend.device).to(dtype)

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
    in_turn = itertools.cycle(hosts)

    def run() -> None:
        host = next(in_turn)
        into, source = (on_device, host) if lane is Lane.H2D else (host, on_device)
        backend.copy(into, source)

    return run


class Transfers:
    """Transfers of ``nbytes`` between ``scratch`` and host memory: `EXTENTS` that are read in turn, and as
    many that are written. Raises DiskError, and allocates nothing, where the disk has no room for them."""

    def __init__(self, scratch: Scratch, nbytes: int) -> None:
        self.nbytes = scratch.padded(nbytes)
        self._scratch = scratch
        self._read, self._written = ([scratch.extent(nbytes) for _ in range(EXTENTS)] for _ in range(2))
        scratch.allocate()

    def works(self) -> dict[Lane, Work]:
        """The next read and the next write, for the lanes that they run on. First every extent is written
        once: a drive knows what was never written, and reads nothing."""
        source, into = (mapped(self.nbytes, in_forks=False) for _ in range(2))
        source.random_(0, 256)  # some drives compress
        for extent in (*self._read, *self._written):
            self._scratch.write(extent, source)
        reads, writes = itertools.cycle(self._read), itertools.cycle(self._written)
        return {
            Lane.DISK_READ: lambda: self._scratch.read(next(reads), into),
            Lane.DISK_WRITE: lambda: self._scratch.write(next(writes), source),
        }


def update(backend: Backend, sizes: Sizes) -> tuple[int, Work]:
    """The bytes that an update of ``sizes.parameters`` moves, and that update, for HOST."""
    layout = Layout.of([Param("", (sizes.parameters,), sizes.dtype, True)])
    store = HostStore([layout], backend.host_buffer)
    store.add([GRADIENTS, *MOMENTS[FP32]])
    (shard,) = store.shards
    hyper = native.Hyper(1e-6, 0.9, 0.95, 1e-8, 0.1, 1)
    update = UnitUpdate.of([ParamUpdate(slice, hyper) for slice in layout.trainable], FP32)

    def run() -> None:
        update_shard(shard, update, 1.0)

    return update.launches.nbytes(shard.share.elements), run


#: Rates (per second), seconds and shares of `Machine` and `Beside`, by field, one for each round.
Found = dict[str, list[float]]

#: Pairs of lanes that are measured together: the first of each pair of groups.
PAIRS = {frozenset((a.group, b.group)): (a, b) for a, b in reversed([*itertools.combinations(Lane, 2)])}


class Stopwatch:
    """Times pieces of work on the lanes of ``backend``, which must be idle, each repeated for ``seconds``."""

    def __init__(self, backend: Backend, seconds: float) -> None:
        self._backend = backend
        self._seconds = seconds

    def alone(self, lane: Lane, work: Work) -> float:
        """The median seconds of ``work``."""
        once = _span(self._submit(lane, work))
        return self.together({lane: work}, {lane: max(once.end - once.start, 1e-6)})[lane]

    def together(self, works: Mapping[Lane, Work], alone: Mapping[Lane, float]) -> dict[Lane, float]:
        """The median seconds of each of ``works`` while all are under way; ``alone`` has those alone."""
        # every lane has to outlast a few pieces of the slowest one's work
        seconds = max(self._seconds, *(2 * alone[lane] for lane in works))
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


class Measurements:
    """All that is measured on ``backend``, which must be idle, a round at a time; ``transfers``, if there
    are any, on its lanes of the disk."""

    def __init__(self, backend: Backend, sizes: Sizes, transfers: Transfers | None = None) -> None:
        self._watch = Stopwatch(backend, sizes.seconds)
        self._computing = computing(backend, sizes)
        update_bytes, updating = update(backend, sizes)
        self._lanes: dict[Lane, Work] = {
            Lane.COMPUTE: self._computing["block"],
            **{lane: copies(backend, lane, sizes.copy_bytes) for lane in COPIES},
            Lane.HOST: updating,
        }
        self._nbytes = {**dict.fromkeys(COPIES, sizes.copy_bytes), Lane.HOST: update_bytes}
        if transfers is not None:
            works = transfers.works()
            self._lanes |= works
            self._nbytes |= dict.fromkeys(works, transfers.nbytes)
        self._counts = {name: counted(work) for name, work in self._computing.items()}
        self._visits = VisitCosts(backend.device, self._seconds_per_op)
        for lane, work in self._lanes.items():
            self._watch.alone(lane, work)  # the first time is slower than all others

    def round(self) -> dict[str, float]:
        """Fields of `Machine` and `Beside`, each measured once."""
        seconds = {name: self._watch.alone(Lane.COMPUTE, work) for name, work in self._computing.items()}
        values = _of_compute(seconds, self._counts)
        values["seconds_per_visit"] = self._visits.seconds()
        alone = {lane: self._watch.alone(lane, work) for lane, work in self._lanes.items()}
        for lane, nbytes in self._nbytes.items():
            values[f"{lane.value}_bytes_per_second"] = nbytes / alone[lane]
        shares = defaultdict(list)
        for pair in PAIRS.values():
            if self._lanes.keys() >= {*pair}:
                together = self._watch.together({lane: self._lanes[lane] for lane in pair}, alone)
                for lane, other in (pair, reversed(pair)):
                    shares[f"{lane.group}_{other.group}"].append(min(1.0, alone[lane] / together[lane]))
        # lanes of one group keep different shares, of which the planner knows the mean
        return values | {name: statistics.fmean(kept) for name, kept in shares.items()}

    def _seconds_per_op(self) -> float:
        return self._watch.alone(Lane.COMPUTE, self._computing["small"]) / self._counts["small"].ops

    def close(self) -> None:
        """Unwrap the model of `VisitCosts`; the caller closes the backend."""
        self._visits.close()


def measure(measurements: Measurements, *, rounds: int, budget_seconds: float) -> Found:
    """The values of ``rounds`` rounds, or of fewer (at least two) to stay within ``budget_seconds``."""
    began = time.perf_counter()
    found: Found = {}
    for number in range(rounds):
        passed = time.perf_counter() - began
        if number >= 2 and passed * (number + 1) / number > budget_seconds:
            break
        add(found, measurements.round())
    return found


def add(found: Found, values: Mapping[str, float]) -> None:
    """Add a round's ``values``."""
    for name, value in values.items():
        found.setdefault(name, []).append(value)


def counted(work: Work) -> Operations:
    """What ``work`` runs, as the virtual backend counts it."""
    counter = Operations()
    with counter:
        work()
    return counter


def _of_compute(seconds: Mapping[str, float], counts: Mapping[str, Operations]) -> dict[str, float]:
    names = {
        "products": "flops_per_second",
        "fp32 products": "fp32_flops_per_second",
        "attention": "attention_flops_per_second",
    }
    per_op = seconds["small"] / counts["small"].ops
    # large operations wait for the memory, but not while they are launched
    moving = max(seconds["activations"] - per_op * counts["activations"].ops, 0.5 * seconds["activations"])
    return {
        **{field: counts[name].flops / seconds[name] for name, field in names.items() if name in seconds},
        "device_bytes_per_second": counts["activations"].nbytes / moving,
        "seconds_per_op": per_op,
    }


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
