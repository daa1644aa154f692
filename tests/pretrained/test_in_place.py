"""Frozen weights that are read from their files: a base with adapters trains as one in memory does."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import streamer
from streamer.backends import stored_tensors
from streamer.backends.base import Lane
from streamer.backends.direct_io import System
from streamer.backends.host_memory import mapped
from streamer.backends.stored_tensors import StoredTensor, StoredTensors, between_bytes
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.errors import CheckpointError, DiskError
from streamer.store.purposes import FILE_BLOCKS, WEIGHT_RING
from tests.on_disk import copied, disks, least_of
from tests.reference import assert_equal

WIDTH, HIDDEN, LAYERS = 48, 320, 12
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: The format's names.
NAMES = {BF16: "BF16", FP16: "F16", FP32: "F32"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Base(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Adapter(nn.Module):
    """A frozen linear layer with two small matrices that are trained."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, 3, generator=generator, device="cpu") / 8)
        self.b = nn.Parameter(torch.randn(3, base.out_features, generator=generator, device="cpu") / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ((x.to(self.a.dtype) @ self.a) @ self.b).to(x.dtype)


def adapt(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    model.requires_grad_(False)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up, layer.down = Adapter(layer.up, generator), Adapter(layer.down, generator)
    model.head.requires_grad_(True)  # type: ignore[union-attr]


def write(path: Path, tensors: dict[str, torch.Tensor], *, shift: int = 0) -> None:
    """A safetensors file whose tensors begin ``shift`` bytes later than they need to."""
    entries: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 + shift)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def stored(path: Path, dtype: torch.dtype = BF16, *, shift: int = 0, seed: int = 0) -> Path:
    """A file of a base model's weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Base().to(dtype)
    write(path, dict(model.state_dict()), shift=shift)
    return path


def make(path: Path, disk: Any = None, *, stay: float | None = None, **options: Any) -> nn.Module:
    """With ``stay`` the budget of host memory has room for as many layers more than the least."""
    options = {"layers": "layers", "adapt": adapt} | options
    if "backend" not in options:
        options["device"] = "cpu"
    if stay is not None:
        layer = WIDTH * HIDDEN * 2 * (options.get("dtype") or BF16).itemsize
        options["host_memory"] = least(path, disk, **options) + int(stay * layer * 1.1)
    return streamer.from_pretrained(path, Base, disk=disk, **options).train()


def least(path: Path, disk: Any, **options: Any) -> int:
    """The least budget of host memory, as the error says it."""
    options = {name: value for name, value in options.items() if name != "backend"} | {"device": "cpu"}
    with pytest.raises(MemoryError) as refused:
        streamer.from_pretrained(path, Base, disk=disk, **options | {"host_memory": 1})
    return least_of(refused.value)


def host_bytes(model: nn.Module) -> dict[str, int]:
    return wrapped(model).executor.host.bytes()


def moments(model: nn.Module) -> int:
    return 8 * sum(shard.layout.state_numel for shard in wrapped(model).executor.store.shards)


def read_in_place(model: nn.Module) -> list[int]:
    return [index for index, shard in enumerate(wrapped(model).executor.store.shards) if shard.is_out]


def adamw(model: nn.Module) -> streamer.AdamW:
    return streamer.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(5, WIDTH, generator=generator), torch.randint(7, (5,), generator=generator)
    loss = F.cross_entropy(model(x.to(model.head.weight.dtype)).float(), y)  # type: ignore[union-attr]
    loss.backward()
    if wrapped(model).executor.gradients.are_kept:
        streamer.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def results(model: nn.Module, steps: int = 3, between: Callable[[nn.Module, int], None] | None = None) -> Any:
    optimizer = adamw(model)
    losses = []
    for number in range(steps):
        losses.append(a_step(model, optimizer, number))
        if between is not None:
            streamer.synchronize(model)
            between(model, number)
    named = dict(model.named_parameters())
    state = {name: copied(dict(optimizer.state[p])) for name, p in named.items() if p.requires_grad}
    streamer.unwrap(model)
    return {"losses": losses, "weights": copied(dict(named)), "state": state}


@pytest.mark.parametrize(
    ("dtype", "options", "stay"),
    [
        (BF16, {}, 2),
        (BF16, {"activations": "keep", "num_slots": 1}, 0),
        (FP32, {"dtype": BF16}, 0),
        (FP16, {"dtype": FP32, "num_slots": 3}, 0),
        (BF16, {"update": "backward", "micro_batch_size": 2}, 2),
    ],
    ids=str,
)
def test_training_is_that_of_a_base_in_memory(
    dtype: torch.dtype, options: dict[str, Any], stay: int, tmp_path: Path
) -> None:
    path = stored(tmp_path / "base.safetensors", dtype, shift=1)
    slow = ThreadBackend(delays={Lane.DISK_READ: lambda: 0.002}, poison=True)
    model = make(path, True, stay=stay, **options, backend=slow)
    out = read_in_place(model)
    assert out == [*range(stay, LAYERS)], "the first layers stay"
    assert_equal(results(model), results(make(path, **options)))


@pytest.mark.parametrize("disk", [True, "folder"])
def test_planned_bytes_are_held_bytes(disk: Any, tmp_path: Path) -> None:
    path = stored(tmp_path / "base.safetensors")
    disk = disk is True or disks(tmp_path)
    model = make(path, disk, stay=0)
    held = host_bytes(model)
    assert sum(held.values()) <= wrapped(model).executor.host.limit
    assert held == {name: nbytes for name, nbytes in wrapped(model).planned.host.items() if nbytes}
    layout = wrapped(model).executor.store.shards[0].layout
    assert layout.nbytes <= held[WEIGHT_RING] // 3 < layout.nbytes + 4096
    assert held[FILE_BLOCKS] == between_bytes([StoredTensor(path, 0, BF16, WIDTH * HIDDEN)])
    on_disk = wrapped(model).executor.host.disk_bytes()
    assert on_disk.keys() <= {"remainders"} if disk is not True else not on_disk
    streamer.unwrap(model)


def test_each_step_reads_the_files_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, readers = stored(tmp_path / "base.safetensors"), list[StoredTensors]()

    def reader_of(between: torch.Tensor, **options: Any) -> StoredTensors:
        readers.append(StoredTensors(between, **options))
        return readers[-1]

    monkeypatch.setattr("streamer.backends.disk.StoredTensors", reader_of)

    def read(steps: int) -> int:
        readers.clear()
        model = make(path, True, stay=0, num_slots=1)
        optimizer = adamw(model)
        for number in range(steps):
            a_step(model, optimizer, number)
        streamer.unwrap(model)
        return sum(reader.bytes_read for reader in readers)

    layer = sum(param.numel() * 2 for param in Layer().parameters())
    # where backward begins the ring of three has the last layers, where forward begins the first ones
    assert read(4) - read(3) == (2 * LAYERS - 6) * layer


def merges(model: nn.Module, number: int) -> None:
    """As peft's `merge_adapter` for an evaluation, and back."""
    adapter = model.layers[4].up  # type: ignore[union-attr]
    with torch.no_grad():
        if number == 0:
            adapter.base.weight.add_((adapter.a @ adapter.b).t().to(BF16))
        elif number == 2:
            adapter.base.weight.sub_((adapter.a @ adapter.b).t().to(BF16))


def overwrites(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        if number == 1:
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
        for layer in model.layers if number == 2 else ():  # type: ignore[union-attr]
            layer.norm.weight.data[:3] = 0.25


@pytest.mark.parametrize("between", [merges, overwrites])
def test_values_that_the_user_writes_take_effect(
    between: Callable[[nn.Module, int], None], tmp_path: Path
) -> None:
    path = stored(tmp_path / "base.safetensors")
    before = path.read_bytes()
    model = make(path, True, stay=2)
    assert read_in_place(model)
    assert_equal(results(model, between=between), results(make(path), between=between))
    assert path.read_bytes() == before


def test_a_checkpoint_goes_on_in_place_and_one_of_another_base_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "base.safetensors")
    other = stored(tmp_path / "other.safetensors", seed=1)
    model = make(path, True, stay=0)
    optimizer = adamw(model)
    a_step(model, optimizer, 0)
    streamer.save(model, optimizer, tmp_path / "checkpoint", step=1)
    expected = [a_step(model, optimizer, number) for number in (1, 2)]
    streamer.unwrap(model)
    for file, fits in ((path, True), (other, False)):
        model = make(file, True, stay=0)
        optimizer = adamw(model)
        if fits:
            streamer.load(model, optimizer, tmp_path / "checkpoint")
            assert read_in_place(model) == [*range(LAYERS)]
            assert [a_step(model, optimizer, number) for number in (1, 2)] == expected
        else:
            with pytest.raises(CheckpointError, match=r"other frozen weights .*layers.0"):
                streamer.load(model, optimizer, tmp_path / "checkpoint")
        streamer.unwrap(model)


def test_trained_layers_go_to_a_folder_in_addition(tmp_path: Path) -> None:
    """What is not frozen is written where it may be."""

    def half(model: nn.Module) -> None:
        model.layers[:3].requires_grad_(False)  # type: ignore[union-attr,index]
        model.layers[5].norm.requires_grad_(False)  # type: ignore[union-attr]

    path = stored(tmp_path / "base.safetensors")
    options: dict[str, Any] = {"adapt": half, "num_slots": 1}
    model = make(path, disks(tmp_path), stay=0, **options)
    executor = wrapped(model).executor
    assert set(read_in_place(model)) >= {0, 1, 2, 5}
    assert executor.host.disk_bytes()["remainders"] > 0
    assert not any(shard.weights_on_disk.held_bytes for shard in executor.store.shards[:-1])  # type: ignore
    assert_equal(results(model), results(make(path, **options)))


# refusals and faults


def with_faults(monkeypatch: pytest.MonkeyPatch, preadv: Callable[..., int]) -> None:
    system = System(preadv=preadv)
    monkeypatch.setattr(
        "streamer.backends.disk.StoredTensors",
        lambda between, **options: StoredTensors(between, system=system, **options),
    )


def test_short_reads_and_interruptions_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "base.safetensors", shift=3)
    calls = 0

    def preadv(fd: int, memory: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError
        if calls % 3 == 1 and len(memory[0]) > 4096:
            return os.preadv(fd, [memory[0][:4096]], offset)
        return os.preadv(fd, memory, offset)

    expected = results(make(path))
    with_faults(monkeypatch, preadv)
    assert_equal(results(make(path, True, stay=0)), expected)
    assert calls > 20


def test_a_drive_that_fails_is_one_error_and_the_weights_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "base.safetensors")
    fails = False

    def preadv(fd: int, memory: Sequence[memoryview], offset: int) -> int:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, memory, offset)

    with_faults(monkeypatch, preadv)
    model = make(path, True, stay=0)
    optimizer = adamw(model)
    a_step(model, optimizer, 0)
    streamer.save(model, optimizer, tmp_path / "checkpoint", step=1)
    expected = a_step(model, optimizer, 1)
    fails = True
    with pytest.raises(DiskError, match=rf"^{path}: reading \d+ bytes at offset \d+ failed \(.*\): .*$"):
        for number in (2, 3, 4):
            a_step(model, optimizer, number)
    fails = False
    streamer.load(model, optimizer, tmp_path / "checkpoint")
    assert a_step(model, optimizer, 1) == expected
    streamer.unwrap(model)


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = stored(tmp_path / "base.safetensors")
    model = make(path, True, stay=0)
    optimizer = adamw(model)
    a_step(model, optimizer, 0)
    was = path.stat().st_mtime_ns
    os.utime(path, ns=(1, 1))
    with pytest.raises(DiskError, match=f"{path} has changed since the model was created"):
        for number in (1, 2):
            a_step(model, optimizer, number)
    os.utime(path, ns=(was, was))
    with pytest.warns(UserWarning, match="as a failed update has left them"):
        streamer.unwrap(model)


@pytest.mark.parametrize("seed", range(2))
def test_any_offset_dtype_and_size(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against PyTorch's own view of the bytes, with blocks so small that tensors have many."""
    monkeypatch.setattr(stored_tensors, "BLOCK_BYTES", 8192)
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    kinds = [FP32, BF16, FP16]
    held, content, at = [], b"", 0
    for number in range(12):
        dtype, numel = kinds[number % 3], draw(1, 9000)
        values = torch.randn(numel, generator=generator).to(dtype)
        gap = draw(0, 9)
        content += bytes(gap) + values.view(torch.uint8).numpy().tobytes()
        held.append((StoredTensor(tmp_path / "file", at + gap, dtype, numel), values))
        at = len(content)
    (tmp_path / "file").write_bytes(content)
    reader = StoredTensors(mapped(between_bytes([place for place, _ in held]), in_forks=False))
    reader.open([tmp_path / "file"])
    for other in kinds:
        wanted = [(place, torch.full((place.numel,), torch.nan, dtype=other)) for place, _ in held]
        reader.read(wanted)
        for (_, values), (_, into) in zip(held, wanted, strict=True):
            assert torch.equal(into, values.to(other))
    reader.close()
