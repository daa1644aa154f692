"""The command line of `streamer`: its arguments, what each command runs, and the exit code of an error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

from streamer.app import shipped
from streamer.app.config import Config, ConfigError, RunConfig, load_config
from streamer.app.output import outliving_readers
from streamer.app.reference import reference
from streamer.app.signals import INTERRUPTED, exiting_on_interrupt
from streamer.errors import CheckpointError, RanksError
from streamer.version import __version__

EXAMPLES = """\
examples:
  streamer train configs/gpt2-demo.toml
      a small GPT on the source of the Python standard library
  streamer train configs/gpt2-demo.toml --data notes.txt books/ --set run.steps=2000
      the same model on your own text, for longer
  streamer train configs/hf-finetune.toml --model DIR --data FILE.jsonl
      a Llama, Qwen or other language model in a local Hugging Face folder, on text or JSON lines
  streamer data configs/hf-finetune.toml --model DIR --data FILE.jsonl --show 5
      what of the data is learnt, and what is cut
  streamer export runs/gpt2-demo --to gpt2-demo-weights
      the weights of its latest checkpoint, for others to load
  streamer plot runs/gpt2-demo
      pictures of its losses, learning rate and tokens/s, of its lanes, and of its last steps
  streamer calibrate configs/gpt2-demo.toml --output machine.toml
      how fast this machine is at what a step consists of, in less than a minute
  streamer plan configs/gpt2-10b.toml --machine rtx-4090
      bytes and seconds of a step, on any machine, before anything is allocated
  streamer plan DIR/config.json --machines all --batch-sizes 4,16,64
      a table for a Hugging Face model, of which config.json is enough
