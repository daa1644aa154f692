"""The files of a checkpoint: tensors, values, the manifest, folders that are complete or not there."""

from __future__ import annotations

import json
import math
import os
import random
import weakref
import zlib
from collections import Counter
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer import CheckpointError
from streamer.checkpoint.manifest import NAME, VERSION, Manifest, new_folder
from streamer.checkpoint.tensors import DTYPES, Flushing, Piece, check_tensors, reading, write_tensors
from streamer.checkpoint.values import decode, encode

FEW = settings(max_examples=30, deadline=None, derandomize=True)


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaN among them."""
    numel = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the bit, dtype and shape too."""
    described = [
        (t.dtype, t.shape, t.detach().reshape(-1).view(torch.uint8).tolist()) for t in (actual, expected)
    ]
    return described[0] == described[1]


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    with Flushing() as flushing:
        pieces = [Piece.of(name, tensor) for name, tensor in tensors.items()]
        return write_tensors(path, pieces, flushing=flushing)


EVERY = {
    f"{dtype}{shape}": bits(shape, dtype) for dtype in DTYPES for shape in [(), (3,), (0,), (2, 0, 3), (5, 7)]
}
EVERY |= {'a "b"\\\n': torch.arange(12).view(3, 4).T, "né €": torch.ones(3, requires_grad=True)}


def test_every_dtype_shape_and_name_comes_back(tmp_path: Path) -> None:
    entries = write(tmp_path / "t", EVERY)
    check_tensors(tmp_path / "t", entries)
    theirs = safetensors.torch.load_file(tmp_path / "t")
    assert set(theirs) == set(entries) == set(EVERY)
    with reading(tmp_path / "t") as read:
        for name, tensor in EVERY.items():
            assert same(read(name), tensor), name
            assert same(theirs[name], tensor), name
            assert entries[name].shape == tuple(tensor.shape)
    data = (tmp_path / "t").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    for name, entry in entries.items():  # each begins at a multiple of its elements
        assert entry.offset % EVERY[name].element_size() == 0, name
        assert zlib.crc32(data[start + entry.offset :][: entry.nbytes]) == entry.crc32


def test_a_tensor_is_created_just_before_it_is_written(tmp_path: Path) -> None:
    alive: list[int] = []
    most: list[int] = []

    def make() -> torch.Tensor:
        alive.append(1)
        most.append(len(alive))
        tensor = torch.zeros(4)
        weakref.finalize(tensor, alive.pop)
        return tensor

    pieces = [Piece(str(i), torch.float32, (4,), make) for i in range(20)]
    with Flushing() as flushing:
        write_tensors(tmp_path / "t", pieces, flushing=flushing)
    assert max(most) <= 4


def test_files_that_are_not_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"), reading(tmp_path / "missing"):
        pass
    (tmp_path / "t").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=str(tmp_path / "t")), reading(tmp_path / "t"):
        pass
    entries = write(tmp_path / "u", {"a": torch.zeros(2)})
    with reading(tmp_path / "u") as read, pytest.raises(CheckpointError, match="u: tensor 'b'"):
        read("b")
    with pytest.raises(OSError, match="mine"), reading(tmp_path / "u"):
        raise OSError("mine")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=str(path)):
            check_tensors(path, entries)


SMALL = {"a": torch.arange(5, dtype=torch.int8), "b": torch.arange(6.0).view(2, 3)}


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    entries = write(tmp_path / "t", SMALL)
    check_tensors(tmp_path / "t", entries)
    good = (tmp_path / "t").read_bytes()
    damaged = [good[:length] for length in range(len(good))] + [good + b"\0"]
    for at in range(8 * len(good)):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        damaged.append(bytes(data))
    for data in damaged:
        (tmp_path / "t").write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            check_tensors(tmp_path / "t", entries)
        assert str(tmp_path / "t") in str(caught.value)
        assert "\n" not in str(caught.value)


# values


def through(value: Any) -> Any:
    """Encoded, written as JSON, read and decoded."""
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> str:
        tensors.append(tensor.detach().clone())
        return str(len(tensors) - 1)

    return decode(json.loads(json.dumps(encode(value, put))), lambda name: tensors[int(name)])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@FEW
@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert repr(through(value)) == repr(value)


