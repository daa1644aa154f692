"""The processes of a run: those that torchrun has started, or the one that there is without.

All ranks go through the same steps. Each takes its part of every batch; rank 0 *leads*: it prints, and writes
the files. What a rank can know by itself only (a signal, how much memory is free, that a file cannot be
written) is told to all before they act on it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streamer.app.config import Config, ConfigError
from streamer.app.data.splits import IGNORED
from streamer.backends.ranks import Ranks
from streamer.errors import CheckpointError, RanksError

T = TypeVar("T")
#: Tokens, targets and, of rows of several texts, positions, each [batch, time].
Batch = tuple[torch.Tensor, ...]


class ToldByTheFirstError(Exception):
    """What has failed on this rank has failed on rank 0 too, which tells."""


class RunRanks:
    """The ranks of a run, as one of them sees them; by default the one that there is without torchrun."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self.rank, self.size = self._ranks.rank, self._ranks.size
        #: of these ranks so many are on this machine
        self.local_size, self.machines = self._ranks.local_size, self._ranks.machines

    @property
    def leads(self) -> bool:
        return self._ranks.is_first

    @property
    def group(self) -> Any:
        """`streamer.wrap`'s ``process_group``."""
        return None if self.size == 1 else dist.group.WORLD

    def meet(self, words: str, value: T) -> list[T]:
        """The ``value`` of each rank; ``words`` say what for. All ranks call it.
        However long another one takes, for instance to write files, it is waited for while it lives."""
        return self._ranks.exchange(words, value, patient=True)

    @contextmanager
    def progress_of_first(self) -> Iterator[None]:
        """A block of which only rank 0 shows how far it is, on stderr."""
        with contextlib.ExitStack() as ends:
            if not self.leads:
                ends.enter_context(contextlib.redirect_stderr(ends.enter_context(open(os.devnull, "w"))))
            yield

    def as_first(self, words: str, value: T) -> T:
        """What rank 0 has for ``value``."""
        return self.meet(words, value)[0]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A block that all ranks go through. Where it fails on one, it fails on all, and one tells."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - is raised below, after the others have been told
            failed = error
        if self.size == 1:
            if failed is not None:
                raise failed
            return
        told = self.meet("a check", None if failed is None else str(failed))
        first = next((rank for rank, error in enumerate(told) if error is not None), None)
        if first is None:
            return
        if failed is not None and (self.rank == first or not isinstance(failed, TOLD)):
            raise failed
        raise ToldByTheFirstError(told[first]) from failed

    def parts(self, batch: Batch, count: int) -> list[Batch]:
        """This rank's part of ``batch`` in ``count`` parts of as many sequences, give or take one; in fewer,
        as many on each rank, where the batch has not so many. A rank without a sequence gets one of which
        nothing is learnt."""
        if (lacking := self.size - len(batch[0])) > 0:
            tokens, targets, *more = (torch.cat([each, each[:1].expand(lacking, -1)]) for each in batch)
            targets[-lacking:] = IGNORED
            batch = (tokens, targets, *more)
        most = min(count, len(batch[0]) // self.size)
        mine = tuple(each.tensor_split(self.size)[self.rank] for each in batch)
        return [*zip(*(each.tensor_split(most) for each in mine), strict=True)]

    def led(self, words: str, write: Callable[[T], object], lead: Callable[[Callable[[T], Any]], Any]) -> Any:
        """Let rank 0 ``lead``, which may call what it is given any number of times in place of ``write``: all
        ranks then call ``write`` with the same argument. What rank 0 has returned, on all ranks.

        Raises on rank 0 what ``lead`` raises, on the others `ToldByTheFirstError`.
        """
        if self.size == 1:
            return lead(write)
        if not self.leads:
            return self._follow(words, write)

        def write_with_all(argument: T) -> object:
            self.meet(words, (True, argument, None))
            return write(argument)

        try:
            result = lead(write_with_all)
        except Exception as error:
            self.meet(words, (False, None, str(error)))
            raise
        self.meet(words, (False, result, None))
        return result

    def _follow(self, words: str, write: Callable[[T], object]) -> Any:
        while True:
            nothing: tuple[bool, Any, str | None] = (False, None, None)
            again, value, failed = self.meet(words, nothing)[0]
            if failed is not None:
                raise ToldByTheFirstError(failed)
            if not again:
                return value
            # rank 0 knows of it, and decides what follows; one that is lost raises again
            with contextlib.suppress(RanksError, OSError):
                write(value)


#: Errors whose one line says all.
TOLD = (ConfigError, CheckpointError, OSError, RanksError)


def least_batch(config: Config, size: int) -> int:
    """Sequences of which each of ``size`` ranks has one in each of its passes."""
    return size * config.data.accumulate if size > 1 else 1


def share_of_machine(config: Config, here: int, size: int) -> Config:
    """``config`` with the part of a batch that is this machine's, to plan what the ranks ``here`` do, of
    ``size`` in all."""
    batch = -(-config.data.batch_size * here // size)
    return replace(config, data=replace(config.data, batch_size=batch))


def check_ranks(config: Config, size: int) -> None:
    """Raise ConfigError where a batch has no part for each of ``size`` ranks."""
    least = least_batch(config, size)
    if config.data.batch_size < least:
        passes = f", each in {config.data.accumulate} passes" if config.data.accumulate > 1 else ""
        raise ConfigError(
            f"data.batch_size = {config.data.batch_size} has no part for each of {size} processes{passes}: "
            f"set it to a multiple of {least}"
        )


@contextmanager
def ranks_of_run(device: str | None) -> Iterator[RunRanks]:
    """The ranks of this run, connected inside the block, where only the first one prints. ``device`` is
    ``stream.device``.

    Raises ConfigError where torchrun has started more processes on this machine than it has GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1 or "LOCAL_RANK" not in os.environ:
        yield RunRanks()
        return
    kind, _, number = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    try:
        _check_started(here, kind, number)
    except ConfigError as error:
        if int(os.environ["RANK"]):
            raise ToldByTheFirstError from error
        raise
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    ranks = RunRanks(Ranks(dist.group.WORLD, torch.device(kind)))
    try:
        with contextlib.nullcontext() if ranks.leads else _silent():
            yield ranks
    finally:
        dist.destroy_process_group()


def _check_started(here: int, kind: str, number: str) -> None:
    if kind != "cuda":
        return
    if number:
        raise ConfigError(f'stream.device = "cuda:{number}": under torchrun each process has its own, "cuda"')
    if here > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"torchrun has started {here} processes here, and there are {gpus} GPUs: "
            f"--nproc-per-node {max(1, gpus)}"
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing is printed inside the block, and no warning given: rank 0 says the same. Errors are told."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        warnings.catch_warnings(),
    ):
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        yield
