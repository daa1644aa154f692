"""What the commands run, and how each one's errors become its exit code."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

from streamer.app.config import load_config
from streamer.app.sections import ConfigError
from streamer.app.signals import INTERRUPTED, exiting_on_interrupt
from streamer.files.errors import CheckpointError

# Each command imports its own module, and torch and numba with it, when its config is found to be readable.


def run(arguments: Namespace) -> int:
    """The exit code of the command that the parser has found; see `streamer.app.cli.main`."""
    commands = {"train": _train, "export": _export, "calibrate": _calibrate, "plan": _plan}
    try:
        code = commands[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, CheckpointError) as error:
        print(f"streamer: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # head has read enough; Python writes what is left when it ends, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        what = error.strerror or error
        named = what if error.filename is None else f"{error.filename}: {what}"
        print(f"streamer: {named}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130


def _train(arguments: Namespace) -> int:
    overrides = _overrides(arguments)
    if arguments.data:
        overrides.append(f"data.paths={json.dumps(arguments.data, ensure_ascii=False)}")
    if arguments.save_every is not None:
        overrides.append(f"run.save_every={arguments.save_every}")
    if arguments.keep is not None:
        overrides.append(f"run.keep={arguments.keep}")
    config = load_config(arguments.config, overrides)
    with exiting_on_interrupt():
        from streamer.app.resume import checkpoint_to_resume
        from streamer.app.train import StoppedError, train
    try:
        resume = None
        if arguments.resume is not None:
            resume = checkpoint_to_resume(config, arguments.resume or None)
        train(config, resume, fall_back=arguments.fall_back)
    except (StoppedError, OSError) as error:
        print(f"streamer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstreamer: interrupted", file=sys.stderr)
        return 130
    return 0


def _overrides(arguments: Namespace) -> list[str]:
    """What ``--set`` and ``--model`` change of the config."""
    overrides = list(arguments.set)
    if arguments.model is not None:
        overrides.append(f"model.pretrained={json.dumps(arguments.model, ensure_ascii=False)}")
    return overrides


def _plan(arguments: Namespace) -> int:
    overrides = _overrides(arguments)
    if arguments.device_memory is not None:
        overrides.append(f"stream.device_memory={json.dumps(arguments.device_memory)}")
    config = load_config(arguments.config, overrides)
    with exiting_on_interrupt():
        from streamer.app.plan import plan
    fits = plan(
        config,
        arguments.machine,
        host_memory=arguments.host_memory,
        as_json=arguments.json,
        timeline=arguments.timeline,
    )
    return 0 if fits else 2


def _export(arguments: Namespace) -> int:
    with exiting_on_interrupt():
        from streamer.app.export import export
    export(arguments.run, arguments.to, dtype=arguments.dtype, shard_size=arguments.shard_size)
    return 0


def _calibrate(arguments: Namespace) -> int:
    config = None if arguments.config is None else load_config(arguments.config, arguments.set)
    with exiting_on_interrupt():
        from streamer.app.calibrate import calibrate
    calibrate(config, device=arguments.device, output=Path(arguments.output))
    return 0
