"""How near are transfers of scratch files to the speed of the disk?

    python -m bench.disk --folder /nvme/scratch    # half a minute, 2 GiB of disk

Each round writes and reads the same bytes in two ways, in a new random order: *scratch*, as state on disk is
(`streamer.backends.disk.Scratch`, one extent after another), and *raw*, a preallocated file by direct I/O in
blocks of 8 MiB from four threads, flushed after writing. Rates are GB/s, with quartiles over rounds; *of raw*
is scratch by raw within a round. The first round is not kept. Raises OSError for a folder on a file system
without direct I/O.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from streamer.backends.disk import Scratch
from streamer.backends.host_memory import mapped

EXTENT, BLOCK, THREADS = 64 << 20, 8 << 20, 4
DIRECTIONS = ("write", "read")


class Raw:
    """A preallocated file of ``nbytes`` in ``folder``. Transfers bypass the page cache."""

    def __init__(self, folder: str, nbytes: int, buffer: torch.Tensor) -> None:
        self._nbytes, self._memory = nbytes, memoryview(buffer.numpy())
        self._file = os.open(f"{folder}/raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self._file, 0, nbytes)
        self._pool = ThreadPoolExecutor(THREADS)

    def move(self, direction: str) -> None:
        """Write or read all of it."""
        move = os.pwritev if direction == "write" else os.preadv
        blocks = range(0, self._nbytes, BLOCK)
        places = [self._memory[start % EXTENT : start % EXTENT + BLOCK] for start in blocks]
        moved = self._pool.map(lambda start, place: move(self._file, [place], start), blocks, places)
        if sum(moved) != self._nbytes:
            raise OSError("a transfer moved less than a block")
        if direction == "write":
            os.fdatasync(self._file)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)


def measure(folder: str, nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s by direction and way, one for each round."""
    buffer = mapped(EXTENT, in_forks=False).random_(0, 256)  # some drives compress
    scratch, raw = Scratch([folder]), Raw(folder, nbytes, buffer)
    extents = [scratch.extent(EXTENT) for _ in range(nbytes // EXTENT)]
    scratch.allocate()

    def move(direction: str) -> None:
        for extent in extents:
            (scratch.write if direction == "write" else scratch.read)(extent, buffer)

    ways: dict[str, Callable[[str], None]] = {"scratch": move, "raw": raw.move}
    found: dict[str, dict[str, list[float]]] = {each: {way: [] for way in ways} for each in DIRECTIONS}
    order = random.Random(0)
    for number in range(rounds + 1):
        for direction in DIRECTIONS:
            for way in order.sample(sorted(ways), len(ways)):
                began = time.perf_counter()
                ways[way](direction)
                if number:
                    found[direction][way].append(nbytes / (time.perf_counter() - began) / 1e9)
    scratch.close()
    raw.close()
    return found


def report_table(report: Report) -> list[str]:
    """The rates of both ways, and their ratio."""
    rows = [
        [direction, *(spread(row[way], ".2f") for way in ("scratch", "raw", "of_raw"))]
        for direction, row in report["directions"].items()
    ]
    return table(["", "scratch files, GB/s", "raw, GB/s", "of raw"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="a multiple of 64 (1024)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "disk.json")
    options = parser.parse_args(arguments)
    load_before, nbytes = load_average(), options.mib << 20
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(folder, nbytes, options.rounds)
    rows = {}
    for direction, rates in found.items():
        ratios = [ours / raw for ours, raw in zip(rates["scratch"], rates["raw"], strict=True)]
        rows[direction] = {way: quartiles(each) for way, each in {**rates, "of_raw": ratios}.items()}
        medians = [f"{way} {each['median']:.2f}" for way, each in rows[direction].items()]
        print(direction, *medians, flush=True)
    report = provenance("bench/disk.py", load_before=load_before)
    write_json(options.json, report | {"bytes": nbytes, "rounds": options.rounds, "directions": rows})


if __name__ == "__main__":
    main()
