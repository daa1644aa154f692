"""What may be written behind the command `streamer`."""

from __future__ import annotations

import argparse

from streamer.version import __version__

EXAMPLES = """\
examples:
  streamer train configs/gpt2-demo.toml
      a small GPT on the source of the Python standard library
  streamer train configs/gpt2-demo.toml --data notes.txt books/ --set run.steps=2000
      the same model on your own text, for longer
  streamer train configs/hf-finetune.toml --model DIR --data FILE.jsonl
      a Llama, Qwen or other language model in a local Hugging Face folder, on text or JSON lines
  streamer export runs/gpt2-demo --to gpt2-demo-weights
      the weights of its latest checkpoint, for others to load
  streamer calibrate configs/gpt2-demo.toml --output machine.toml
      how fast this machine is at what a step consists of, in less than a minute
  streamer plan configs/gpt2-10b.toml --machine rtx-4090
      bytes and seconds of a step, on any machine, before anything is allocated
"""

MACHINE_HELP = "a machine by name, or a file that streamer calibrate has written (rtx-4090)"


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands; ``command`` says which."""
    parser = argparse.ArgumentParser(
        prog="streamer",
        description="Train transformers that do not fit on the GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train the model of a config, its layers streamed",
        description="Train the model of a config with its layers streamed from host memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_config(train)
    train.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text or JSON lines, or directories of them, to train on",
    )
    train.add_argument("--save-every", metavar="N", help="save a checkpoint every N steps")
    train.add_argument("--keep", metavar="K", help="keep the last K checkpoints (2)")
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
    plan = commands.add_parser(
        "plan",
        help="bytes and seconds of a run, before anything is allocated",
        description="Tell what a step of a config's run takes on a machine: bytes by owner, seconds by lane, "
        "how both move with the batch, and what would make it fit. Allocates nothing. Exit code 2: it does "
        "not fit.",
    )
    _add_config(plan)
    plan.add_argument("--machine", metavar="NAME|FILE", help=MACHINE_HELP)
    plan.add_argument("--device-memory", metavar="BYTES", help="stream.device_memory, such as 16GiB")
    plan.add_argument("--host-memory", metavar="BYTES", help="of the machine, such as 128GiB")
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
    export.add_argument("--shard-size", default="5GB", metavar="BYTES", help="of a file; default: 5GB")
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine",
        description="Measure in less than a minute how fast this machine is at what a step consists of "
        "(copies each way and both at once, matrix products, activations, the host update, and each beside "
        "the others), and write it as a TOML file.",
    )
    calibrate.add_argument("config", nargs="?", help="measure at the shapes and in the dtype of this config")
    calibrate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; the value is TOML",
    )
    calibrate.add_argument("--device", help='"cuda" or "cpu"; default: CUDA where there is one')
    calibrate.add_argument("--output", default="machine.toml", metavar="FILE", help="default: machine.toml")
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", help="a TOML file, such as configs/gpt2-demo.toml")
    command.add_argument(
        "--model", metavar="DIR", help="a Hugging Face folder with the model and tokenizer to go on from"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the config; the value is TOML",
    )
