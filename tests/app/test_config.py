"""streamer/app/config.py: what a file reads to, what it is written as, and each of its errors."""

from __future__ import annotations

import datetime
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.app.config import (
    Config,
    ConfigError,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StreamConfig,
    dump_config,
    load_config,
    quoted,
)
from streamer.app.run.build import import_factory, without_values
from tests.app.common import HOME, error_of

LEAST = """\
[run]
name = "tiny"
steps = 10
[model]
factory = "models.gpt2:GPT"
[data]
context = 8
batch_size = 2
[optimizer]
lr = 1
"""

LEAST_CONFIG = Config(
    run=RunConfig("tiny", 10, seed=0, eval_every=100, eval_batches=8, sample_tokens=256, out="runs"),
    model=ModelConfig("models.gpt2:GPT", args={}),
    data=DataConfig(context=8, batch_size=2, paths=(), val_fraction=0.05),
    optimizer=OptimizerConfig(1.0, (0.9, 0.95), 1e-8, 0.1, grad_clip=1.0, warmup_steps=0, min_lr=0.0),
    stream=StreamConfig(layers=None, num_slots=None, activations="recompute", dtype=None, device=None),
)

FULL = """\
[run]
name = "full-1.2"
steps = 7
seed = 3
eval_every = 4
eval_batches = 5
sample_tokens = 0
out = "else where"
save_every = 3
keep = 5
save_failure = "warn"
nonfinite = "back"
[model]
factory = "package.module:make"
init = "first_values"
[model.args]
n_layer = 3
scale = 1e-5
flag = false
names = ["a", "b\\n"]
"odd key" = {inner = {deep = [1, [2.5]]}, on = 2024-05-01, at = 2024-05-01T10:20:30Z}
word = "\\u007f \\" \\\\ é 🐍"
[data]
paths = ["src", "notes.txt"]
context = 16
batch_size = 4
val_fraction = 0.5
[stream]
layers = ["encoder.h", "decoder.h"]
num_slots = 3
activations = "keep"
micro_batch_size = 2
batch_dims = {mask = 0, x = "none", "encoder.h" = 1}
update = "backward"
dtype = "bfloat16"
device = "cpu"
host_threads = 1
compile = true
device_memory = "1.5GiB"
[memory]
host = "48 GiB"
disk = ["/nvme0", "nvme1/here"]
[optimizer]
lr = 2e-3
betas = [0, 0.999]
eps = 1e-6
weight_decay = 0
grad_clip = 0
state_dtype = "int8"
warmup_steps = 2
min_lr = 2e-3
"""

