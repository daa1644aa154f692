"""The folder of a run: its place, its checkpoints and which one a run resumes from, and its summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, dump_config, load_config, toml_value
from streamer.app.locks import is_held
from streamer.app.signals import Stop
from streamer.backends.base import DISKS, SPECIAL
from streamer.checkpoint.manifest import Manifest, checkpoints, new_file, prune
from streamer.checkpoint.values import decode
from streamer.errors import CheckpointError, amount
from streamer.quantized.parts import parts_of, values_in

T = TypeVar("T")

#: The file in a run's directory that the process which trains there has locked.
LOCK = ".lock"
#: What a run writes last.
SUMMARY = "summary.json"
#: Between two tries to write the last weights.
RETRY_SECONDS = 30.0


def numbered(wanted: Path) -> Iterator[Path]:
    """Names to try until one is free: ``name``, ``name-2``, ``name-3`` and so on."""
    return itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))


def run_directory(config: Config) -> Path:
    """A new directory for the run with the resolved config in it. Raises ConfigError where there can be
    none."""
    wanted = Path(config.run.out) / config.run.name
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for directory in numbered(wanted):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                break
        write_config(directory, config)
    except OSError as error:
        raise ConfigError(f"cannot write to {wanted} ({error.strerror}): set run.out or run.name") from error
    return directory


def write_config(directory: Path, config: Config) -> None:
    """Have ``config`` be that of the run in ``directory``, also for who reads it from another folder."""
    with new_file(directory / "config.toml") as file:
        file.write_text(dump_config(_with_whole_paths(config)))


def has_finished(checkpoint: Path, config: Config) -> bool:
    """Whether the run of ``checkpoint`` has made all steps of ``config``, or has ended early as that says,
    and has written all of its files."""
    manifest = Manifest.read(checkpoint)
    extra = _extra(manifest)
    # of epochs it is known how many steps they were
    of_epochs = extra.get("steps_of_epochs", 0) if extra.get("epochs") == config.run.epochs else 0
    ends = [steps for steps in (config.run.steps, of_epochs) if steps]
    done = bool(ends) and manifest.step >= min(ends) or ended_early(checkpoint, config)
    return done and (checkpoint.parent.parent / SUMMARY).exists()


def ended_early(checkpoint: Path, config: Config) -> bool:
    """Whether the validation loss of the run of ``checkpoint`` has not fallen for as long as ``config`` has
    patience."""
    since_best: int = _extra(Manifest.read(checkpoint)).get("since_best", 0)
    return 0 < config.run.patience <= since_best


def _extra(manifest: Manifest) -> dict[str, Any]:
    """The loop's part of a checkpoint, its tensors empty."""
    extra: dict[str, Any] = decode(manifest.values["extra"], lambda name: torch.empty(0))
    return extra


def _with_whole_paths(config: Config) -> Config:
    """``config`` with the folders of its model and tokenizer as they are found from anywhere."""

    def whole(path: str | None) -> str | None:
        return path if path is None else os.path.abspath(path)

    return replace(
        config,
        model=replace(config.model, pretrained=whole(config.model.pretrained)),
        data=replace(config.data, tokenizer=whole(config.data.tokenizer)),
    )


class Lanes(NamedTuple):
    """Seconds by lane: busy, and exposed."""

    busy: Mapping[str, float]
    exposed: Mapping[str, float]


def summary_of(model: nn.Module, first: Lanes, **trained: float) -> dict[str, Any]:
    """What ``summary.json`` holds: bytes and seconds by lane of a wrapped model, beside the figures of its
    training (losses in nats per token).

    Seconds are those of the steps after the ``first``, which compiles, unless there is none. The overlap of
    an idle lane is None.
    """
    streamer.synchronize(model)
    stats = streamer.stats(model)
    busy, exposed = (
        {lane: max(0.0, seconds - before.get(lane, 0.0)) for lane, seconds in now.items()}
        for now, before in ((stats.busy_seconds, first.busy), (stats.exposed_seconds, first.exposed))
    )
    if not busy["compute"]:
        busy, exposed = dict(stats.busy_seconds), dict(stats.exposed_seconds)
    params = list(model.parameters())
    parameters = sum(map(values_in, params))
    return {
        "parameters": parameters,
        "weight_bytes": sum(part.nbytes for param in params for part in parts_of(param)),
        "device_bytes_peak": stats.device_bytes_peak,
        "host_bytes_per_parameter": sum(stats.host_bytes.values()) / parameters,
        "disk_bytes_per_parameter": sum(stats.disk_bytes.values()) / parameters,
        **trained,
        "busy_seconds": busy,
        "exposed_seconds": exposed,
        "overlap": {lane: 1 - exposed[lane] / busy[lane] if busy[lane] else None for lane in busy},
    }


