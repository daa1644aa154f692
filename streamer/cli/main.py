"""The command `streamer`: its options, and the function of each subcommand."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamer.cli import shipped
from streamer.cli.config import Config, ConfigError, RunError, SampleConfig, load_config, with_keys
from streamer.errors import CheckpointError, RanksError
from streamer.version import __version__

EXAMPLES = """\
examples:
  streamer train DIR --data FILE.jsonl --lora-rank 16 --lr 1e-4 --epochs 2
      fine-tune the Hugging Face folder DIR; --resume continues after a stop
  streamer data DIR --data FILE.jsonl --show 3
      print documents of the data, with the tokens that have a loss marked
  streamer plan DIR --machine rtx-4090
      predict bytes and seconds of a step on any machine, before allocation
  streamer chat runs/hf-finetune
      talk to the model that a run has trained
  streamer train gpt2-demo --data FILES...
      train a small GPT on your own text, from scratch
  streamer plot runs/hf-finetune
      draw pictures of the run
"""
#: Libraries that a subcommand may need, and the extra of the distribution that installs them.
EXTRAS = {
    **dict.fromkeys(("transformers", "trl", "peft", "datasets", "huggingface_hub"), "hf"),
    "matplotlib": "plot",
}
#: Options that set a key of the configuration.
SHORT = {
    "--data": ("data.paths", "PATH", "text, JSON lines or Parquet, or folders of them"),
    "--model": ("model.path", "DIR", "a Hugging Face folder, or the id of a model on the hub"),
    "--output": ("train.output_dir", "DIR", "folder of the run"),
    "--lora-rank": ("lora.r", "R", "train adapters of this rank (peft)"),
    "--lr": ("train.learning_rate", "RATE", "learning rate after the warm-up"),
    "--epochs": ("train.num_train_epochs", "N", "passes over the data"),
    "--steps": ("train.max_steps", "N", "updates"),
    "--save-every": ("train.save_steps", "N", "steps between checkpoints"),
}
NUMBERS = ("lora.r", "train.learning_rate", "train.num_train_epochs", "train.max_steps", "train.save_steps")


def command_line() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="streamer",
        description="Train transformers that do not fit on the GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument(
        "config",
        help="a TOML file, the name of a shipped one (gpt2-demo), or a Hugging Face folder or hub id, for "
        "hf-finetune with that model",
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="set a key; the value is TOML"
    )
    for option, (key, metavar, words) in SHORT.items():
        several = {"nargs": "+"} if option == "--data" else {}
        run.add_argument(option, dest=key, metavar=metavar, help=f"{words} ({key})", **several)  # type: ignore[arg-type]

    train = commands.add_parser("train", parents=[run], help="train a model, its layers streamed")
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue the last run of this name, or from PATH",
    )
    data = commands.add_parser("data", parents=[run], help="print documents of the data, answers marked")
    data.add_argument(
        "--show", type=int, default=3, metavar="N", help="documents to print; default: %(default)s"
    )
    plan = commands.add_parser("plan", parents=[run], help="predict bytes and seconds of a run")
    plan.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="by name, or a file of streamer calibrate; default: this machine's GPU, else rtx-4090",
    )
    for option in ("device_memory", "host_memory"):
        key = f"stream.{option}"
        plan.add_argument(f"--{option.replace('_', '-')}", dest=key, metavar="BYTES", help=f"({key})")
    plan.add_argument(
        "--ranks", type=_positive, default=1, metavar="N", help="GPUs of the machine, one process each"
    )
    plan.add_argument(
        "--nodes", type=_positive, default=1, metavar="M", help="machines, which divide the optimizer state"
    )
    plan.add_argument(
        "--machines", metavar="NAME,...", help='print a table of these machines; "all": every named one'
    )
    plan.add_argument("--batch-sizes", metavar="N,...", help="print a table of these batch sizes")
    plan.add_argument("--json", action="store_true", help="print JSON, for programs")
    plan.add_argument("--timeline", metavar="FILE", help="draw the planned step as a PNG")
    chat = commands.add_parser("chat", help="talk to a model on the terminal")
    chat.add_argument("model", help="a run's folder, or a Hugging Face folder (adapters too)")
    chat.add_argument("--device", help='"cuda" or "cpu"; default: CUDA if there is one')
    chat.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="the most in an answer; default: %(default)s"
    )
    chat.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="default: %(default)s; 0: greedy"
    )
    export = commands.add_parser("export", help="write a checkpoint's weights for other tools")
    export.add_argument("run", help="a run's folder, for its last checkpoint, or a checkpoint")
    export.add_argument("--to", required=True, metavar="DIR", help="a folder that does not exist yet")
    export.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="default: as streamed")
    export.add_argument(
        "--shard-size", default="5GB", metavar="BYTES", help="size of a file; default: %(default)s"
    )
    export.add_argument("--merge", action="store_true", help="add the adapters of a run to its model")
    export.add_argument("--best", action="store_true", help="the checkpoint of the lowest validation loss")
    plot = commands.add_parser(
        "plot", help="draw losses, learning rate, tokens/s, lanes and the last steps of runs"
    )
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    plot.add_argument("--to", type=Path, metavar="DIR", help="default: plots in the first run's folder")
    configs = commands.add_parser("configs", help="list the shipped configurations, or copy one to edit")
    configs.add_argument("name", nargs="?", help="the one to copy")
    configs.add_argument("--to", type=Path, metavar="FILE", help="default: NAME.toml in the current folder")
    calibrate = commands.add_parser("calibrate", help="measure this machine, for plans")
    calibrate.add_argument("--device", help='"cuda" or "cpu"; default: CUDA if there is one')
    calibrate.add_argument(
        "--disk",
        action="append",
        default=[],
        metavar="DIR",
        help="also measure the drive of this folder; may be repeated",
    )
    calibrate.add_argument(
        "--output", type=Path, default="machine.toml", metavar="FILE", help="default: %(default)s"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done, or stopped by a signal and saved. 1: the run failed. 2: an error in the arguments, the
    configuration or the data, or a plan that does not fit. 130: Ctrl-C before the first step. 141: the reader
    of a pipe has closed it."""
    arguments = command_line().parse_args(argv)
    # an import of torchao warns of kernels of other GPUs that it cannot load, and of its enumerations
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        code = globals()[f"_{arguments.command}"](arguments)
        sys.stdout.flush()
        return int(code or 0)
    except (ConfigError, CheckpointError) as error:
        return _failed(error, 2)
    except BrokenPipeError:
        # Python flushes stdout at exit, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (RanksError, RunError) as error:
        return _failed(error, 1)
    except OSError as error:
        what = error.strerror or error
        return _failed(what if error.filename is None else f"{error.filename}: {what}", 2)
    except ImportError as error:
        library = str(error.name).partition(".")[0]
        if library not in EXTRAS:
            raise
        return _failed(f"this needs {library}: pip install 'layer-streamer[{EXTRAS[library]}]'", 2)
    except KeyboardInterrupt:
        print("\nstreamer: interrupted; nothing is written", file=sys.stderr)
        return 130


