"""`save`: the state of a run, with a wrapped model and its optimizer, in safetensors files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.backends.base import Backend, Handover, in_background
from streamer.backends.ranks import Ranks
from streamer.checkpoint.manifest import LeftOut, Manifest, new_folder
from streamer.checkpoint.tensors import (
    DTYPES,
    Entry,
    Flushing,
    Piece,
    stored_buffers,
    write_tensors,
)
from streamer.checkpoint.values import Put, encode, random_states
from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain
from streamer.engine.handle import require_home, wrapped
from streamer.engine.unit import Unit
from streamer.optim.adamw import AdamW
from streamer.optim.replay.spill import OnDisk
from streamer.optim.state import check_owner
from streamer.store.layout import Slice
from streamer.store.purposes import MASTERING, MOMENTS, OPTIMIZER_STATE, Purpose
from streamer.store.shard import HostShard
from streamer.version import __version__

#: Kinds of files: for each unit, and for the whole model. VALUES holds the tensors of no other kind.
WEIGHTS, OPTIMIZER, GRADIENTS, BUFFERS, VALUES = "weights", "optimizer", "gradients", "buffers", "values"
KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, BUFFERS, VALUES)
#: Key of the parameters left out in the manifest's values, by name.
FROZEN = "frozen"
#: Key of the kind of each parameter stored in parts, by name. [Note: parts]
IN_PARTS = "in parts"
#: Key of the random states of ranks after the first.
RANDOM_OF_RANKS = "random of ranks"
#: Upper bounds for headers and the manifest, for each tensor and for the rest, in the check for free space.
NAMED_BYTES, MARGIN_BYTES = 1 << 10, 1 << 16


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | PathLike[str],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    block: bool = True,
    frozen: bool = True,
) -> Future[None]:
    """Write a checkpoint of a wrapped model into the new folder ``path``, complete or not at all.

    The checkpoint holds, in safetensors files: for each unit the weights (fp32 masters if they are trained,
    whatever dtype they are streamed in, else as they are), the optimizer's moments as they are held and,
    during gradient accumulation, the gradients; buffers; the states of the random number generators; and
    ``extra``, of numbers, strings, lists, tuples, dicts, tensors and arrays (``scheduler.state_dict()``,
    ``scaler.state_dict()``, the position in the data). ``manifest.json`` lists every tensor with its shape,
    dtype and CRC-32. There is no pickle. `streamer.load` continues from there, bitwise.

    Waits for running updates, and writes straight from host memory: at most two parameters' tensors are
    allocated in addition. With ``block=False`` it returns as soon as training may continue. An update then
    waits until its unit is written. Do not write weights by hand until the returned future is done; its
    ``result()`` raises the error of a failed write, or else the next `save` does. ``optimizer`` may be one of
    ``torch.optim``, or None.

    Every rank must call this, and each writes some of the units into a folder that all machines share. With
    ``block=False`` the first rank writes all. The checkpoint holds the states of all ranks' generators; any
    number of ranks can load it. If machines divide the state, it is gathered unit by unit for the rank that
    writes it, which has two units' state in memory in addition to the model's; all ranks wait for that, even
    with ``block=False``.

    ``frozen=False`` leaves out frozen parameters, such as the base of adapters; the manifest has the CRC-32
    by which `streamer.load` checks that its model has the same values.

    Raises ValueError for values that cannot be saved, FileExistsError if ``path`` exists, and OSError, with
    the path and the number of bytes, if it cannot be written; then nothing is left there. If one rank cannot
    write, all ranks raise its error.
    """
    executor = wrapped(model).executor
    ranks = executor.ranks
    random_of_ranks = ranks.exchange(f"saving step {step} to '{path}'", random_states())
    checkpoint = _Checkpoint(
        model, optimizer, executor, Path(path), step, dict(extra or {}), random_of_ranks, frozen
    )
    # state on disk would be read into memory to be written later
    block = block or OPTIMIZER_STATE in executor.host.disk_bytes()
    # each rank has the state of some parameters of an optimizer of PyTorch
    gathers = executor.store.is_divided or not isinstance(optimizer, AdamW | None)
    if block or (gathers and not ranks.is_alone):
        checkpoint.write_together()
    else:
        with ranks.together("writing a checkpoint"):
            if ranks.is_first:
                return checkpoint.write_in_background()
    done: Future[None] = Future()
    done.set_result(None)
    return done


Files = dict[str, list[Piece]]


@dataclass
class _Checkpoint:
    """A checkpoint that is being written: the arguments of `save`, and what `collect` finds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    executor: Executor
    path: Path
    step: int
    extra: dict[str, Any]
    random_of_ranks: Sequence[dict[str, Any]]
    #: whether frozen parameters are written too
    frozen: bool
    #: the manifest's values
    values: dict[str, Any] = field(default_factory=dict)
    #: all tensors that are in no shard: gradients, buffers, and those among the values
    files: Files = field(default_factory=dict)
    #: the parameters that have moments, by the unit's index, and the dtype of their moments
    moments: dict[int, list[Slice]] = field(default_factory=dict)
    state_dtype: torch.dtype = torch.float32
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)
    flushing: Flushing = field(default_factory=Flushing)

    def write_in_background(self) -> Future[None]:
        """Write it in a thread. An update waits until its unit is written."""
        self.collect()
        for pieces in self.files.values():  # these are in no shard, and may change before they are written
            pieces[:] = [Piece.of(piece.name, piece.read().clone()) for piece in pieces]
        # in the order of updates
        units = {unit.index: unit for unit in (self.executor.root, *self.executor.units)}
        shards = {index: self.executor.shard(unit) for index, unit in units.items()}
        handover = Handover(shards)

        def write() -> None:
            try:
                with new_folder(self.path, nbytes=self.nbytes()) as folder:
                    with self.flushing:
                        handover.read_all(
                            lambda index: self.write_unit(folder, units[index], shards[index], on_host=False)
                        )
                        self.write(folder, self.files)
                    self.write_manifest(folder)
            finally:
                handover.stop()  # after an error updates must not wait forever
                for shard in shards.values():
                    shard.before_change = None

        for index, shard in shards.items():
            shard.before_change = partial(handover.before_change, index)
        self.executor.host.saving = in_background(write, "streamer-save")
        return self.executor.host.saving

    def write_together(self) -> None:
        """Write it: each rank writes some units, and the first one the rest. State that machines divide is
        gathered for the rank that writes it."""
        ranks = self.executor.ranks
        with _writing(ranks, "beginning a checkpoint"):
            self.collect()
        purposes = (*MASTERING, *MOMENTS[self.state_dtype])
        writer_of = _dealt(self.units, ranks.size)
        with ExitStack() as opened:
            folder = ranks.on_first(
                "beginning a checkpoint",
                lambda: opened.enter_context(new_folder(self.path, nbytes=self.nbytes())).absolute(),
            )
            try:
                with _writing(ranks, "finding the folder of a checkpoint"):
                    if not folder.is_dir():
                        words = "all machines must share this folder"
                        raise FileNotFoundError(errno.ENOENT, words, str(self.path))
                with (
                    _writing(ranks, "writing a checkpoint"),
                    self.flushing,
                    ThreadPoolExecutor(1) as pool,
                ):
                    writing = [pool.submit(self.write, folder, self.files)] if ranks.is_first else []
                    for unit in self.units:
                        writer = writer_of[unit.index]
                        whole = self.executor.across.whole_shard(unit, purposes, to=writer)
                        if writer == ranks.rank:
                            wait(writing)  # one is written while the next is gathered
                            writing.append(pool.submit(self.write_unit, folder, unit, whole))
                    for written in writing:
                        written.result()
                listed = (self.entries, self.values[FROZEN])
                for entries, frozen_there in ranks.exchange("listing the files of a checkpoint", listed):
                    self.entries |= entries
                    self.values[FROZEN] |= frozen_there
                with _writing(ranks, "writing the manifest of a checkpoint"):
                    if ranks.is_first:
                        self.write_manifest(folder)
                        opened.close()
            except BaseException:
                # the last one to end leaves nothing, even if the first rank was killed
                shutil.rmtree(folder, ignore_errors=True)
                raise

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, the root last."""
        return *self.executor.units, self.executor.root

    def collect(self) -> None:
        """Find what the checkpoint holds now, after the one that is being written and all updates are done.
        Raises the error of that one unless the caller has read it, and ValueError for values that cannot be
        saved."""
        executor, optimizer = self.executor, self.optimizer
        executor.host.wait_for_saving()
        if executor.host.saving is not None and not executor.host.saving.is_awaited:
            executor.host.saving.result()
        if isinstance(optimizer, AdamW):
            check_owns(optimizer, executor)
            self.state_dtype = optimizer.state_dtype
        executor.synchronize()
        _check_registered(self.model, self.units)
        rest: list[Piece] = []
        put = partial(_put, rest)
        self.values = {
            "model": {
                "units": [unit.name for unit in self.units],
                "gradient_scale": encode(executor.gradients.factor, put),
                "skipped_steps": executor.skipped_steps,
            },
            "optimizer": _optimizer(optimizer, self.moments, put),
            "random": encode(self.random_of_ranks[0], put),
            RANDOM_OF_RANKS: [encode(states, put) for states in self.random_of_ranks[1:]],
            "extra": encode(self.extra, put),
            FROZEN: {},
            IN_PARTS: in_parts(executor),
        }
        files = {file_name(GRADIENTS, unit): _gradients(unit) for unit in self.units}
        buffers = stored_buffers(self.model)
        files[file_name(BUFFERS)] = [Piece.of(name, buffer) for name, buffer in buffers.items()]
        files[file_name(VALUES)] = rest
        self.files = {name: pieces for name, pieces in files.items() if pieces}

    def nbytes(self) -> int:
        """Bytes of all files, with an upper bound for headers and the manifest."""
        of_units = [self.of_unit(unit, self.executor.shard(unit), on_host=True) for unit in self.units]
        pieces = [piece for files in (*of_units, self.files) for each in files.values() for piece in each]
        return MARGIN_BYTES + sum(piece.nbytes + NAMED_BYTES for piece in pieces)

    def of_unit(self, unit: Unit, shard: HostShard, *, on_host: bool) -> Files:
        """A unit's files from ``shard``, its own or a copy; kernels run if ``on_host``, on the HOST lane."""
        backend = self.executor.backend if on_host else None
        written = (slice for slice in unit.layout.slices if self.frozen or slice.param.trainable)
        files = {
            file_name(WEIGHTS, unit): [_weight(slice, shard, backend) for slice in written],
            file_name(OPTIMIZER, unit): [
                _moment(slice, purpose, shard)
                for slice in self.moments.get(unit.index, ())
                for purpose in MOMENTS[self.state_dtype]
            ],
        }
        return {name: pieces for name, pieces in files.items() if pieces}

    def write_unit(self, folder: Path, unit: Unit, shard: HostShard, *, on_host: bool = True) -> None:
        """Write a unit's files, and add its parameters that are left out to the manifest."""
        self.write(folder, self.of_unit(unit, shard, on_host=on_host))
        for slice in unit.layout.slices:
            if not (self.frozen or slice.param.trainable):
                self.values[FROZEN][slice.param.name] = asdict(LeftOut.held(slice, shard))

    def write(self, folder: Path, files: Files) -> None:
        for name, pieces in files.items():
            self.entries[name] = write_tensors(folder / name, pieces, flushing=self.flushing)

    def write_manifest(self, folder: Path) -> None:
        """Write the manifest, after all files."""
        written_by = {"streamer": __version__, "torch": torch.__version__}
        Manifest(self.step, self.entries, self.values, written_by).write(folder)


