"""How long does it take to tokenize a Hugging Face folder's data, and in how much memory?

    python -m bench.data --megabytes 20 1000    # some 40 minutes on two cores

Each measurement is a process of its own: the first start of a run tokenizes, a second one finds the tokens.
Memory is the most of anonymous memory (mapped files can be dropped at any time) beyond what the process holds
once its libraries are imported. Text is the Python standard library's source, over and over; a chat has one
of its lines for a question and the next ones for an answer. The tokenizer has 32,000 byte pairs of the same
source."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, table
from streamer.cli.config import Config, DataConfig, ModelConfig
from streamer.cli.data.files import find_files

VOCABULARY, LEARNT_FROM = 32_000, 10 << 20
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS, STARTS = ("text", "chats"), ("first", "second")


def sources() -> Iterator[str]:
    """The standard library's files, over and over."""
    for path in itertools.cycle(find_files()):
        yield path.read_text(encoding="utf-8", errors="ignore")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    sizes = itertools.accumulate(len(text) for text in sources())
    count = next(number for number, size in enumerate(sizes, 1) if size > LEARNT_FROM)
    pairs.train_from_iterator(itertools.islice(sources(), count), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_data(folder: Path, kind: str, nbytes: int) -> Path:
    """A file of ``nbytes``, give or take a source file."""
    path = folder / (f"{nbytes}.txt" if kind == "text" else f"{nbytes}.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for text in sources():
            lines = text.splitlines()
            chats = (
                [("user", lines[place]), ("assistant", "\n".join(lines[place + 1 : place + 8]))]
                for place in range(0, len(lines) - 8, 8)
            )
            rows = ([{"role": role, "content": words} for role, words in chat] for chat in chats)
            file.write(
                text if kind == "text" else "".join(json.dumps({"messages": row}) + "\n" for row in rows)
            )
            if file.tell() >= nbytes:
                break
    return path


def anonymous_bytes() -> int:
    """Bytes of this process that are in no file."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def measured_here(path: Path, tokenizer_folder: Path, cache: Path) -> dict[str, float]:
    """Seconds, bytes and tokens, in this process."""
    import datasets

    from streamer.cli.data.dataset import load_data, load_tokenizer

    datasets.config.HF_DATASETS_CACHE = cache
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokenizer("as much as it needs once")
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.perf_counter()
    config = Config(ModelConfig(path=str(tokenizer_folder)), data=DataConfig(paths=(str(path),)))
    rows = load_data(config, tokenizer, seed=0)
    seconds = time.perf_counter() - begun
    done.set()
    watching.join()
    return {"seconds": seconds, "bytes": max(0, peak - before), "documents": sum(map(len, rows))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 1000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path, default=RESULTS / "data.json")
    parser.add_argument("--measure", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured_here(*options.measure)))
        return
    load_before, rows = load_average(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        for megabytes, kind in itertools.product(options.megabytes, options.kinds):
            path = write_data(folder, kind, megabytes * 10**6)
            for start in STARTS:
                places = [str(path), str(folder / "tokenizer"), str(folder / f"cache-{path.name}")]
                command = [sys.executable, "-m", "bench.data", "--measure", *places]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                rows.append({"kind": kind, "megabytes": megabytes, "start": start, **found})
                print(rows[-1], flush=True)
            path.unlink()
    write_json(options.json, provenance("bench/data.py", load_before=load_before) | {"rows": rows})


def data_table(report: Report) -> list[str]:
    """A row for each size, kind of data and start."""
    heads = ["", "MB", "documents", "start", "seconds", "MB of memory"]
    rows = [
        [
            *(row["kind"], f"{row['megabytes']:,}", f"{row['documents']:,}", row["start"]),
            *(f"{row['seconds']:,.1f}", f"{row['bytes'] / 1e6:,.0f}"),
        ]
        for row in report["rows"]
    ]
    return ["The second start finds the tokens of the first.", "", *table(heads, rows)]


if __name__ == "__main__":
    main()
