"""streamer/app/run/data.py: which files are read, how they are split, and the batches made of them."""

from __future__ import annotations

import builtins
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from streamer.app.data.files import find_files
from streamer.app.data.load import load_bytes
from streamer.app.data.splits import TokenData
from tests.app.common import error_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**texts: str | bytes) -> None:
    """Files in the working directory, ``__`` in a name being a folder's slash and ``_`` a dot."""
    for name, text in texts.items():
        path = Path(name.replace("__", "/").replace("_", "."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def text_of(split: torch.Tensor) -> bytes:
    return bytes(split.tolist())


def counting(size: int) -> TokenData:
    """Bytes that tell where they stand: training 0, 1, 2, ...; validation 255, 254, ..."""
    train = torch.arange(size, dtype=torch.uint8)
    return TokenData(train=train, val=255 - train)


# Which files


def test_without_paths_it_is_the_standard_library() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    files = find_files()
    assert files == sorted(files)
    assert {library / "os.py", library / "json" / "decoder.py"} <= set(files)
    assert {file.suffix for file in files} == {".py"}
    folders = {part for file in files for part in file.relative_to(library).parts[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    assert sum(file.stat().st_size for file in files) > 4_000_000


def test_a_folder_gives_its_text_files_to_its_depths(folder: Path) -> None:
    write(b_txt="b", a_py="a", deep__er__c="c", empty="", image_png=b"P\0", late=b"x" * 8192 + b"\0")
    write(_hidden="h", _git__config="h", deep___hidden="h")
    os.mkfifo("pipe")  # reading it would wait for ever
    os.symlink("nowhere", "broken")
    os.symlink(".", "loop")
    names = ["a.py", "b.txt", "deep/er/c", "late"]
    assert find_files([folder]) == [folder / name for name in names]
    assert find_files(["."]) == [Path(name) for name in names]


def test_a_file_found_twice_is_read_once(folder: Path) -> None:
    write(d__a="a", d__b="b")
    os.symlink("a", "d/link")
    assert [file.resolve() for file in find_files(["d", "d/a", folder / "d"])] == [
        folder / "d" / "a",
        folder / "d" / "b",
    ]


def test_a_hidden_file_that_is_asked_for_is_read(folder: Path) -> None:
    write(_hidden="h", _git__config="h")
    assert find_files([".hidden", ".git"]) == [Path(".git/config"), Path(".hidden")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "gone: no such file or folder in {cwd}; correct data.paths"),
        ("empty", "empty: empty, or binary (it has a NUL byte); give a text file"),
        ("binary", "binary: empty, or binary (it has a NUL byte); give a text file"),
        ("pipe", "pipe: neither a file nor a folder; give text files or folders of them"),
        ("textless", "textless: no text files in this folder; give text files or folders of them"),
    ],
)
def test_a_path_without_text_is_named(folder: Path, path: str, message: str) -> None:
    write(
        text="t", empty="", binary=b"t\0", textless__empty="", textless__binary=b"\0", textless___hidden="h"
    )
    os.mkfifo("pipe")
    assert error_of(find_files, ["text", path]) == message.format(cwd=folder)


@pytest.mark.parametrize("given", ["d", "file"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d/a.parquet", ".parquet is not read; write it as .jsonl, a row a line"),
        ("d/a.b.arrow", ".arrow is not read; write it as .jsonl, a row a line"),
        ("d/a.jsonl.gz", ".gz is not read; decompress it"),
        ("d/a.TXT.ZST", ".zst is not read; decompress it"),
    ],
)
def test_data_in_a_form_that_is_not_read_are_named(folder: Path, name: str, message: str, given: str) -> None:
    write(d__text="t", d__manual_gz=b"\0")
    Path(name).write_bytes(b"\0")
    error = error_of(find_files, [name if given == "file" else given])
    assert error == f"{name}: {message}, or leave it out of data.paths"


def test_what_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(d__a="a", d__b="b", e__closed__b="b")
    scandir = os.scandir

    # chmod does not hold root back
    def opened(path: Path, mode: str) -> object:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return builtins.open(path, mode)

    def scanned(path: str | os.PathLike[str]) -> object:
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "scandir", scanned)
    for given, named in (("d", "d/b"), ("d/b", "d/b"), ("e", "e/closed")):
        error = error_of(find_files, [given])
        assert error == f"{named}: Permission denied; make it readable or leave it out"


def test_a_standard_library_without_sources_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    assert error_of(find_files) == f"{folder}: this Python came without the library's sources; set data.paths"


# The split


def test_files_are_split_whole_near_the_fraction_and_in_order(folder: Path) -> None:
    texts = {f"f{number:02d}": bytes([number + 1]) * 10 for number in range(40)}
    write(**texts)
    data = load_bytes(["."], val_fraction=0.2)
    held_out = [byte - 1 for byte in sorted(set(text_of(data.val)))]
    assert len(held_out) == 8
    assert held_out != list(range(8)) and held_out != list(range(32, 40))
    assert text_of(data.val) == b"".join(texts[f"f{number:02d}"] for number in held_out)
    assert text_of(data.train) == b"".join(texts[f"f{n:02d}"] for n in range(40) if n not in held_out)
    assert data.train.dtype == data.val.dtype == torch.uint8


def test_the_split_follows_from_the_names_below_the_common_folder(folder: Path) -> None:
    names = [f"{kind}{number}" for kind in ("a", "sub__b") for number in range(10)]
    write(**{f"one__{name}": name for name in names}, **{f"other__place__{name}": name for name in names})
    one, other = (
        load_bytes(["one"], val_fraction=0.3),
        load_bytes([folder / "other" / "place"], val_fraction=0.3),
    )
    assert text_of(one.val) == text_of(other.val)
    assert text_of(one.train) == text_of(other.train)
    # A golden of the hash: a split that moved would show old validation text to a run that goes on.
    write(**{f"f{number}": str(number) for number in range(10)})
    assert text_of(load_bytes([f"f{number}" for number in range(10)], val_fraction=0.3).val) == b"689"


def test_a_file_larger_than_the_fraction_is_left_in_training(folder: Path) -> None:
    write(huge="h" * 1000, **{f"f{number}": "s" for number in range(100)})
    assert text_of(load_bytes(["."], val_fraction=0.05).val) == b"s" * 55


def test_where_no_file_fits_the_smallest_is_held_out(folder: Path) -> None:
    write(a="a" * 10, b="b" * 9, c="c" * 11)
    data = load_bytes(["."], val_fraction=0.01)
    assert (text_of(data.train), text_of(data.val)) == (b"a" * 10 + b"c" * 11, b"b" * 9)


@pytest.mark.parametrize(
    ("text", "fraction", "val"),
    [("0123456789", 0.3, b"789"), ("0123456789", 0.001, b"9"), ("01", 0.99, b"1")],
)
def test_a_single_file_loses_its_tail(folder: Path, text: str, fraction: float, val: bytes) -> None:
    write(a=text)
    data = load_bytes(["a"], val_fraction=fraction)
    assert (text_of(data.train), text_of(data.val)) == (text.encode().removesuffix(val), val)
    write(a="0")
    single = "a: one byte cannot be split into training and validation; give more text"
    assert error_of(load_bytes, ["a"]) == single


# The batches


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_batch_is_crops_and_the_bytes_after_them(split: str) -> None:
    data = counting(12)
    x, y = data.batch(split, 500, 10, torch.Generator().manual_seed(0))
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (500, 10)
    direction, first = (1, 0) if split == "train" else (-1, 255)
    assert torch.equal(y, x + direction)
    assert torch.equal(x, x[:, :1] + direction * torch.arange(10))
    # 12 bytes hold two crops of 11, and both are drawn
    assert x[:, 0].unique().tolist() == sorted([first, first + direction])


def test_a_generator_decides_the_crops() -> None:
    def crops(seed: int) -> torch.Tensor:
        return counting(200).batch("train", 4, 8, torch.Generator().manual_seed(seed))[0]

    assert torch.equal(crops(1), crops(1))
    assert not torch.equal(crops(1), crops(2))


def test_validation_batches_are_spaced_from_the_first_byte_to_the_last() -> None:
    data = counting(31)
    batches = data.val_batches(2, 3, 5)
    assert [x.shape for x, _ in batches] == [(3, 5), (3, 5)]
    starts = [255 - start for x, _ in batches for start in x[:, 0].tolist()]
    assert starts == [0, 5, 10, 15, 20, 25]
    assert all(torch.equal(y, x - 1) for x, y in batches)
    assert batches[-1][1][-1, -1] == data.val[-1]
    [(x, _)] = data.val_batches(1, 1, 5)
    assert x.tolist() == [[255, 254, 253, 252, 251]]


def test_a_split_shorter_than_a_crop_is_named() -> None:
    data = TokenData(train=torch.zeros(6, dtype=torch.uint8), val=torch.zeros(4, dtype=torch.uint8))
    generator = torch.Generator()
    assert data.batch("train", 1, 5, generator)[0].shape == (1, 5)
    message = (
        "the {} split has {} bytes and data.context = {} needs {}: "
        "give more text, a {} data.val_fraction or a smaller context"
    )
    assert error_of(data.batch, "train", 1, 6, generator) == message.format("train", 6, 6, 7, "smaller")
    for call in (lambda: data.batch("val", 1, 4, generator), lambda: data.val_batches(1, 1, 4)):
        assert error_of(call) == message.format("val", 4, 4, 5, "larger")


def test_unigram_entropy_is_the_loss_of_smoothed_training_frequencies() -> None:
    def data(train: bytes, val: bytes) -> TokenData:
        return TokenData(*(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, val)))

    # 'a' was seen 3 times, 'b' once, 'z' never, and each of the 256 bytes is counted once more.
    expected = -(2 * math.log(4 / 260) + math.log(2 / 260) + math.log(1 / 260)) / 4
    assert data(b"aaab", b"aabz").unigram_entropy() == pytest.approx(expected, rel=1e-12)
    uniform = bytes(range(256))
    assert data(uniform, uniform).unigram_entropy() == pytest.approx(math.log(256), rel=1e-12)