"""


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands; ``command`` says which. An option that stands for a key of the config is
    named after the key, ``run.keep``."""
    parser = argparse.ArgumentParser(
        prog="streamer",
        description="Train transformers that do not fit on the GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    overrides = argparse.ArgumentParser(add_help=False)
    overrides.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; the value is TOML",
    )
    config = argparse.ArgumentParser(add_help=False)
    config.add_argument(
        "config",
        help="a TOML file, the name of one that streamer brings (gpt2-demo), or a Hugging Face folder or its "
        "config.json, for hf-finetune with that model",
    )
    config.add_argument(
        "--model",
        dest="model.pretrained",
        metavar="DIR",
        help="a Hugging Face folder with the model and tokenizer to go on from",
    )
    paths = argparse.ArgumentParser(add_help=False)
    paths.add_argument(
        "--data",
        dest="data.paths",
        nargs="+",
        metavar="PATH",
        help="text or JSON lines, or directories of them, to train on",
    )
    train = commands.add_parser(
        "train",
        parents=[config, paths, overrides],
        help="train the model of a config, its layers streamed",
        description="Train the model of a config with its layers streamed from host memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument(
        "--save-every", dest="run.save_every", metavar="N", help="save a checkpoint every N steps"
    )
    train.add_argument(
        "--keep",
        dest="run.keep",
        metavar="K",
        help=f"keep the last K checkpoints; default: {RunConfig.keep}",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="go on from this checkpoint or this run's latest one, or from the latest of run.name's runs",
    )
    train.add_argument(
        "--fall-back", action="store_true", help="where that checkpoint is damaged, go on from the one before"
    )
    data = commands.add_parser(
        "data",
        parents=[config, paths, overrides],
        help="look at the data of a run, and at what of it is learnt",
        description="Tell what the data of a config's run is made of (how many texts, how long, what is "
        "cut), and show the first texts with what is learnt marked. Reads only the tokenizer of a model.",
    )
    data.add_argument(
        "--show", type=_count, default=3, metavar="N", help="texts to show; default: %(default)s"
    )
    plan = commands.add_parser(
        "plan",
        parents=[config, paths, overrides],
        help="bytes and seconds of a run, before anything is allocated",
        description="Tell what a step of a config's run takes on a machine: bytes by owner, seconds by lane, "
        "how both move with the batch, and what would make it fit. Allocates nothing. Exit code 2: it does "
        "not fit.",
    )
    plan.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="a machine by name, or a file that streamer calibrate has written; default: the GPU and the "
        "memory of this machine, rtx-4090 where there is no GPU",
    )
    plan.add_argument(
        "--device-memory",
        dest="stream.device_memory",
        metavar="BYTES",
        help="stream.device_memory, such as 16GiB",
    )
    plan.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs of the machine that train together, each with a process of its own; of several machines "
        "plan one, with its part of data.batch_size; default: 1",
    )
    plan.add_argument(
        "--nodes",
        type=_positive,
        default=1,
        metavar="M",
        help="machines of --ranks GPUs each that train together and divide the optimizer's state; plan one "
        "of them; default: 1",
    )
    plan.add_argument(
        "--host-memory",
        dest="memory.host",
        metavar="BYTES",
        help="memory.host, such as 128GiB: the most that the run may take",
    )
    plan.add_argument(
        "--machines", metavar="NAME,...", help='a table of these machines; "all" are those that have names'
    )
    plan.add_argument("--batch-sizes", metavar="N,...", help="a table of these batch sizes")
    plan.add_argument("--json", action="store_true", help="print JSON, for programs")
    plan.add_argument("--timeline", metavar="FILE", help="draw the predicted step as a PNG")
    export = commands.add_parser(
        "export",
        help="write a checkpoint's weights for others to load",
        description="Write the weights of a checkpoint as safetensors, laid out as Hugging Face does, with a "
        "config and a README.txt that tells how to load them.",
    )
    export.add_argument("run", help="a run's directory, for its latest checkpoint, or a checkpoint")
    export.add_argument("--to", required=True, metavar="DIR", help="a folder that is not there yet")
    export.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="of the weights; default: what the run streamed them in, or float32",
    )
    export.add_argument(
        "--shard-size", default="5GB", metavar="BYTES", help="of a file; default: %(default)s"
    )
    export.add_argument(
        "--merge", action="store_true", help="add the adapters of a run with [lora] to its model"
    )
    export.add_argument(
        "--best", action="store_true", help="the checkpoint of the lowest validation loss (run.keep_best)"
    )
    configs = commands.add_parser(
        "configs",
        help="list the configs that streamer brings, or copy one to edit",
        description="List the configs that streamer brings, or copy one of them into a file of yours.",
    )
    configs.add_argument("name", nargs="?", help="of the config to copy")
    configs.add_argument("--to", metavar="FILE", help="default: NAME.toml in this folder")
    configs.add_argument(
        "--keys", action="store_true", help="print all keys that a config can have: default, values, effect"
    )
    plot = commands.add_parser(
        "plot",
        help="draw runs: losses, learning rate, tokens/s, lanes, the timeline of the last steps",
        description="Draw runs from the files in their folders, also while they train: training.png (losses, "
        "learning rate, tokens/s; several runs in one picture) and, of one run that has ended, lanes.png "
        "(seconds by lane) and timeline.png (its last steps).",
    )
    plot.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, such as runs/gpt2-demo")
    plot.add_argument(
        "--to", metavar="DIR", help="for the pictures; default: plots in the first run's folder"
    )
    calibrate = commands.add_parser(
        "calibrate",
        parents=[overrides],
        help="measure this machine",
        description="Measure in less than a minute how fast this machine is at what a step consists of "
        "(copies each way and both at once, matrix products, activations, the host update, and each beside "
        "the others), and write it as a TOML file.",
    )
    calibrate.add_argument("config", nargs="?", help="measure at the shapes and in the dtype of this config")
    calibrate.add_argument("--device", help='"cuda" or "cpu"; default: CUDA where there is one')
    calibrate.add_argument(
        "--disk",
        action="append",
        default=[],
        metavar="DIR",
        help="also measure the drive of this folder, with 1 GiB of scratch space there; give it again for "
        "each further folder of memory.disk",
    )
    calibrate.add_argument("--output", default="machine.toml", metavar="FILE", help="default: %(default)s")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of texts")
    return int(text)


# A command imports its module, and torch and numba with it, only after its config has been read.


def run(arguments: Namespace) -> int:
    """The exit code of the command that the parser has found; see `streamer.app.cli.main`."""
    commands = {
        "train": _train,
        "export": _export,
        "calibrate": _calibrate,
        "data": _data,
        "plan": _plan,
        "plot": _plot,
        "configs": _configs,
    }
    try:
        code = commands[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, CheckpointError) as error:
        return _failed(error, 2)
    except BrokenPipeError:
        # `head` has closed the pipe; Python flushes stdout at its end, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        what = error.strerror or error
        return _failed(what if error.filename is None else f"{error.filename}: {what}", 2)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130