def summary_table(summary: Mapping[str, Any], *, unit: str = "byte") -> str:
    """The summary as a table for the terminal."""
    # a plain optimizer's two fp32 moments stand beside the weights and their gradients
    resident = 2 * summary["weight_bytes"] + 8 * summary["parameters"]
    held = summary["disk_bytes_per_parameter"]
    on_disk = [("disk bytes per parameter", f"{held:.2f}")] if held else []
    rows = [
        ("parameters", f"{summary['parameters']:,}"),
        ("weights", amount(summary["weight_bytes"])),
        ("peak on the device", f"{amount(summary['device_bytes_peak'])} with the layers' saved inputs"),
        ("if all were held there", f"{amount(resident)} of weights, gradients and moments"),
        ("host bytes per parameter", f"{summary['host_bytes_per_parameter']:.2f}"),
        *on_disk,
        ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
        ("validation loss before", f"{summary['first_val_loss']:.3f} nats per {unit}"),
        ("validation loss after", f"{summary['last_val_loss']:.3f}"),
        (f"{unit} frequencies alone", f"{summary['unigram_loss']:.3f}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    used = [each.value for each in (DISKS if on_disk else ())]
    idle = [each.value for each in SPECIAL if each.value not in used]
    lanes = {lane: busy for lane, busy in summary["busy_seconds"].items() if busy or lane not in idle}
    wide = max(8, *(len(lane) + 2 for lane in lanes))
    lines.append(f"\n{'lane':{wide}}{'busy s':>10}{'exposed s':>12}{'overlap':>10}")
    late = []
    for lane, busy in lanes.items():
        part = summary["overlap"][lane]
        if part is not None and part < 0:
            late.append(lane)
        overlap = "-" if lane == "compute" or part is None else "none" if lane in late else f"{part:.1%}"
        exposed = "-" if lane == "compute" else f"{summary['exposed_seconds'][lane]:.2f}"
        lines.append(f"{lane:{wide}}{busy:>10.2f}{exposed:>12}{overlap:>10}")
    if late:
        lines.append(
            f"{', '.join(late)}: compute waited longer than the lane worked, whose work began late: other "
            "processes, or too few cores"
        )
    return "\n".join(lines)


#: Where checkpoints are in a run's directory.
FOLDER = "checkpoints"


#: The file beside the checkpoints that names the one of the lowest validation loss.
BEST = "best.json"


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in ``folder`` of the lowest validation loss, if one is kept."""
    try:
        path = folder / str(json.loads((folder / BEST).read_text())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.is_dir() and path.parent == folder else None


def checkpoint_to_resume(config: Config, given: str | None, named: Collection[str] = ()) -> Path:
    """The checkpoint that ``--resume`` means: ``given`` itself, or the latest one of the run's directory
    ``given``, or of the last run of the config's name.

    ``named`` are the keys that the command line has named: those of them that may change, such as
    ``run.steps``, are what the run goes on with, which a line says. Raises ConfigError where there is no
    checkpoint, where the run was made with another value of a key that is not named, or that may not change.
    """
    if given is not None:
        path = Path(given)
        if not path.is_dir():
            raise ConfigError(f"--resume {given}: no such folder: give that of a run, or of a checkpoint")
        found = checkpoints(path / FOLDER) or ([path] if path.is_dir() else [])
    else:
        out = Path(config.run.out)
        pattern = re.compile(re.escape(config.run.name) + r"(-\d+)?")
        runs = [path for path in out.glob(f"{config.run.name}*") if pattern.fullmatch(path.name)]
        of_runs = [of_run for run in runs if (of_run := checkpoints(run / FOLDER))]
        found = max(of_runs, key=lambda of_run: of_run[-1].stat().st_mtime) if of_runs else []
    if not found:
        where = given or f"{config.run.out}/{config.run.name}"
        raise ConfigError(
            f"{where} holds no complete checkpoint: train with run.save_every, or without --resume"
        )
    wanted = found[-1]
    others = checkpoints(wanted.parent)
    if _check_config(config, wanted.parent.parent, named) and wanted in others[:-1]:
        raise ConfigError(
            f"{others[-1]} is later than {wanted} and was made without these changes: resume the run from "
            "there, or move it away"
        )
    return wanted


#: Keys of a run's config that what it has computed so far, or what its checkpoints hold, depends on.
FIXED = {
    "model": ("factory", "args", "init", "pretrained"),
    "lora": ("rank", "alpha", "dropout", "targets", "rank_stabilized"),
    "data": ("tokenizer",),
    "optimizer": ("state_dtype",),
    "run": ("seed",),
}
#: Further keys that change what is computed from here on: they are to be named if they change.
MAY_CHANGE = {
    "run": ("steps", "epochs", "keep"),
    "data": ("paths", "val_paths", "val_fraction", "context", "batch_size", "packing"),
    "optimizer": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "grad_clip",
        "schedule",
        "warmup_steps",
        "decay_steps",
        "min_lr",
    ),
}


def _check_config(config: Config, directory: Path, named: Collection[str]) -> bool:
    """Whether what is ``named`` lets ``config`` compute something else than the run in ``directory``. Raises
    ConfigError if what is not does."""
    path = directory / "config.toml"
    if not path.exists():
        return False
    then, config = _with_whole_paths(load_config(path)), _with_whole_paths(config)

    def changed(sections: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
        for section, keys in sections.items():
            for key in keys:
                before, now = (getattr(getattr(c, section), key) for c in (then, config))
                yield from _differing(f"{section}.{key}", before, now)

    for key, before, now in changed(FIXED):
        raise ConfigError(
            f"the run was made with {key} = {before}, not {now}, and can only go on with that: resume it "
            f"with {path}, or begin another run"
        )
    for key, before, now in changed(MAY_CHANGE):
        if key not in named:
            raise ConfigError(
                f"the run was made with {key} = {before}, and the config has {now}: resume it with {path}, "
                f"or name the change on the command line: --set {key}=..."
            )
        print(f"{key} is {now} from here on; it was {before}")
    return any(changed(MAY_CHANGE))


def _differing(key: str, before: Any, now: Any) -> Iterator[tuple[str, str, str]]:
    """The keys, in tables each key of their own, whose values differ, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for inner in dict.fromkeys((*before, *now)):
            yield from _differing(f"{key}.{inner}", before.get(inner), now.get(inner))
    elif before != now:
        yield key, _shown(before), _shown(now)


def _shown(value: Any) -> str:
    return "none" if value is None else toml_value(value)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Inside the block the run in ``directory`` is this process's alone. Raises ConfigError where another
    one has it. Where the system has no such locks, nothing is looked after."""
    with (directory / LOCK).open("a+") as file:
        if is_held(file):
            file.seek(0)
            raise ConfigError(
                f"another process ({file.read().strip() or 'of unknown number'}) trains in {directory}: wait "
                "for it, or give this run another run.name"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def until_written(
    write: Callable[[Path], T], wanted: Path, directory: Path, stop: Stop, *, minutes: int
) -> T:
    """What ``write`` returns for ``wanted``, a path of weights in the ``directory`` of a run that are nowhere
    else. Where it cannot be written they are kept in memory: on a terminal another folder is asked for;
    elsewhere it is tried again for ``minutes``, or until a signal asks for the end, and then once more in the
    system's folder for temporary files.

    Raises the last OSError in the end, which says where the weights are if they are in that folder.
    """
    until, place = time.monotonic() + 60 * minutes, wanted
    while True:
        try:
            return write(place)
        except OSError as error:
            here = sys.stdin is not None and sys.stdin.isatty() and stop.signal is not signal.SIGTERM
            if not here and (stop.signal is not None or time.monotonic() >= until):
                raise _written_elsewhere(write, wanted, directory, error) from error
            print(f"{error}: the trained weights are still in memory", file=sys.stderr, flush=True)
            if here:
                place = _asked_for(wanted)
            else:
                print(
                    f"tried again every {RETRY_SECONDS:.0f} s for {minutes} minutes",
                    file=sys.stderr,
                    flush=True,
                )
                again = time.monotonic() + RETRY_SECONDS
                while stop.signal is None and time.monotonic() < again:
                    time.sleep(0.2)


def _written_elsewhere(
    write: Callable[[Path], object], wanted: Path, directory: Path, error: OSError
) -> OSError:
    """``error``, which says where the weights have been written after all, if they could be."""
    beside = Path(tempfile.gettempdir()) / f"streamer-{directory.name}"
    folder = next(path for path in numbered(beside) if not path.exists())
    try:
        write(folder / wanted.relative_to(directory))
        shutil.copy(directory / "config.toml", folder)  # so that the folder is a run's
    except OSError:
        return error
    told = f"{error.strerror}; THE TRAINED WEIGHTS ARE IN {folder}, move them away from there"
    return OSError(error.errno, told, error.filename)


def _asked_for(wanted: Path) -> Path:
    print("Make room and press Enter, or give another folder: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    return Path(answer).expanduser() / wanted.name if answer else wanted


class Checkpoints:
    """The checkpoints of the run in ``directory``; `save` keeps the last ``keep``. They hold what is not
    trained if ``frozen`` says so."""

    def __init__(self, directory: Path, *, keep: int, frozen: bool = True) -> None:
        self.folder = directory / FOLDER
        self._keep = keep
        self._frozen = frozen

    def save(self, write: Callable[[Path], object], *, step: int, best: float | None = None) -> Path:
        """Let the checkpoint of ``step`` be written, unless it is there, and delete those beyond ``keep``;
        its path. ``best`` is its validation loss if that is the lowest so far.

        A damaged one of the same step is put aside, under a hidden name.
        """
        path = self.path(step)
        if path.exists():
            try:
                Manifest.read(path).check(path)
            except CheckpointError:
                path.rename(path.with_name(f".{path.name}.damaged-{time.time_ns()}"))
        if not path.exists():
            write(path)
        if best is not None:
            self.note_best(step, best)
        self.prune()
        return path

    def prune(self) -> None:
        """Delete the checkpoints beyond ``keep``, apart from the best one."""
        prune(self.folder, self._keep, [best] if (best := best_checkpoint(self.folder)) else [])

    def note_best(self, step: int, val_loss: float) -> None:
        """Have the checkpoint of ``step`` be the best one. Where it is not there, none is."""
        path, note = self.path(step), self.folder / BEST
        if not path.exists():
            note.unlink(missing_ok=True)
            return
        with new_file(note) as file:
            file.write_text(json.dumps({"checkpoint": path.name, "step": step, "val_loss": val_loss}) + "\n")

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is."""
        return self.folder / f"step-{step:07d}"

    def write(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        path: Path,
        *,
        step: int,
        extra: dict[str, Any],
    ) -> None:
        """Write a checkpoint to ``path``."""
        streamer.save(model, optimizer, path, step=step, extra=extra, frozen=self._frozen)

    def latest(self) -> Path | None:
        """The last complete checkpoint."""
        return next(reversed(checkpoints(self.folder)), None)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, fall_back: bool
    ) -> streamer.Loaded:
        """Go on from the checkpoint ``path`` or, if it is damaged and ``fall_back`` says so, from the latest
        one before it that is not. Raises ConfigError where there is none."""
        before = [other for other in checkpoints(path.parent) if other < path] if fall_back else []
        damaged = []
        for candidate in (path, *reversed(before)):
            try:
                return streamer.load(model, optimizer, candidate)
            except CheckpointError as error:
                damaged.append(str(error))
                print(f"not usable: {error}")
        remedy = "" if fall_back else "; --fall-back goes on from the one before"
        raise ConfigError(f"cannot resume: {damaged[0]}{remedy}")