FULL_CONFIG = Config(
    run=RunConfig("full-1.2", 7, 3, 4, 5, 0, "else where", 3, 5, "warn", "back"),
    model=ModelConfig(
        "package.module:make",
        args={
            "n_layer": 3,
            "scale": 1e-5,
            "flag": False,
            "names": ["a", "b\n"],
            "odd key": {
                "inner": {"deep": [1, [2.5]]},
                "on": datetime.date(2024, 5, 1),
                "at": datetime.datetime(2024, 5, 1, 10, 20, 30, tzinfo=datetime.UTC),
            },
            "word": '\x7f " \\ é 🐍',
        },
        init="first_values",
    ),
    data=DataConfig(context=16, batch_size=4, paths=("src", "notes.txt"), val_fraction=0.5),
    optimizer=OptimizerConfig(2e-3, (0.0, 0.999), 1e-6, 0.0, 0.0, "int8", warmup_steps=2, min_lr=2e-3),
    stream=StreamConfig(
        ("encoder.h", "decoder.h"),
        3,
        "keep",
        2,
        {"mask": 0, "x": "none", "encoder.h": 1},
        "backward",
        "bfloat16",
        "cpu",
        1,
        True,
        "1.5GiB",
    ),
    memory=MemoryConfig("48 GiB", ("/nvme0", "nvme1/here")),
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``c.toml`` in the working directory, so that messages are the same on every machine."""
    monkeypatch.chdir(tmp_path)
    return Path("c.toml")


def fault(path: Path, text: str, *overrides: str) -> str:
    path.write_text(text, encoding="utf-8")
    return error_of(load_config, path, overrides)


@pytest.mark.parametrize(("text", "config"), [(LEAST, LEAST_CONFIG), (FULL, FULL_CONFIG)])
def test_a_file_reads_to_a_config_and_back(path: Path, text: str, config: Config) -> None:
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == config
    assert isinstance(load_config(path).optimizer.lr, float)  # the least file has an integer
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_dump_is_the_whole_config(path: Path) -> None:
    assert dump_config(LEAST_CONFIG) == (
        '[run]\nname = "tiny"\nsteps = 10\nseed = 0\neval_every = 100\neval_batches = 8\n'
        'sample_tokens = 256\nout = "runs"\nsave_every = 0\nkeep = 2\nsave_failure = "stop"\n'
        'nonfinite = "skip"\nsave_wait = 60\nkeep_best = false\n'
        "patience = 0\nreport = []\nepochs = 0\n\n"
        '[model]\nfactory = "models.gpt2:GPT"\nargs = {}\nquantize = "none"\nquantize_skip = []\n\n'
        "[data]\ncontext = 8\nbatch_size = 2\npaths = []\nval_fraction = 0.05\nval_paths = []\n"
        "packing = true\naccumulate = 1\n\n"
        "[optimizer]\nlr = 1.0\nbetas = [0.9, 0.95]\neps = 1e-08\nweight_decay = 0.1\ngrad_clip = 1.0\n"
        'state_dtype = "float32"\n'
        'warmup_steps = 0\nmin_lr = 0.0\nschedule = "cosine"\n\n'
        '[stream]\nactivations = "recompute"\nupdate = "step"\ncompile = false\n'
        "gather_weights = false\n"
    )


def test_overrides_replace_what_the_file_says(path: Path) -> None:
    path.write_text(LEAST)
    overrides = ["run.steps=20", 'run.name = "other"', "stream.num_slots=4", "model.args.sizes={a=[1,2]}"]
    assert load_config(path, overrides) == Config(
        run=RunConfig("other", 20),
        model=ModelConfig("models.gpt2:GPT", {"sizes": {"a": [1, 2]}}),
        data=DataConfig(8, 2),
        optimizer=OptimizerConfig(1.0),
        stream=StreamConfig(num_slots=4),
    )


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("me", "me"),
        (" runs/2026-11-23 ", "runs/2026-11-23"),
        ("~/my runs", "~/my runs"),
        ("10GB", "10GB"),
        ('"quoted"', "quoted"),
        ("'it''", None),
    ],
)
def test_a_string_needs_no_quotes(path: Path, given: str, value: str | None) -> None:
    path.write_text(LEAST)
    if value is None:
        assert "not a TOML value; quote a string: " in fault(path, LEAST, f"run.out={given}")
        return
    assert load_config(path, [f"run.out={given}"]).run.out == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.state_dtype", "int8"),
        ("run.out", 'it\'s \\here; # "so"'),
        ("run.name", "1.5"),
        ("stream.activations", ("keep", "recompute")),
        ("memory.disk", "/a b"),
        ("model.args", {"n": [1, {"x": "$HOME"}]}),
        ("optimizer.lr", 1e-5),
        ("stream.compile", True),
    ],
)
def test_what_is_advised_can_be_pasted_into_a_shell(path: Path, key: str, value: Any) -> None:
    path.write_text(LEAST)
    [given] = shlex.split(quoted(key, value))
    section, name = key.split(".")
    assert getattr(getattr(load_config(path, [given]), section), name) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=3", "override 'steps=3' must be section.key=value, such as run.steps=100"),
        ("run.steps", "override 'run.steps' must be section.key=value, such as run.steps=100"),
        ("run.name=[me", "override 'run.name=[me': not a TOML value; quote a string: 'run.name=\"[me\"'"),
        ("run.seed=1\nout=2", r"override 'run.seed=1\nout=2': not a TOML value; "
         r"""quote a string: 'run.seed="1\nout=2"'"""),
        ("run.steps=often", 'c.toml: run.steps must be an integer of 0 or more, not "often" '
         "(with run.steps=often)"),
        ("run.name.first=1", "override 'run.name.first=1': name is not a table; set name itself"),
        ("run.steps=0", "c.toml: run.steps is missing: give an integer of 1 or more, or run.epochs "
         "(with run.steps=0)"),
        ("run.step=1", "c.toml: unknown key 'step' in [run]; did you mean 'steps'? (with run.step=1)"),
        ("rum.steps=1", "c.toml: unknown section [rum]; did you mean 'run'? (with rum.steps=1)"),
    ],
)  # fmt: skip
def test_a_bad_override_is_named(path: Path, override: str, message: str) -> None:
    assert fault(path, LEAST, override) == message


#: By what a key must be: keys and values that are not.
WRONG = {
    "an integer of 1 or more": [
        *("run.eval_every = 0", "run.eval_batches = 0", "run.keep = 0"),
        *("data.context = 0", "data.batch_size = 0", "stream.host_threads = 0", "data.accumulate = 0"),
    ],
    "an integer of 0 or more": [
        *(f"run.steps = {value}" for value in ("true", "10.0", '"10"', "-1")),
        *("run.seed = false", "run.seed = -1", "run.sample_tokens = -1", "run.save_every = -1"),
    ],
    "a number of steps, or a share of them in (0, 1)": [
        *("optimizer.warmup_steps = -1", "optimizer.warmup_steps = 1.5", "optimizer.decay_steps = true"),
    ],
    'an integer of 1 or more, or "auto"': ["stream.num_slots = 0", 'stream.micro_batch_size = "all"'],
    "a string that is not empty": ["run.out = 1", 'run.out = ""', "stream.device = 0"],
    "a string that can name a folder": ['run.name = "a/b"', 'run.name = ".."'],
    "a string that can name a method": ['model.init = "a.b"'],
    'a module and a callable in it, such as "models.gpt2:GPT"': [
        *('model.factory = "GPT"', 'model.factory = "models/gpt2.py:GPT"'),
    ],
    "a table": ["model.args = [1]"],
    'a string of a number and its unit, such as "16GiB"': ["memory.host = 48", 'memory.host = "48 Gib"'],
    "a folder, or an array of folders on different drives, none empty": [
        *('memory.disk = ""', "memory.disk = []", 'memory.disk = ["/a", 1]', "memory.disk = true"),
    ],
    'a table from names of arguments, or paths or globs of lists of layers, to integers, or "none"': [
        'stream.batch_dims = {x = "one"}',
    ],
    "an array of strings, none empty": [
        *('data.paths = "src"', 'data.paths = ["a", 1]', 'data.paths = [""]'),
    ],
    "a string or an array of strings, none empty": ["stream.layers = {a = 1}", 'stream.layers = [""]'],
    "a string, or an array of one for each layer": ["stream.activations = [1]"],
    '"float32", "bfloat16" or "float16"': ['stream.dtype = "int8"'],
    '"float32", "bfloat16" or "int8"': ['optimizer.state_dtype = "float16"'],
    '"step" or "backward"': ['stream.update = "never"'],
    '"stop" or "warn"': ['run.save_failure = "skip"'],
    '"skip", "stop" or "back"': ['run.nonfinite = "warn"'],
    "a number above 0": [
        *(f"optimizer.lr = {value}" for value in ("true", '"1e-3"', "0", "nan", "inf")),
        "optimizer.eps = 0.0",
    ],
    "a number of 0 or more": [
        *("optimizer.weight_decay = -1", "optimizer.grad_clip = -1", "optimizer.grad_clip = inf"),
        "optimizer.min_lr = -1",
    ],
    '"cosine", "linear", "constant" or "wsd"': ['optimizer.schedule = "cosinus"'],
    "a number in (0, 1)": ["data.val_fraction = 0", "data.val_fraction = 1.0"],
    "an array of two numbers in [0, 1)": [
        *(f"optimizer.betas = {value}" for value in ("0.9", "[0.9, true]", "[0.9, 1]", "[0.9]")),
    ],
}


def with_line(line: str) -> str:
    """The least file with a key, ``section.key = value``, in place of its own."""
    section, _, entry = line.partition(".")
    name = entry.split(" = ")[0]
    lines = [line for line in LEAST.splitlines() if not line.startswith(f"{name} =")]
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    lines.insert(lines.index(f"[{section}]") + 1, entry)
    return "\n".join(lines)


@pytest.mark.parametrize(("words", "line"), [(words, line) for words in WRONG for line in WRONG[words]])
def test_a_bad_value_is_named_with_what_it_must_be(path: Path, words: str, line: str) -> None:
    key, _, value = line.partition(" = ")
    assert fault(path, with_line(line)) == f"c.toml: {key} must be {words}, not {value}"


FACTORY = 'a module and a callable in it, such as "models.gpt2:GPT"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_line("optimizer.min_lr = 2.0"), "optimizer.min_lr is above optimizer.lr, from which it decays"),
        (
            with_line("optimizer.learning_rate = 1"),
            "unknown key 'learning_rate' in [optimizer]; there are: lr, betas, eps, weight_decay, grad_clip, "
            "state_dtype, warmup_steps, min_lr, schedule, decay_steps",
        ),
        (with_line("stream.slots = 2"), "unknown key 'slots' in [stream]; did you mean 'num_slots'?"),
        (LEAST.replace('name = "tiny"\n', ""), "run.name is missing: give a string that can name a folder"),
        (
            LEAST.replace("steps = 10\n", ""),
            "run.steps is missing: give an integer of 1 or more, or run.epochs",
        ),
        (
            LEAST.replace('factory = "models.gpt2:GPT"\n', ""),
            f"model.factory is missing: give {FACTORY}; or a pretrained model's folder as model.pretrained "
            "(--model)",
        ),
        (LEAST.replace("context = 8\n", ""), "data.context is missing: give an integer of 1 or more"),
        (LEAST.replace("batch_size = 2\n", ""), "data.batch_size is missing: give an integer of 1 or more"),
        (LEAST.replace("[optimizer]\nlr = 1\n", ""), "optimizer.lr is missing: give a number above 0"),
        (f"{LEAST}[optimiser]\nlr = 1\n", "unknown section [optimiser]; did you mean 'optimizer'?"),
        (
            f"{LEAST}[wandb]\n",
            "unknown section [wandb]; there are: run, model, data, optimizer, stream, memory, lora, sample",
        ),
        (f"stream = 2\n{LEAST}", "stream must be a section: write [stream] and its keys below"),
        ("[run]\nname = tiny\n", "not TOML in UTF-8, correct it there: Invalid value (at line 2, column 8)"),
    ],
)
def test_what_is_missing_unknown_or_does_not_go_together_is_named(
    path: Path, text: str, message: str
) -> None:
    assert fault(path, text).removesuffix("; lower it") == f"c.toml: {message}"


def test_a_file_that_cannot_be_read_is_named_with_those_beside_it(path: Path) -> None:
    missing = "c.toml: No such file or directory; TOML files in its folder: "
    assert error_of(load_config, path) == f"{missing}none"
    for name in ("b.toml", "a.toml", "a.txt"):
        Path(name).touch()
    assert error_of(load_config, str(path)) == f"{missing}a.toml, b.toml"
    path.write_bytes(b"\xff")
    assert error_of(load_config, path).startswith(
        "c.toml: not TOML in UTF-8, correct it there: 'utf-8' codec"
    )
    path.unlink()
    path.mkdir()
    (path / "d.toml").touch()
    assert error_of(load_config, path) == f"c.toml: Is a directory; TOML files in it: {path / 'd.toml'}"


@pytest.fixture
def user_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory, which is not on the import path yet."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    Path("users_models.py").write_text("def Tiny(size): return size\nLARGE = 3\n")
    Path("needs_more.py").write_text("import not_installed_anywhere\n")
    for name in ("users_models", "needs_more"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "users_models"


def test_a_factory_comes_from_the_working_directory(user_module: str) -> None:
    assert import_factory(f"{user_module}:Tiny")(5) == 5
    before = list(sys.path)
    import_factory(f"{user_module}:Tiny")
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "users_models",
            "the factory must be a module and a callable in it, "
            "such as \"models.gpt2:GPT\", not 'users_models'",
        ),
        ("users_model:Tiny", "users_model:Tiny: no module 'users_model' in {cwd} or installed"),
        ("no.such:Tiny", "no.such:Tiny: no module 'no' in {cwd} or installed"),
        ("json.no:Tiny", "json.no:Tiny: no module 'json.no' in {cwd} or installed"),
        (
            "users_models:Tinny",
            "users_models:Tinny: users_models has no callable 'Tinny'; did you mean 'Tiny'?",
        ),
        ("users_models:LARGE", "users_models:LARGE: users_models has no callable 'LARGE'; there are: Tiny"),
    ],
)
def test_a_factory_that_is_not_there_is_named(user_module: str, spec: str, message: str) -> None:
    assert error_of(import_factory, spec) == message.format(cwd=Path.cwd())
    # an import that fails inside the user's module is the module's own error
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        import_factory("needs_more:Tiny")


@pytest.mark.parametrize("file", sorted((HOME / "configs").glob("gpt2-*.toml")), ids=str)
def test_a_config_of_the_project_builds_its_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent.parent)
    config = load_config(file)
    with torch.device("meta"):
        model = import_factory(config.model.factory)(**config.model.args)
    assert isinstance(model.get_submodule(config.stream.layers), torch.nn.ModuleList)
    assert model(torch.zeros(1, config.data.context, dtype=torch.long, device="meta")).dim() == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.warmup_steps=10"],
            "warmup_steps = 10 does not end within the run's 10 steps: lower it, to",
        ),
        (
            ["optimizer.schedule=constant", "optimizer.min_lr=0.1"],
            'optimizer.schedule = "constant" never falls to optimizer.min_lr = 0.1: set that to 0',
        ),
        (
            ["optimizer.decay_steps=3"],
            'optimizer.decay_steps is of optimizer.schedule = "wsd" and does nothing with "cosine": leave it',
        ),
        (
            ["optimizer.schedule=wsd", "optimizer.warmup_steps=0.5", "optimizer.decay_steps=6"],
            "warmup_steps = 0.5 and optimizer.decay_steps = 6 are together more than the run's 10 steps",
        ),
        (
            ["data.accumulate=3"],
            "data.accumulate = 3 passes are more than the sequences of a step, data.batch_size = 2: ",
        ),
        (
            ["data.accumulate=2", "stream.update=backward", "optimizer.grad_clip=0"],
            'data.accumulate = 2 adds up gradients, and stream.update = "backward" keeps none: use stream.',
        ),
    ],
)
def test_what_contradicts_is_named(path: Path, overrides: list[str], message: str) -> None:
    assert message in fault(path, LEAST, *overrides)


def test_nothing_is_drawn_for_a_model_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would import its compiler for it. What has values is drawn."""
    drawn: list[torch.Tensor] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "normal" in str(func):
                drawn.append(args[0])
            return func(*args, **(kwargs or {}))

    def factory(size: int) -> nn.Module:
        model = nn.Linear(size, size)
        assert nn.init.normal_(model.weight, std=0.1) is model.weight
        model.constants = nn.init.normal_(tensor=torch.zeros(4, device="cpu"))
        return model

    monkeypatch.setattr("streamer.app.run.build.import_factory", lambda name: factory)
    with Sees():
        model = without_values(ModelConfig("a:b", args={"size": 3}))
    assert model.weight.is_meta and model.weight.shape == (3, 3)
    assert len(drawn) == 1 and drawn[0] is model.constants and model.constants.abs().sum() > 0


def test_an_error_says_what_was_added_to_it() -> None:
    error = ValueError("it fails")
    error.add_note("micro_batch_size: the batch was cut: wrap with batch_dims={'layers': None}")
    assert str(ConfigError.of("[stream]", error)) == (
        "[stream]: it fails; stream.micro_batch_size: the batch was cut: wrap with "
        "stream.batch_dims={'layers': None}"
    )