def _failed(error: object, code: int) -> int:
    print(f"streamer: {f'rank {_rank()}: ' if _rank() else ''}{error}", file=sys.stderr)
    return code


def _rank() -> int:
    """Which of the processes this one is that torchrun has started; 0 without it."""
    return int(os.environ.get("RANK", 0)) if "LOCAL_RANK" in os.environ else 0


def _config(arguments: Namespace) -> Config:
    """The config of a command, with what ``--set`` and its own options change of it."""
    overrides = list(arguments.set)
    for key, value in vars(arguments).items():
        if "." in key and value is not None:
            # a number of steps is TOML already; any other value is a string or a list of strings
            text = value if key.startswith("run.") else json.dumps(value, ensure_ascii=False)
            overrides.append(f"{key}={text}")
    given = arguments.config
    if (folder := shipped.pretrained_folder(given)) is not None:
        # a model in place of a config: streamer's own for fine-tuning
        overrides.insert(0, f"model.pretrained={json.dumps(str(folder), ensure_ascii=False)}")
        given = "hf-finetune"
    return load_config(shipped.config_path(given), overrides)


def _train(arguments: Namespace) -> int:
    try:
        config = _config(arguments)
    except ConfigError:
        if not _rank():
            raise
        return 2  # rank 0 has read the same, and tells
    with exiting_on_interrupt():
        from streamer.app.run.ranks import ToldByTheFirstError, ranks_of_run
        from streamer.app.run.run_folder import checkpoint_to_resume
        from streamer.app.train import StoppedError, train
    try:
        with outliving_readers(), ranks_of_run(config.stream.device) as ranks:
            resume = None
            if arguments.resume is not None:
                named = {override.partition("=")[0].strip() for override in arguments.set}
                named |= {key for key, value in vars(arguments).items() if "." in key and value is not None}
                with ranks.checked():
                    resume = checkpoint_to_resume(config, arguments.resume or None, named)
            train(config, resume, fall_back=arguments.fall_back, ranks=ranks)
    except ToldByTheFirstError:
        return 1
    except (StoppedError, RanksError, OSError) as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        print("\nstreamer: interrupted", file=sys.stderr)
        return 130
    return 0


def _plan(arguments: Namespace) -> int:
    config = _config(arguments)
    with exiting_on_interrupt():
        from streamer.app.plan.command import plan, plan_table
    if arguments.machines is not None or arguments.batch_sizes is not None:
        if arguments.timeline is not None:
            raise ConfigError("--timeline is of one plan: leave --machines and --batch-sizes out")
        machines = (arguments.machines or arguments.machine or "rtx-4090").split(",")
        sizes = (arguments.batch_sizes or str(config.data.batch_size)).split(",")
        counts = {"ranks": arguments.ranks, "nodes": arguments.nodes}
        fits = plan_table(config, machines, sizes, **counts, as_json=arguments.json)
        return 0 if fits else 2
    fits = plan(
        config,
        arguments.machine,
        ranks=arguments.ranks,
        nodes=arguments.nodes,
        as_json=arguments.json,
        timeline=arguments.timeline,
    )
    return 0 if fits else 2


def _data(arguments: Namespace) -> int:
    config = _config(arguments)
    with exiting_on_interrupt():
        from streamer.app.data.show import show_data
    show_data(config, arguments.show)
    return 0


def _export(arguments: Namespace) -> int:
    with exiting_on_interrupt():
        from streamer.app.export import export
    export(
        arguments.run,
        arguments.to,
        dtype=arguments.dtype,
        shard_size=arguments.shard_size,
        merge=arguments.merge,
        best=arguments.best,
    )
    return 0


def _configs(arguments: Namespace) -> int:
    if arguments.keys:
        print(reference(), end="")
    elif arguments.name is None:
        shipped.list_configs()
    else:
        shipped.copy_config(arguments.name, None if arguments.to is None else Path(arguments.to))
    return 0


def _plot(arguments: Namespace) -> int:
    with exiting_on_interrupt():
        from streamer.app.plot import plot
    for picture in plot(
        list(map(Path, arguments.runs)), None if arguments.to is None else Path(arguments.to)
    ):
        print(picture)
    return 0


def _calibrate(arguments: Namespace) -> int:
    config = None if arguments.config is None else _config(arguments)
    with exiting_on_interrupt():
        from streamer.app.calibrate.command import calibrate
    calibrate(config, device=arguments.device, output=Path(arguments.output), disk=arguments.disk)
    return 0