HARD = [
    {1: "int", "1": "text", 2.0: "float", None: 0, (1, "a"): 0},
    {True: "bool", 0: "int"},
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e308],
    [2**64, -(2**64), 2**63 - 1, 2**128],
    ["\ud800", "\0", "é€\U0001f600", ""],
    [{"list": [1]}, {"float": "0x1p0"}, {"dict": {}}, {"tensor": "0"}, (), [], {}],
    {"a": [({"b": ((1,),)},)]},
    Counter([3, 3, 5]),
]
OF_NUMPY = [
    (np.bool_(True), True),
    (np.float32(0.5), 0.5),
    (np.float64("nan"), math.nan),
    (np.int8(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.str_("text"), "text"),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [*((value, value) for value in HARD), *OF_NUMPY],
    ids=lambda value: type(value).__name__,
)
def test_hard_values_come_back_and_scalars_of_numpy_as_those_of_python(value: Any, expected: Any) -> None:
    came = through(value)
    assert (type(came), repr(came)) == (type(expected), repr(expected))


@pytest.mark.parametrize(
    "array",
    [
        torch.tensor(1.5),
        torch.nn.Parameter(torch.ones(2)),
        torch.zeros(0, dtype=torch.bool),
        np.arange(6.0).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 2), np.int16),
        np.arange(6)[::-2],
        np.arange(6, dtype=np.float16).reshape(2, 3).T,
        np.array([True, False]),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=lambda array: f"{array.dtype}{tuple(array.shape)}",
)
def test_tensors_and_arrays_come_back(array: Any) -> None:
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    came = through({"a": array})["a"]
    assert isinstance(array, type(came))
    assert (came.dtype, came.shape, came.tolist()) == (array.dtype, array.shape, array.tolist())


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        b"bytes",
        1j,
        Level.LOW,
        object(),
        torch.float32,
        torch.Size([1]),
        np.array(["a"]),
        np.array([1], ">i4"),
        np.ma.masked_array([1, 2], [True, False]),
        np.datetime64("2020-01-01"),
        len,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^extra\['a'\]\[1\]"):
        encode({"a": (0, value)}, lambda _: "0")
    with pytest.raises(ValueError, match=r"^a key of extra\['a'\] is a bytes"):
        encode({"a": {b"": 0}}, lambda _: "0")


# the manifest


def manifest_in(folder: Path, step: int = 3, **values: Any) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(step, {"a-1.safetensors": write(folder / "a-1.safetensors", SMALL)}, values)
    manifest.write(folder)
    return manifest


def test_flipped_bits_of_a_manifest_are_noticed(tmp_path: Path) -> None:
    manifest_in(tmp_path)
    good = (tmp_path / NAME).read_bytes()
    rng = random.Random(0)
    damaged = [good[: rng.randrange(len(good))] for _ in range(40)] + [b"", good[:-1]]
    for at in range(0, 8 * len(good), 5):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        damaged.append(bytes(data))
    for data in damaged:
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(CheckpointError, match=NAME) as caught:
            Manifest.read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        *((text, "damaged") for text in ("[]", "{}", "3", '{"version": "1"}', '{"version": 1}')),
        (f'{{"version": {VERSION + 1}, "tensors": "elsewhere"}}', f"version {VERSION + 1} .* update it"),
    ],
)
def test_no_manifest_of_a_checkpoint_that_can_be_read(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=f"{NAME}: .*{match}"):
        Manifest.read(tmp_path)


# folders


def test_a_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "b", nbytes=10) as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["x"]
    for error in (RuntimeError("odd"), KeyboardInterrupt("odd"), OSError("odd")):
        odd = pytest.raises(type(error), match="odd")
        with odd, new_folder(tmp_path / "c" / "d", nbytes=10) as folder:
            (folder / "x").write_text("x")
            raise error
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_no_room_is_known_before(tmp_path: Path) -> None:
    no_room = pytest.raises(OSError, match=f"no room: {1 << 60} bytes are needed")
    with no_room, new_folder(tmp_path / "a", nbytes=1 << 60):
        raise AssertionError("begun")
    assert list(tmp_path.iterdir()) == []


def test_existing_paths_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        there = pytest.raises(FileExistsError, match="exists already")
        with there, new_folder(tmp_path / name, nbytes=1):
            raise AssertionError("begun")
    no_folder = pytest.raises(OSError, match=f"checkpoint of 7 bytes.*{tmp_path / 'file'}")
    with no_folder, new_folder(tmp_path / "file" / "a", nbytes=7):
        raise AssertionError("begun")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_an_earlier_process_with_this_id_is_removed(tmp_path: Path) -> None:
    manifest_in(tmp_path / f".c.writing-{os.getpid()}")
    with new_folder(tmp_path / "c", nbytes=1):
        pass
    assert list((tmp_path / "c").iterdir()) == []