@contextmanager
def _writing(ranks: Ranks, words: str) -> Iterator[None]:
    """A block with a barrier of all ranks at its end. An OSError of one rank is raised on all; for any other
    error of one rank the others raise RanksError."""
    failed: OSError | None = None
    with ranks.together(words):
        try:
            yield
        except OSError as error:
            failed = error
    failure = None if failed is None else (failed.errno, failed.strerror or str(failed), failed.filename)
    everyone = ranks.exchange(f"{words}: how it went", failure)
    if failed is not None:
        raise failed
    for rank, other in enumerate(everyone):
        if other is not None:
            number, what, path = other
            raise OSError(number, f"{what} on rank {rank}", path)


def _dealt(units: Sequence[Unit], ranks: int) -> dict[int, int]:
    """The rank that writes each unit, so that each of ``ranks`` writes about as many bytes."""
    nbytes = [0] * ranks
    found: dict[int, int] = {}
    for unit in sorted(units, key=lambda unit: unit.layout.nbytes, reverse=True):
        found[unit.index] = nbytes.index(min(nbytes))
        nbytes[found[unit.index]] += unit.layout.nbytes
    return found


def _check_registered(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise ValueError for a parameter that is no longer in the model: its replacement has no shard."""
    registered = set(model.parameters())
    for unit in units:
        for name, param, _ in unit.registered:
            if param not in registered:
                raise ValueError(
                    f"parameter '{name}' was replaced or removed after streamer.wrap, so that it "
                    "cannot be saved: put it back, or unwrap first"
                )


def in_parts(executor: Executor) -> dict[str, str]:
    """The kinds of the parameters stored in parts, by name."""
    units = (*executor.units, executor.root)
    return {each.name: each.composite.kind for unit in units for each in unit.in_parts}


def _put(pieces: list[Piece], tensor: torch.Tensor | OnDisk) -> str:
    if isinstance(tensor, OnDisk):
        pieces.append(Piece(str(len(pieces)), tensor.dtype, tensor.shape, tensor.read))
        return pieces[-1].name
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype}, {tensor.layout}, cannot be saved: make it dense, real")
    pieces.append(Piece.of(str(len(pieces)), tensor.detach()))
    return pieces[-1].name


def file_name(kind: str, unit: Unit | None = None) -> str:
    """The file for tensors of one ``kind``, of a unit or of the whole model."""
    if unit is None:
        return f"{kind}.safetensors"
    number = "root" if unit.index < 0 else f"{unit.index:05d}"
    return f"{kind}-{number}.safetensors"


def _weight(slice: Slice, shard: HostShard, backend: Backend | None) -> Piece:
    """The whole of a parameter. Kernels compute its master on the HOST lane of ``backend``, if there is one;
    else PyTorch does, on the calling thread."""
    if not slice.param.trainable or slice.dtype == torch.float32:
        return Piece(slice.param.name, slice.dtype, slice.param.shape, partial(shard.weight_of, slice))
    read: Callable[[], torch.Tensor] = partial(shard.joined, slice)
    if backend is not None:
        read = partial(backend.on_host, partial(shard.exact, slice))
    return Piece(slice.param.name, torch.float32, slice.param.shape, read)


def _moment(slice: Slice, purpose: Purpose, shard: HostShard) -> Piece:
    """A parameter's part of its moments."""
    name, shape = f"{slice.param.name}.{purpose.name}", purpose.shape(slice)
    return Piece(name, purpose.dtype, shape, partial(shard.part, purpose, slice))


@as_plain
def _gradients(unit: Unit) -> list[Piece]:
    return [
        Piece.of(slice.param.name, param.grad.detach())
        for slice, param in unit.placed()
        if param.grad is not None
    ]


def _optimizer(
    optimizer: torch.optim.Optimizer | None,
    moments: dict[int, list[Slice]],
    put: Put,
) -> dict[str, Any]:
    """The optimizer's entry in the manifest; ``moments`` gets the parameters that have any."""
    if optimizer is None:
        return {"class": None}
    if not isinstance(optimizer, AdamW):
        replay = vars(optimizer).get("_streamer")
        state = optimizer.state_dict() if replay is None else replay.state_dict(optimizer, from_disk=False)
        return {"class": type(optimizer).__name__, "state": encode(state, put, "optimizer")}
    steps: dict[str, float] = {}
    groups = []
    for group in optimizer.param_groups:
        homes = [require_home(param) for param in group["params"]]
        for param, home in zip(group["params"], homes, strict=True):
            if state := optimizer.state.get(param):
                steps[home.slice.param.name] = float(state["step"])
                moments.setdefault(home.unit.index, []).append(home.slice)
        options = {key: value for key, value in group.items() if key != "params"}
        names = [home.slice.param.name for home in homes]
        groups.append({"params": names, "options": encode(options, put, "optimizer.param_groups")})
    dtype = str(optimizer.state_dtype).removeprefix("torch.")
    return {"class": "AdamW", "state_dtype": dtype, "groups": groups, "steps": steps}


def check_owns(optimizer: AdamW, executor: Executor) -> None:
    """Raise unless all parameters are of this model, and this optimizer is the one that updates them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            home = require_home(param)
            if home.executor is not executor:
                raise ValueError(f"'{home.slice.param.name}' of the optimizer is of another model")
            check_owner(home, optimizer.token)
