"""The command `streamer`."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.app.signals import exiting_on_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 (also where it was asked to stop and has saved), 1 where the run
    could not go on, 2 after an error in what it was given and for a plan that does not fit, 130 after Ctrl-C
    before the first step, 141 where nobody reads what it prints any more."""
    with exiting_on_interrupt():
        from streamer.app.commands import command_line, run

        arguments = command_line().parse_args(argv)
    return run(arguments)
