"""How fast is the scratch storage on disk, beside plain loops of the same calls on the same disk?

    python -m bench.disk --folder /nvme/scratch    # 6 GiB of scratch, 3 GiB of memory, 6 minutes

Each round moves the same bytes in an order drawn anew: by *raw*, as many threads as the scratch storage has,
each with a plain loop of preadv or pwritev on its part of one allocated file, with O_DIRECT, blocks and
buffers of the same size; by *scratch* (`streamer.backends.disk`), extent after extent; and by *cached*, the
same without direct I/O, as on a file system that lacks it. In the directions read, write, and both at once,
which moves half of the bytes each way. What is compared are the two rates of one round. All bytes were
written once before. A loop never waits for the other loops, and a transfer of an extent ends when its last
block has arrived: the smaller the extents, the more of that shows.

The *ring* is what a step does to state on disk: a few host buffers take the extents in turn, and each is
read, changed, and written behind the next one's read, each on a lane. Its time is compared with that of the
same reads, changes and writes one after the other, and with that of the longer of its parts: both directions
at once, and the changes alone. On the disk as it is, and on one that is throttled to a quarter of a GB/s each
way, whose rate does not vary.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.disk_table import disk_table
from streamer.backends.base import Lane
from streamer.backends.disk import BLOCK_BYTES, IN_FLIGHT, Direction, Extent, Scratch
from streamer.backends.host_memory import mapped
from streamer.backends.thread import HostEvent, Worker

DIRECTIONS = ("read", "write", "both")
MIB = 1 << 20
#: Extents that go round in a ring, and buffers that they share.
RING = 24
BUFFERS = (2, 3)
#: Of the slower disk, each way, in bytes per second.
SLOW = 2.5e8

#: Moves all bytes in a direction, once.
Contender = Callable[[str], None]


def together(works: Sequence[Callable[[], None]]) -> None:
    """Run ``works`` in a thread each; raise the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def raw_file(folder: Path, nbytes: int, buffer_bytes: int, in_flight: int) -> Iterator[Contender]:
    """Plain loops on one allocated file of ``nbytes``, with a buffer of ``buffer_bytes`` for each direction;
    both are multiples of a block."""
    fd, name = tempfile.mkstemp(dir=folder)
    os.close(fd)
    fd = os.open(name, os.O_RDWR | os.O_DIRECT)
    os.unlink(name)
    os.posix_fallocate(fd, 0, nbytes)
    into, source = (mapped(buffer_bytes, in_forks=False).random_(0, 256).numpy().data for _ in range(2))

    def loop(call: Callable[..., int], buffer: memoryview, offsets: range) -> None:
        for offset in offsets:
            start = offset % buffer_bytes
            if call(fd, [buffer[start : start + BLOCK_BYTES]], offset) != BLOCK_BYTES:
                raise RuntimeError("a short transfer")

    def loops(call: Callable[..., int], buffer: memoryview, begin: int, end: int) -> list[Callable[[], None]]:
        step = in_flight * BLOCK_BYTES
        firsts = range(begin, begin + step, BLOCK_BYTES)
        return [partial(loop, call, buffer, range(first, end, step)) for first in firsts]

    def move(direction: str) -> None:
        half = nbytes // 2
        if direction == "read":
            together(loops(os.preadv, into, 0, nbytes))
        elif direction == "write":
            together(loops(os.pwritev, source, 0, nbytes))
        else:
            together(loops(os.preadv, into, 0, half) + loops(os.pwritev, source, half, nbytes))

    try:
        move("write")
        yield move
    finally:
        os.close(fd)


