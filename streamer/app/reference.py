"""All keys of a config in Markdown, made of their definitions: `streamer configs --keys`, which is also
configs/README.md.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from streamer.app.config import Config, toml_value

BEGINNING = """\
# Configs

A config is a TOML file with a section for each part of a run. `streamer configs` lists those that streamer
brings, and `streamer configs gpt2-demo --to mine.toml` copies one to edit. Any key can be changed on the
command line: `--set run.steps=100`; a string needs no quotes there. An unknown key, a missing one and a value
that a key cannot have are refused in one line. A run's own `config.toml` holds all keys as they were.

This page is what `streamer configs --keys` prints.
"""


def reference() -> str:
    """The page with a table for each section."""
    parts = [BEGINNING]
    for name, made in get_type_hints(Config).items():
        parts.append(f"## [{name}]\n\n{_sentence(made)}\n")
        hints = get_type_hints(made, include_extras=True)
        rows = [_row(item, *hints[item.name].__metadata__) for item in fields(made)]
        parts.append(
            "\n".join(["| Key | Default | May be | What it does |", "|---|---|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


def _sentence(made: type[Any]) -> str:
    """What a section is for, as its class says it."""
    text = " ".join((made.__doc__ or "").split()).replace("``", "`")
    sentence = text.partition(": ")[2]
    return sentence[:1].upper() + sentence[1:]


def _row(item: Field[Any], kind: Any, effect: str) -> str:
    cells = [f"`{item.name}`", _default(item), kind.words, effect]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(item: Field[Any]) -> str:
    if item.default_factory is not MISSING:
        return f"`{toml_value(item.default_factory())}`"
    if item.default is MISSING:
        return "needed"
    return "" if item.default is None else f"`{toml_value(item.default)}`"
