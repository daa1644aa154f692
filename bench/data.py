"""How long does it take to make tokens of text and of chats, and in how much memory?

    python -m bench.data --megabytes 20 1000    # some 25 minutes on two cores

Each measurement is a process of its own, in which nothing else happens: *streamer* makes tokens as a run's
first start does, into files that are mapped; *again* is a later start, which finds them; *plain* reads the
file whole and gives all of it to the same tokenizer at once, for the smallest size alone, since its memory
grows with the text, and without noting what of a chat is learnt. The order of the two is drawn anew in each
round. Memory is the most of anonymous memory (mapped files can be dropped at any time) beside what the
process holds once its libraries are imported.

Text is the Python standard library's source, over and over; a chat has one of its lines for a question and
the next ones for an answer. The tokenizer has 32,000 byte pairs learnt from the same source.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from streamer.app.data.files import find_files

#: What the tokenizer learns from, in bytes.
LEARNT_FROM = 10 << 20
VOCABULARY = 32_000
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS, WAYS = ("text", "chats"), ("streamer", "again", "plain")


def sources() -> Iterator[str]:
    """The standard library's files, over and over."""
    files = find_files(())
    for path in itertools.cycle(files):
        yield path.read_text(encoding="utf-8", errors="ignore")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    taken, size = [], 0
    for text in sources():
        taken.append(text)
        if (size := size + len(text)) > LEARNT_FROM:
            break
    pairs.train_from_iterator(taken, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def write_data(folder: Path, kind: str, nbytes: int) -> Path:
    """A file of ``nbytes``, give or take a file or a chat."""
    path = folder / (f"{nbytes}.txt" if kind == "text" else f"{nbytes}.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for text in sources():
            if kind == "text":
                file.write(text)
            else:
                lines = text.splitlines()
                for place in range(0, len(lines) - 8, 8):
                    turns = ["\n".join(lines[place : place + 1]), "\n".join(lines[place + 1 : place + 8])]
                    roles = zip(("user", "assistant"), turns, strict=True)
                    messages = [{"role": role, "content": content} for role, content in roles]
                    file.write(json.dumps({"messages": messages}) + "\n")
            if file.tell() >= nbytes:
                return path
    raise AssertionError("sources do not end")


def anonymous_bytes() -> int:
    """Bytes of this process that are in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


def measured_here(way: str, path: Path, tokenizer_folder: Path, cache: Path) -> dict[str, float]:
    """Seconds, bytes and tokens of one way, in this process."""
    from streamer.app.data.load import load_tokenizer, load_tokens

    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokenizer("as much as it needs once")
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.perf_counter()
    if way == "plain":
        tokens = plain(path, tokenizer)
    else:
        data = load_tokens([path], tokenizer, val_fraction=0.05, cache=str(cache))
        tokens = data.train.numel() + data.val.numel()
    seconds = time.perf_counter() - begun
    peak = max(peak, anonymous_bytes())
    done.set()
    watching.join()
    return {"seconds": seconds, "bytes": max(0, peak - before), "tokens": tokens, "bytes_before": before}


def plain(path: Path, tokenizer: Any) -> int:
    """The tokens in ``path``, made all at once."""
    if path.suffix == ".txt":
        texts = [path.read_text(encoding="utf-8")]
    else:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [
            tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines
        ]
    encoded = tokenizer(texts, return_offsets_mapping=True, verbose=False)
    return sum(map(len, encoded["input_ids"]))


def measure(way: str, path: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    """`measured_here` in a process of its own."""
    command = [sys.executable, "-m", "bench.data", "--measure", way, str(path), str(tokenizer), str(cache)]
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    found: dict[str, float] = json.loads(printed.stdout.splitlines()[-1])
    return found


def spread_of(values: Iterable[float]) -> dict[str, float]:
    """Quartiles; of a single value that one."""
    given = [*values]
    return quartiles(given * 2 if len(given) == 1 else given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 1000])
    parser.add_argument("--rounds", type=int, default=3, help="of the smallest size; one of the others")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=RESULTS / "data.json")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        way, *places = options.measure
        print(json.dumps(measured_here(way, *map(Path, places))))
        return
    load_before = load_average()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        write_tokenizer(folder / "tokenizer")
        smallest = min(options.megabytes)
        for size, kind in itertools.product(sorted(options.megabytes), KINDS):
            path = write_data(folder, kind, size * 10**6)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            draws = random.Random(size)
            for number in range(options.rounds if size == smallest else 1):
                cache = folder / f"cache-{number}"
                ways = ["streamer", "plain"] if size == smallest else ["streamer"]
                for way in draws.sample(ways, len(ways)):
                    found[way].append(measure(way, path, folder / "tokenizer", cache))
                found["again"].append(measure("again", path, folder / "tokenizer", cache))
                for file in sorted(cache.rglob("*"), reverse=True):
                    file.unlink() if file.is_file() else file.rmdir()
            row = {"kind": kind, "bytes": path.stat().st_size, "ways": {}}
            for way, runs in found.items():
                if runs:
                    row["ways"][way] = {
                        "seconds": spread_of(run["seconds"] for run in runs),
                        "bytes": spread_of(run["bytes"] for run in runs),
                        "bytes_before": max(run["bytes_before"] for run in runs),
                        "tokens": runs[0]["tokens"],
                    }
            plain_seconds, own = found["plain"], found["streamer"]
            if plain_seconds:
                pairs = zip(own, plain_seconds, strict=True)
                row["ratio"] = spread_of(a["seconds"] / b["seconds"] for a, b in pairs)
            rows.append(row)
            print(json.dumps(row), flush=True)
            path.unlink()
    write_json(options.json, provenance("bench/data.py", load_before=load_before) | {"rows": rows})


if __name__ == "__main__":
    main()
