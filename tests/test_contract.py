"""Each line of docs/contract.md has a test that is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "contract.md"
LINK = re.compile(r"\[test\]\(\.\./(tests/[\w/]+\.py)#(\w+)\)")
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]


@cache
def _tests_of(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (PAGE.parent.parent / path).read_text(), re.M))


def lines() -> list[str]:
    """The points of what is promised or refused."""
    checked = [section for section in SECTIONS if not section.startswith("Not checked")]
    return [point for section in checked for point in re.split(r"^- ", section, flags=re.M)[1:]]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[:40])
def test_each_line_names_tests_that_are_there(line: str) -> None:
    links = LINK.findall(line)
    assert links
    for path, name in links:
        assert name in _tests_of(path), f"{path} has no {name}"
