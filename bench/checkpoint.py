"""How fast is a checkpoint written, compared with a plain sequential write of as many bytes to the same disk?

    python -m bench.checkpoint --folder .    # 1 GB, a minute or two

Each round writes both, in a new random order: *save* is `streamer.save` of a GPT with its moments (checksums,
whole masters, flushed to the disk, renamed), *raw* one file of the same size from one buffer in memory,
written 16 MiB at a time and flushed. Both are deleted before the next. Also timed: `streamer.load`, which
reads and checks all of it before any change, from files in the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from models.gpt2 import GPT
from streamer.engine.handle import wrapped

CHUNK = 1 << 24


def raw_write(path: Path, data: memoryview, nbytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        left = nbytes
        while left:
            left -= file.write(data[: min(CHUNK, left)])
        os.fsync(file.fileno())


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def report_table(report: Report) -> list[str]:
    rows = [[name, spread(row)] for name, row in report["gb_per_second"].items()]
    return [
        f"{report['bytes']:,} bytes; written at {spread(report['save_of_raw'])} of the rate of a raw write.",
        "",
        *table(["", "GB/s"], rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to test"
    )
    parser.add_argument("--n-layer", type=int, default=12)
    parser.add_argument("--n-embd", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "checkpoint.json")
    options = parser.parse_args()
    load_before = load_average()
    torch.manual_seed(0)
    model = GPT(vocab_size=256, block_size=64, n_layer=options.n_layer, n_head=12, n_embd=options.n_embd)
    streamer.wrap(model, layers="transformer.h", device="cpu", dtype=getattr(torch, options.dtype))
    optimizer = streamer.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    streamer.synchronize(model)
    seconds: dict[str, list[float]] = {"save": [], "raw": [], "load": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, raw = Path(folder) / "checkpoint", Path(folder) / "raw"
        streamer.save(model, optimizer, path, step=1)
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        data = torch.randint(256, (CHUNK,), dtype=torch.uint8).numpy().data
        draw = random.Random(0)
        for _ in range(options.rounds):
            seconds["load"].append(seconds_of(lambda: streamer.load(model, optimizer, path)))
            for name in draw.sample(["save", "raw"], 2):
                shutil.rmtree(path, ignore_errors=True)
                raw.unlink(missing_ok=True)
                work = (
                    (lambda: streamer.save(model, optimizer, path, step=1))
                    if name == "save"
                    else (lambda: raw_write(raw, data, nbytes))
                )
                seconds[name].append(seconds_of(work))
            if not path.exists():
                streamer.save(model, optimizer, path, step=1)
    wrapped(model).close()
    of_raw = quartiles(raw / save for raw, save in zip(seconds["raw"], seconds["save"], strict=True))
    report = {
        **provenance("bench/checkpoint.py", load_before=load_before),
        "bytes": nbytes,
        "rounds": options.rounds,
        "settings": {"n_layer": options.n_layer, "n_embd": options.n_embd, "dtype": options.dtype},
        "gb_per_second": {
            name: quartiles(nbytes / value / 1e9 for value in values) for name, values in seconds.items()
        },
        "save_of_raw": of_raw,
    }
    for name, row in report["gb_per_second"].items():
        print(
            f"{name}: {row['median']:.2f} GB/s ({row['lower_quartile']:.2f} to {row['upper_quartile']:.2f})"
        )
    lower, median, upper = of_raw.values()
    print(f"save at {median:.2f} of raw ({lower:.2f} to {upper:.2f})")
    write_json(options.json, report)


if __name__ == "__main__":
    main()
