"""Whatever is in a config file or in an override: a Config, or a ConfigError of one line."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from streamer.app.config import Config, ConfigError, dump_config, load_config
from tests.random_cases import examples

CONFIGS = {path.name: path for path in sorted(Path("configs").glob("*.toml"))}
KEYS = sorted(
    {
        f"{section}.{key}"
        for path in CONFIGS.values()
        for section, table in re.findall(r"^\[([\w.]+)\]\n([^\[]*)", path.read_text(), re.MULTILINE)
        for key in re.findall(r"^(\w+) =", table, re.MULTILINE)
    }
)
#: Far above what any of these takes, and below what one would wait for.
PATIENCE_SECONDS = 30.0


def check(text: bytes, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(text)
        begin = time.perf_counter()
        try:
            config = load_config(path, overrides)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1, repr(str(error))
        else:
            assert isinstance(config, Config)
            path.write_text(dump_config(config), encoding="utf-8", errors="surrogateescape")
            assert "nan" in repr(config) or load_config(path) == config
        assert time.perf_counter() - begin < PATIENCE_SECONDS


def nested(opening: str, inside: str, closing: str) -> st.SearchStrategy[str]:
    return st.integers(1, 3000).map(lambda depth: opening * depth + inside + closing * depth)


# TOML values, and what only looks like them
values = st.one_of(
    st.sampled_from(
        ["true", "-1", "0", "1.5", "nan", "-inf", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 5000]
        + ["''", '"a"', '"\\u0000"', '"\\n"', '"""\n\n"""', "[]", "[1, 2]", '["a", "b"]', "{}", "{a.b = 1}"]
        + ["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "", "=", "#", "'", "[", "{", "1\n2", "1\nx = 2"]
        + ['{"\\n" = 1}', "[{}, [[]]]", "0.1_0", "1__0", '"16GiB"', '"bfloat16"', '"step"', '"backward"']
    ),
    nested("[", "1", "]"),
    nested("{a = ", "1", "}"),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=20),
)
keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(
        ["run", "model.args", "optimizer", "x", "run.x", "", ".", "run.", '"a\nb".c', "run.name.x"]
    ),
    st.integers(1, 3000).map(lambda depth: "model.args" + ".a" * depth),
    st.text(max_size=10),
)
overrides = st.lists(
    st.one_of(st.builds("{}={}".format, keys, values), st.text(max_size=20)), min_size=1, max_size=3
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """One of the configs with some lines dropped, doubled, put in from nowhere, or given other values."""
    lines = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))].read_text().splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition(" = ")
        new = {
            "drop": lambda: [],
            "double": lambda: [lines[at]] * 2,  # noqa: B023 (called at once)
            "value": lambda: [f"{key} = {draw(values)}" if equals else lines[at]],  # noqa: B023
            "key": lambda: [f"{draw(keys)} = {draw(values)}"],
            "section": lambda: [f"[{draw(keys)}]"],
            "array": lambda: [f"[{lines[at]}]" if lines[at].startswith("[") else lines[at]],  # noqa: B023
        }
        lines[at : at + 1] = new[draw(st.sampled_from(sorted(new)))]()
        if not lines:
            break
    return "\n".join(lines).encode("utf-8", errors="surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """One of the configs with a piece of it replaced by other bytes, or cut off."""
    text = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))].read_bytes()
    begin = draw(st.integers(0, len(text)))
    end = draw(st.one_of(st.integers(begin, min(len(text), begin + 8)), st.just(len(text))))
    return text[:begin] + draw(st.binary(max_size=20)) + text[end:]


@given(st.one_of(mutated(), mutated(), damaged(), st.binary(max_size=200)))
@examples(400)
def test_a_file(text: bytes) -> None:
    check(text, [])


@given(st.sampled_from(sorted(CONFIGS)), overrides)
@examples(300)
def test_overrides(name: str, changes: list[str]) -> None:
    check(CONFIGS[name].read_bytes(), changes)
