"""Bytes by owner as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping


def byte_table(sections: Mapping[str, Mapping[str, int]]) -> str:
    """A row for each entry below the title of its section: its name, its bytes and, from 128 MiB on, GiB.
    Sections without entries are left out."""
    rows = {title: {f"  {name}": nbytes for name, nbytes in rows.items()} for title, rows in sections.items()}
    entries = {name: nbytes for section in rows.values() for name, nbytes in section.items()}
    width = max(map(len, [*rows, *entries]), default=0)
    digits = max((len(f"{nbytes:,}") for section in rows.values() for nbytes in section.values()), default=0)
    lines = []
    for title, section in rows.items():
        if section:
            lines.append(f"{title:{width}}  {'bytes':>{digits}}")
        for name, nbytes in section.items():
            gib = f"  {nbytes / (1 << 30):10.2f} GiB" if nbytes >= 1 << 27 else ""
            lines.append(f"{name:{width}}  {nbytes:>{digits},}{gib}")
    return "\n".join(lines)
