"""Several ranks of one machine, each a process with one thread, for tests."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds after which a test's ranks are taken for hung.
PATIENCE = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.ranks.preload"])


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    may_end: bool = False,
    kind: str | None = "gloo",
    imports: Sequence[str] = (),
) -> list[Any]:
    """What ``work(rank, *args)``, a function of a module, returns on each of ``size`` ranks.

    Raises AssertionError with the traceback of a rank that has failed. With ``may_end`` a rank that has ended
    without an answer has None. Of ``kind`` None, ``work`` connects the ranks itself. Modules of
    ``imports``, which take long to import, are imported once for all ranks.
    """
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    file = Path(os.environ.get("TMPDIR", "/dev/shm")) / f"streamer-ranks-{os.getpid()}-{id(pipes)}"
    given = [
        (rank, size, str(file), timeout, kind, there, work, args) for rank, (_, there) in enumerate(pipes)
    ]
    if imports:
        processes = [_context.Process(target=_fork, args=(imports, given), daemon=True)]
    else:
        processes = [_context.Process(target=_run, args=each, daemon=True) for each in given]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()
    try:
        return [_answer(rank, here, may_end=may_end) for rank, (here, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                if imports:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        file.unlink(missing_ok=True)


def listening() -> tuple[dist.TCPStore, dict[str, str]]:
    """Where ranks meet as long as the store is kept, and their environment for it: as torchrun, this process
    listens, so that nobody else gets the port first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, {**place, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def _answer(rank: int, here: Connection, *, may_end: bool) -> Any:
    if not wait([here], PATIENCE):
        raise AssertionError(f"rank {rank} hangs")
    try:
        failed, answer = here.recv()
    except EOFError:
        if may_end:
            return None
        raise AssertionError(f"rank {rank} has ended without an answer") from None
    if failed:
        raise AssertionError(f"rank {rank} has failed:\n{failed}")
    return answer


def _fork(imports: Sequence[str], given: Sequence[Any]) -> None:
    """Be the process that all ranks are forked of."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    gc.disable()
    for name in imports:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    ranks = []
    for rank, each in enumerate(given):
        ranks.append(os.fork())
        if not ranks[-1]:
            for *_, there, _, _ in [*given[:rank], *given[rank + 1 :]]:
                there.close()
            _run(*each)
    for *_, there, _, _ in given:
        there.close()
    for process in ranks:
        os.waitpid(process, 0)


def _run(
    rank: int,
    size: int,
    file: str,
    timeout: float,
    kind: str | None,
    there: Connection,
    work: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    # it ends soon
    gc.disable()
    # what PyTorch is about to drop
    warnings.filterwarnings("error", category=FutureWarning, module=r"torch\.distributed")
    failed, answer = None, None
    try:
        if kind is not None:
            dist.init_process_group(
                kind,
                store=dist.FileStore(file, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        answer = work(rank, *args)
    except BaseException:  # noqa: BLE001 - told to the test
        failed = traceback.format_exc()
    there.send((failed, answer))
    there.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
