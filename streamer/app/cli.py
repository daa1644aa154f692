"""The command `streamer`."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.app.signals import exiting_on_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code.

    0: done, or stopped by a signal and saved. 1: the run could not go on. 2: an error in the arguments, the
    config or the data, or a plan that does not fit. 130: Ctrl-C before the first step. 141: the output is a
    pipe that its reader has closed.
    """
    with exiting_on_interrupt():
        from streamer.app.commands import command_line, run

        arguments = command_line().parse_args(argv)
    return run(arguments)