class Scratched:
    """Extents of equal size, written once, and buffers for them."""

    def __init__(self, scratch: Scratch, nbytes: int, extent_bytes: int, *, buffers: int = 2) -> None:
        self.scratch = scratch
        self.extents = [self.scratch.extent(extent_bytes) for _ in range(nbytes // extent_bytes)]
        self.scratch.allocate()
        self.buffers = [mapped(self.scratch.padded(extent_bytes), in_forks=False) for _ in range(buffers)]
        for buffer in self.buffers:
            buffer.random_(0, 256)
        self.move("write")

    def move(self, direction: str) -> None:
        half = len(self.extents) // 2
        if direction == "read":
            self.each(self.scratch.read, self.extents, self.buffers[0])
        elif direction == "write":
            self.each(self.scratch.write, self.extents, self.buffers[1])
        else:
            together(
                [
                    lambda: self.each(self.scratch.read, self.extents[:half], self.buffers[0]),
                    lambda: self.each(self.scratch.write, self.extents[half:], self.buffers[1]),
                ]
            )

    @staticmethod
    def each(
        transfer: Callable[[Extent, torch.Tensor], None], extents: Sequence[Extent], buffer: torch.Tensor
    ) -> None:
        for extent in extents:
            transfer(extent, buffer)


def change(buffer: torch.Tensor) -> None:
    """Work on every byte, in one thread; an update takes about as long."""
    values = buffer.numpy().view("int64")
    values += 1


def in_turn(scratched: Scratched) -> None:
    """Every extent read, changed and written, one thing at a time."""
    for extent in scratched.extents:
        buffer = scratched.buffers[0]
        scratched.scratch.read(extent, buffer)
        change(buffer)
        scratched.scratch.write(extent, buffer)


def ring(scratched: Scratched, lanes: dict[str, Worker], count: int) -> None:
    """The same with a lane for each: a buffer is read into once it has been written behind."""
    scratch = scratched.scratch
    written: list[HostEvent] = []
    for number, extent in enumerate(scratched.extents):
        buffer = scratched.buffers[number % count]
        free = [written[number - count]] if number >= count else []
        read = lanes["read"].submit(partial(scratch.read, extent, buffer), free)
        changed = lanes["host"].submit(partial(change, buffer), [read])
        written.append(lanes["write"].submit(partial(scratch.write, extent, buffer), [changed]))
    for event in written:
        event.wait()


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure_rates(options: argparse.Namespace, extent_bytes: int) -> dict[str, Any]:
    """Rates with extents of ``extent_bytes`` in bytes per second, by contender and direction, and their
    ratios to the raw rate."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {direction: [] for direction in DIRECTIONS} for name in ("raw", "scratch", "cached")
    }
    draw = random.Random(0)
    # an even number of extents
    nbytes = max(1, round(options.gib * (1 << 30) / (2 * extent_bytes))) * 2 * extent_bytes
    folders, sizes = [options.folder], (nbytes, extent_bytes)
    with (
        raw_file(options.folder, *sizes, options.in_flight) as raw,
        Scratch(folders, in_flight=options.in_flight, direct_io="require") as one,
        Scratch(folders, in_flight=options.in_flight, direct_io="off") as other,
    ):
        direct, cached = Scratched(one, *sizes), Scratched(other, *sizes)
        moves = {"raw": raw, "scratch": direct.move, "cached": cached.move}
        for _ in range(options.rounds):
            for direction in draw.sample(DIRECTIONS, len(DIRECTIONS)):
                for name in draw.sample(list(moves), len(moves)):
                    move = moves[name]
                    seconds[name][direction].append(seconds_of(lambda: move(direction)))  # noqa: B023
        in_cache = {"scratch": direct.scratch.cached_bytes(), "cached": cached.scratch.cached_bytes()}
    return {
        "bytes": nbytes,
        "extent_bytes": extent_bytes,
        "page_cache_bytes": in_cache,
        "bytes_per_second": {
            name: {
                direction: quartiles(nbytes / value for value in values) for direction, values in rows.items()
            }
            for name, rows in seconds.items()
        },
        "of_raw": {
            name: {
                direction: quartiles(
                    raw / own for raw, own in zip(seconds["raw"][direction], rows[direction], strict=True)
                )
                for direction in DIRECTIONS
            }
            for name, rows in seconds.items()
            if name != "raw"
        },
    }


def measure_ring(options: argparse.Namespace, *, rounds: int, throttle: float | None) -> dict[str, Any]:
    """Seconds of rings, and of their parts, where reads and writes take ``throttle`` bytes per second."""
    extent_bytes = options.ring_mib * MIB
    lanes = {name: Worker(Lane.HOST, name=f"bench-{name}") for name in ("read", "host", "write")}
    rates = {} if throttle is None else dict.fromkeys(Direction, throttle)
    seconds: dict[str, list[float]] = {}
    with Scratch(
        [options.folder], in_flight=options.in_flight, direct_io="require", throttle=rates
    ) as scratch:
        scratched = Scratched(scratch, RING * extent_bytes, extent_bytes, buffers=max(BUFFERS))
        halves = scratched.extents[::2], scratched.extents[1::2]

        def both_ways() -> None:
            # every extent once in each direction, as in a ring
            for reads, writes in (halves, halves[::-1]):
                together(
                    [
                        partial(scratched.each, scratch.read, reads, scratched.buffers[0]),
                        partial(scratched.each, scratch.write, writes, scratched.buffers[1]),
                    ]
                )

        def changes() -> None:
            for number in range(RING):
                change(scratched.buffers[number % len(scratched.buffers)])

        works: dict[str, Callable[[], None]] = {
            "in_turn": partial(in_turn, scratched),
            **{f"ring of {count}": partial(ring, scratched, lanes, count) for count in BUFFERS},
            "both_directions": both_ways,
            "changes": changes,
        }
        seconds = {name: [] for name in works}
        draw = random.Random(1)
        for _ in range(rounds):
            for name in draw.sample(list(works), len(works)):
                seconds[name].append(seconds_of(works[name]))
    Worker.close_all(lanes.values())
    longest = [max(pair) for pair in zip(seconds["both_directions"], seconds["changes"], strict=True)]

    def over(name: str, others: Sequence[float]) -> dict[str, float]:
        return quartiles(own / other for own, other in zip(seconds[name], others, strict=True))

    rings = [f"ring of {count}" for count in BUFFERS]
    return {
        "extents": RING,
        "extent_bytes": extent_bytes,
        "rounds": rounds,
        "throttle_bytes_per_second": throttle,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "of_in_turn": {name: over(name, seconds["in_turn"]) for name in rings},
        "of_longest": {name: over(name, longest) for name in rings},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--gib", type=float, default=2.0, help="of each of three files (2)")
    parser.add_argument(
        "--extent-mib", type=int, nargs="+", default=[32, 128, 512], help="multiples of 8 (32 128 512)"
    )
    parser.add_argument("--ring-mib", type=int, default=32, help="of an extent of the ring (32)")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help=f"calls, each way ({IN_FLIGHT})")
    parser.add_argument("--rounds", type=int, default=7, help="two or more (7)")
    parser.add_argument("--json", type=Path, default=RESULTS / "disk.json")
    options = parser.parse_args(arguments)
    if any(mib * MIB % BLOCK_BYTES for mib in options.extent_mib) or options.rounds < 2:
        parser.error("--extent-mib must be multiples of 8, and --rounds 2 or more")
    load_before = load_average()
    report = {
        **provenance("bench/disk.py", load_before=load_before),
        "block_bytes": BLOCK_BYTES,
        "in_flight": options.in_flight,
        "rounds": options.rounds,
        "rates": [measure_rates(options, mib * MIB) for mib in options.extent_mib],
        "rings": [
            measure_ring(options, rounds=options.rounds, throttle=None),
            measure_ring(options, rounds=max(2, options.rounds // 3), throttle=SLOW),
        ],
    }
    print("\n".join(disk_table(report)))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