def _failed(error: object, code: int) -> int:
    rank = os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"
    print(f"streamer: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
    return code


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside the block, which imports a subcommand, libraries neither warn nor log."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _config(arguments: Namespace) -> Config:
    """The configuration of a command, with its options as keys."""
    overrides = list(arguments.set)
    for key, value in vars(arguments).items():
        if "." in key and value is not None:
            overrides.append(f"{key}={value if key in NUMBERS else json.dumps(value, ensure_ascii=False)}")
    name = arguments.config
    if shipped.is_model(name):
        overrides.insert(0, f"model.path={json.dumps(name, ensure_ascii=False)}")
        name = "hf-finetune"
    config = load_config(shipped.config_path(name), overrides)
    if config.model.path is None:
        return config
    return with_keys(config, model={"path": shipped.model_folder(config.model.path)})


def _train(arguments: Namespace) -> None:
    config = _config(arguments)
    with importing():
        if config.model.path is None:
            from streamer.cli.loop import train_own as train
        else:
            from streamer.cli.trainer import train_folder as train
    train(config, resume=arguments.resume)


def _data(arguments: Namespace) -> None:
    config = _config(arguments)
    with importing():
        from streamer.cli.data import show_data
    show_data(config, arguments.show)


def _chat(arguments: Namespace) -> None:
    with importing():
        from streamer.cli.generate import chat
    options = SampleConfig(tokens=arguments.tokens, temperature=arguments.temperature)
    chat(arguments.model, options, device=arguments.device)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside the block Python seldom looks for garbage, and when it exits not at all: that takes a third of a
    plan's time."""
    atexit.register(gc.freeze)
    before = gc.get_threshold()
    gc.set_threshold(50_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@rarely_collected()
def _plan(arguments: Namespace) -> int:
    config = _config(arguments)
    with importing():
        from streamer.cli.plan.command import plan, plan_table
    counts = {"ranks": arguments.ranks, "nodes": arguments.nodes}
    if arguments.machines is not None or arguments.batch_sizes is not None:
        if arguments.timeline is not None:
            raise ConfigError("--timeline draws one plan: leave out --machines and --batch-sizes")
        machines = (arguments.machines or arguments.machine or "rtx-4090").split(",")
        sizes = (arguments.batch_sizes or str(config.train.per_device_train_batch_size)).split(",")
        fits = plan_table(config, machines, sizes, **counts, as_json=arguments.json)
    else:
        fits = plan(config, arguments.machine, **counts, as_json=arguments.json, timeline=arguments.timeline)
    return 0 if fits else 2


def _export(arguments: Namespace) -> None:
    with importing():
        from streamer.cli.export import export
    export(
        arguments.run,
        arguments.to,
        dtype=arguments.dtype,
        shard_size=arguments.shard_size,
        merge=arguments.merge,
        best=arguments.best,
    )


def _plot(arguments: Namespace) -> None:
    with importing():
        from streamer.cli.plot import plot
    for picture in plot(arguments.runs, arguments.to):
        print(picture)


def _configs(arguments: Namespace) -> None:
    if arguments.name is None:
        shipped.list_configs()
    else:
        shipped.copy_config(arguments.name, arguments.to)


def _calibrate(arguments: Namespace) -> None:
    with importing():
        from streamer.cli.calibrate.command import calibrate
    calibrate(device=arguments.device, output=arguments.output, disk=arguments.disk)
