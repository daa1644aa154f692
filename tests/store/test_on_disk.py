"""Optimizer state and weights on disk: what is read and written of them, and how many bytes that moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Extent
from streamer.backends.stored_tensors import StoredTensor
from streamer.errors import DiskError
from streamer.store import weights_on_disk
from streamer.store.layout import Layout, Param
from streamer.store.on_disk import StateOnDisk, chunks_of
from streamer.store.purposes import FP32, MOMENTS
from streamer.store.shares import shares_of
from streamer.store.weights_on_disk import WeightsInFiles, WeightsInScratch

#: A long parameter, and short ones that are in a chunk with others.
LAYOUT = Layout.of(
    Param(name, (numel,), torch.bfloat16, True) for name, numel in (("a", 9000), ("b", 300), ("c", 40))
)
EXP_AVG = MOMENTS[FP32][0]


class Files:
    """Reads sevens, and counts the tensors that were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def open(self, files: Iterable[Path]) -> None: ...

    def close(self) -> None: ...

    def read(self, wanted: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None:
        for _, into in wanted:
            self.asked += 1
            into.fill_(7)


def test_own_weights_beside_those_in_files_move_without_these() -> None:
    of = Layout.of([Param("a", (3,), torch.float32, True), Param("b", (50,), torch.float32, False)])
    files, stored = Files(), {"b": [StoredTensor(Path("b"), 0, torch.float32, 50)]}
    held = torch.zeros(of.slices[0].nbytes, dtype=torch.uint8)
    weights = WeightsInFiles(of, stored, files, hold=lambda _: held, share=shares_of(of, 1)[0])
    buffer = torch.full((weights.padded_bytes,), 255, dtype=torch.uint8)
    of.slices[0].view(buffer).fill_(2)
    weights.store(buffer, own=True)
    buffer.fill_(255)
    weights.fetch(buffer, own=True)
    assert of.slices[0].view(buffer).tolist() == [2.0] * 3 and files.asked == weights.own_read_bytes == 0
    weights.fetch(buffer)
    assert of.slices[1].view(buffer).tolist() == [7.0] * 50 and files.asked == 1
    assert weights.read_bytes == of.slices[1].nbytes


class Drive:
    """Extents in memory, and the bytes that move."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        #: writes that succeed before all fail
        self.writes_left = 1 << 30
        self.values: dict[Extent, torch.Tensor] = {}
        self.moved: Counter[str] = Counter()

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def extent(self, nbytes: int) -> Extent:
        extent = Extent(nbytes, self.padded(nbytes), ())
        # what was never written is read where others may have written it, and nowhere else
        self.values[extent] = torch.full(
            (extent.padded_bytes,), 0 if self.is_shared else 255, dtype=torch.uint8
        )
        return extent

    def allocate(self) -> None: ...

    def close(self) -> None: ...

    def _part(self, verb: str, extent: Extent, buffer: torch.Tensor, part: range | None) -> torch.Tensor:
        moved = range(extent.padded_bytes) if part is None else part
        assert moved.start % ALIGNMENT == moved.stop % ALIGNMENT == 0
        assert len(moved) <= len(buffer)
        self.moved[verb] += len(moved)
        return self.values[extent][moved.start : moved.stop]

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        there = self._part("read", extent, into, part)
        into[: len(there)] = there

    def write(self, extent: Extent, source: torch.Tensor, part: range | None = None) -> None:
        there = self._part("written", extent, source, part)
        self.writes_left -= 1
        if self.writes_left < 0:
            raise DiskError("broken")
        there.copy_(source[: len(there)])


def state_on(drive: Drive, most: int) -> StateOnDisk:
    state = StateOnDisk(
        LAYOUT,
        chunks_of(LAYOUT, most=most),
        range(LAYOUT.state_numel),
        lambda nbytes: torch.full((nbytes,), 170, dtype=torch.uint8),
    )
    state.add(state.reserve(EXP_AVG, drive))
    return state


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("most", [1 << 8, 1 << 12, 1 << 20])
def test_any_elements_are_read_as_they_were_written(most: int, is_shared: bool) -> None:
    draw = random.Random(most)
    state, expected = state_on(Drive(is_shared=is_shared), most), torch.zeros(LAYOUT.state_numel)
    for turn in range(60):
        start = draw.randrange(LAYOUT.state_numel)
        elements = range(start, draw.randrange(start, LAYOUT.state_numel) + 1)
        if turn % 3:
            assert torch.equal(state.read(EXP_AVG, elements), expected[elements.start : elements.stop])
        else:
            values = torch.randn(len(elements), generator=torch.Generator().manual_seed(turn))
            expected[elements.start : elements.stop] = values
            state.write(EXP_AVG, elements, values)
    assert torch.equal(state.read(EXP_AVG, range(LAYOUT.state_numel)), expected)


def test_a_short_parameter_moves_its_own_blocks_alone() -> None:
    drive = Drive(is_shared=False)
    state = state_on(drive, 1 << 20)
    (chunk,) = state.chunks
    whole, short = drive.padded(len(chunk.bytes(EXP_AVG))), EXP_AVG.range(LAYOUT.slices[1])
    # as long as nothing is there, all of it has to be written
    state.write(EXP_AVG, short, torch.ones(len(short)))
    assert drive.moved == {"written": whole}
    drive.moved.clear()
    assert state.read(EXP_AVG, short).unique().tolist() == [1.0]
    state.write(EXP_AVG, short, torch.full((len(short),), 2.0))
    assert state.read(EXP_AVG, range(LAYOUT.state_numel)).unique().tolist() == [0.0, 2.0]
    some = drive.moved["written"]
    assert 4 * len(short) <= some <= 4 * len(short) + 2 * ALIGNMENT < whole
    # once to be shown, once to be written around it, and all of it in the end
    assert drive.moved["read"] == 2 * some + whole


def test_of_a_chunk_that_is_lost_all_is_written() -> None:
    drive = Drive(is_shared=False)
    state = state_on(drive, 1 << 20)
    everything, short = range(LAYOUT.state_numel), EXP_AVG.range(LAYOUT.slices[1])
    state.write(EXP_AVG, everything, torch.ones(LAYOUT.state_numel))
    drive.writes_left = 0
    with pytest.raises(DiskError, match="broken"):
        state.write(EXP_AVG, short, torch.zeros(len(short)))
    drive.writes_left = 1 << 30
    with pytest.raises(DiskError, match="is lost"):
        state.read(EXP_AVG, short)
    drive.moved.clear()
    state.write(EXP_AVG, short, torch.zeros(len(short)))
    assert drive.moved == {"written": drive.padded(4 * LAYOUT.state_numel)}
    values = state.read(EXP_AVG, everything)
    assert values[short.start : short.stop].unique().tolist() == [0.0]
    values[short.start : short.stop] = torch.nan
    assert values.isnan().all(), "nobody knows what the others were"


def test_weights_that_could_not_be_written_are_lost_until_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_on_disk, "WEIGHTS_PIECE", 1 << 13)
    # one is in the piece that is written before a write fails, and is lost with the others
    of = Layout.of(Param(f"{numel}", (numel,), torch.bfloat16, True) for numel in (40, 9000, 300))
    drive, share = Drive(is_shared=False), shares_of(of, 1)[0]
    weights = WeightsInScratch(of, drive, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), share=share)
    buffer = torch.ones(weights.padded_bytes, dtype=torch.uint8)
    weights.store(buffer)
    drive.writes_left = 1
    with pytest.raises(DiskError, match="broken"):
        weights.store(buffer)
    drive.writes_left = 1 << 30
    for slice in of.slices:
        with pytest.raises(DiskError, match="weights on disk .* is lost"):
            weights.read(slice)
    with pytest.raises(DiskError, match="is lost"):
        weights.fetch(buffer)
    weights.store(buffer.fill_(2))
    assert all(weights.read(slice).view(torch.uint8).eq(2).all() for slice in of.slices)
