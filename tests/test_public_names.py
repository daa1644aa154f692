"""`import streamer` imports no library; a public name does, when it is first asked for."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import streamer

SOURCE = Path(streamer.__file__)
LAZY = [name for name in streamer.__all__ if name != "__version__"]


def run_python(program: str) -> None:
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=SOURCE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_streamer_imports_no_library() -> None:
    run_python("import sys, streamer; assert not sys.modules.keys() & {'torch', 'numba', 'numpy', 'tqdm'}")


def seen_by_type_checkers() -> dict[str, str]:
    (block,) = (
        node
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom)
        for alias in line.names:
            assert alias.asname == alias.name, "else it is private to a strict type checker"
            seen[alias.name] = str(line.module)
    return seen


def test_table_and_static_imports_and_all_agree() -> None:
    assert streamer.__all__ == sorted(set(streamer.__all__))
    assert sorted(streamer._HOMES) == LAZY
    assert seen_by_type_checkers() == streamer._HOMES


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no name had been asked for."""
    for name in LAZY:
        monkeypatch.delitem(vars(streamer), name, raising=False)


@pytest.mark.parametrize("name", LAZY)
def test_every_name_is_that_of_its_module(fresh: None, name: str) -> None:
    expected = getattr(importlib.import_module(streamer._HOMES[name]), name)
    assert getattr(streamer, name) is expected
    assert vars(streamer)[name] is expected, "asked for once"
    assert importlib.util.find_spec(f"streamer.{name}") is None, "the import of the submodule would hide it"
    assert pickle.loads(pickle.dumps(expected)) is expected


def test_names_are_listed_before_they_are_imported() -> None:
    run_python(
        "import sys, streamer; assert {*streamer.__all__, '__file__'} <= set(dir(streamer));"
        "assert 'torch' not in sys.modules"
    )


def test_every_way_to_import(fresh: None) -> None:
    import streamer.loss
    from streamer import AdamW, wrap
    from streamer import api as wrapping

    assert AdamW is streamer.AdamW
    assert wrapping.wrap is wrap is streamer.wrap
    assert streamer.loss.chunked_cross_entropy is streamer.chunked_cross_entropy
    names: dict[str, object] = {}
    exec("from streamer import *", names)
    assert {name: names[name] for name in streamer.__all__} == {
        name: getattr(streamer, name) for name in streamer.__all__
    }


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="^module 'streamer' has no attribute 'AdamX'$") as caught:
        streamer.AdamX  # noqa: B018
    assert caught.value.name == "AdamX" and caught.value.obj is streamer, "what Python guesses from"
    with pytest.raises(ImportError, match="cannot import name 'AdamX' from 'streamer'"):
        from streamer import AdamX  # noqa: F401
