"""The command `streamer train`, run as a user runs it."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import streamer
from models.gpt2 import GPT
from streamer.app.cli import main
from streamer.app.config import OptimizerConfig, load_config
from streamer.app.data.load import load_data
from streamer.app.data.splits import IGNORED, TokenData
from streamer.app.run.build import build_model, build_optimizer, import_factory
from streamer.app.run.loop import ALONE, Loop, TokenLoss, step_on
from streamer.app.run.run_folder import Lanes, summary_of, summary_table
from streamer.app.run.samples import continue_texts
from streamer.app.run.schedule import schedule
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import BY_GPU, MACHINES, peak_flops
from tests.app.common import HOME, logged, refused, sets

CONFIG = """
[run]
name = "tiny"
steps = 6
eval_every = 3
eval_batches = 1
sample_tokens = 8
out = "{out}"
[model]
factory = "models.gpt2:GPT"
args = {{ vocab_size = 256, block_size = 16, n_layer = 3, n_head = 2, n_embd = 16 }}
[data]
context = 16
batch_size = 4
paths = ["{text}"]
[stream]
layers = "transformer.h"
device = "cpu"
[optimizer]
lr = 1e-2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HOME)
    text = tmp_path / "text"
    text.mkdir()
    for name in "abc":
        (text / name).write_text("to be or not to be, that is the question\n" * 40)
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(out=tmp_path / "runs", text=text))
    return path


def test_a_run_leaves_its_files_and_prints_its_table(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--set", "run.steps=8"]) == 0
    run = tmp_path / "runs" / "tiny"
    assert load_config(run / "config.toml") == load_config(config, ["run.steps=8"])
    assert [line["step"] for line in logged(run, "loss")] == list(range(1, 9))
    assert [line["step"] for line in logged(run, "val_loss")] == [0, 3, 6, 8]
    trace = json.loads((run / "trace.json").read_text())
    rows = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert rows == [lane.name for lane in Lane]
    assert {event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1, 2, 3}
    summary = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["last_val_loss"] < summary["first_val_loss"]
    printed = capsys.readouterr().out
    for words in (
        "byte frequencies alone give",
        "the device (cpu) holds 2 layers at a time",
        "A sample, after the first 64 bytes",
        f"parameters                {summary['parameters']:,}",
        "host bytes per parameter  16.",
        "peak on the device",
        "exposed s",
    ):
        assert words in printed


@pytest.mark.parametrize(
    "options",
    [
        ["stream.dtype='bfloat16'", "optimizer.state_dtype='int8'", "stream.host_threads=1"],
        ["stream.update='backward'", "optimizer.grad_clip=0"],
        ["model.init='init_weights'", "stream.device_memory='64 MiB'"],
    ],
)
def test_a_run_with_other_ways_to_update(options: list[str], config: Path, tmp_path: Path) -> None:
    assert main(["train", str(config), *sets(*options)]) == 0
    values = logged(tmp_path / "runs" / "tiny")
    assert values[-1]["val_loss"] < values[0]["val_loss"]
    assert any("grad_norm" in value for value in values) == ("stream.update='backward'" not in options)


def test_the_validation_loss_is_the_mean_of_all_tokens_that_are_learnt(config: Path) -> None:
    """Batches have different numbers of them."""
    loaded = load_config(config, ["run.eval_batches=4"])
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (600,), generator=draws)
    targets = tokens.where(torch.rand(600, generator=draws) < torch.linspace(0.02, 1, 600), IGNORED)
    data = TokenData(train=tokens, val=tokens, targets={"train": targets, "val": targets})
    model = build_model(loaded)
    try:
        optimizer = build_optimizer(loaded.optimizer, model, skip_nonfinite=True)
        loss = Loop(loaded, model, optimizer, data).validate()
        batches = data.val_batches(4, 4, 16)
        assert len({int((wanted != IGNORED).sum()) for _, wanted in batches}) == 4
        with torch.no_grad():
            logits = torch.cat([model(given) for given, _ in batches])
        wanted = torch.cat([wanted for _, wanted in batches])
        expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    finally:
        streamer.unwrap(model)


@pytest.fixture
def in_fp16(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a run whose first steps overflow, and whose scale grows again soon."""
    made = partial(torch.amp.GradScaler, init_scale=2.0**22, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", made)
    return ["stream.dtype='float16'", "run.steps=14", "run.eval_every=20", "optimizer.grad_clip=0.5"]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the reference's own, of a first step that is skipped
def test_fp16_is_trained_as_by_pytorch_with_a_scaler(
    config: Path, tmp_path: Path, in_fp16: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference: a plain model in fp16, torch.optim.AdamW on its fp32 masters, torch.amp.GradScaler."""
    loaded = load_config(config, in_fp16)
    torch.manual_seed(loaded.run.seed)
    masters = import_factory("models.gpt2:GPT")(**loaded.model.args)
    model = copy.deepcopy(masters).half()
    given = loaded.optimizer
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(given, loaded.run.steps))
    scaler, crops = torch.amp.GradScaler("cpu"), torch.Generator().manual_seed(loaded.run.seed)
    data, losses, scales = load_data(loaded), [], []
    for _ in range(loaded.run.steps):
        tokens, targets = data.batch("train", 4, 16, crops)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        scaler.scale(loss).backward()
        for master, param in zip(masters.parameters(), model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), given.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                param.copy_(master)
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    falls = sum(now < before for before, now in pairwise([2.0**22, *scales]))
    assert 1 <= falls < 8 and any(now > before for before, now in pairwise(scales)), scales
    assert main(["train", str(config), *sets(*in_fp16)]) == 0
    found = [line["loss"] for line in logged(tmp_path / "runs" / "tiny", "loss")]
    assert found == pytest.approx(losses, 2e-3)
    printed = capsys.readouterr().out
    assert printed.count("skipped, a gradient was not finite with the loss times ") == falls
    assert "with the loss times 4,194,304; from here on it is 2,097,152" in printed


def test_a_run_in_fp16_goes_on_with_its_scale(config: Path, tmp_path: Path, in_fp16: list[str]) -> None:
    assert main(["train", str(config), *sets(*in_fp16, "run.save_every=8", "run.keep=9")]) == 0
    run = tmp_path / "runs" / "tiny"
    losses = [line["loss"] for line in logged(run, "loss")]
    shutil.rmtree(run / "checkpoints" / "step-0000014")
    assert main(["train", str(run / "config.toml"), "--resume", str(run)]) == 0
    assert [line["loss"] for line in logged(run, "loss")] == losses


def test_texts_are_written_after_prompts_and_training_does_not_see_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropout = "model.args.dropout=0.2"
    given = ["sample.prompts=['to be', 'that is the question, to']", "sample.every=4", "sample.tokens=5"]
    assert main(["train", str(config), *sets(dropout)]) == 0
    assert main(["train", str(config), *sets(dropout, "run.save_every=4", *given)]) == 0
    plain, run = tmp_path / "runs" / "tiny", tmp_path / "runs" / "tiny-2"
    losses = [[line["loss"] for line in logged(folder, "loss")] for folder in (plain, run)]
    assert losses[0] == losses[1]
    written = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    prompts = ["to be", "that is the question, to"]
    assert [(line["step"], line["prompt"]) for line in written] == [(n, p) for n in (4, 6) for p in prompts]
    assert all(line["text"] for line in written) and not (plain / "samples.jsonl").exists()
    assert f"step     4: after 'to be': {written[0]['text']}" in capsys.readouterr().out
    # a run that goes on writes the same again
    shutil.rmtree(run / "checkpoints" / "step-0000006")
    assert main(["train", str(run / "config.toml"), "--resume", str(run)]) == 0
    assert [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()] == written


class Notes:
    """In place of TensorBoard's writer and of a run of wandb: what they are given, by step."""

    def __init__(self, *where: str, **options: Any) -> None:
        self.where, self.options, self.ended = where, options, False
        self.values: dict[int, dict[str, float]] = defaultdict(dict)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[step][name] = value

    def log(self, values: dict[str, float]) -> None:
        self.values[int(values["step"])].update(values)

    def flush(self) -> None: ...

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def close(self) -> None:
        self.ended = True

    finish = close


@pytest.mark.parametrize(
    ("name", "module", "attribute"),
    [("tensorboard", "torch.utils.tensorboard", "SummaryWriter"), ("wandb", "wandb", "init")],
)
def test_other_reports_get_the_values_of_metrics(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, attribute: str
) -> None:
    made: list[Notes] = []

    def make(*where: str, **options: Any) -> Notes:
        made.append(Notes(*where, **options))
        return made[-1]

    library = ModuleType(module)
    setattr(library, attribute, make)
    monkeypatch.setitem(sys.modules, module, library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    report = f"run.report=['{name}']"
    assert main(["train", str(config), *sets(report, "run.save_every=3")]) == 0
    run = tmp_path / "runs" / "tiny"
    expected: dict[int, dict[str, float]] = defaultdict(dict)
    for line in logged(run):
        expected[line["step"]].update(line)
    shutil.rmtree(run / "checkpoints" / "step-0000006")
    assert main(["train", str(config), "--resume", str(run), *sets(report, "run.save_every=3")]) == 0
    first, again = made
    assert first.ended and again.ended
    assert {step: {"step": step, **values} for step, values in first.values.items()} == expected
    assert [*again.values] == [4, 5, 6] and not (run / "checkpoints" / "best.json").exists()
    if name == "tensorboard":
        assert first.where == again.where == (str(run / "tensorboard"),)
        assert (first.options["purge_step"], again.options["purge_step"]) == (None, 4)
    else:
        assert first.options["id"] == again.options["id"] and first.options["project"] == "streamer"
        assert first.options["config"]["run"]["steps"] == 6


def test_a_report_that_fails_does_not_end_the_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Notes):
        def log(self, values: dict[str, float]) -> None:
            raise OSError(28, "No space left on device")

        def finish(self) -> None:
            raise RuntimeError("it has failed before")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Fails))
    assert main(["train", str(config), *sets("run.report=['wandb']")]) == 0
    assert logged(tmp_path / "runs" / "tiny", "loss")[-1]["step"] == 6
    assert capsys.readouterr().out.count("run.report: wandb: ") == 1


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_report_whose_library_is_missing_is_refused_before_the_run(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    module: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = refused(capsys, "train", str(config), *sets(f"run.report=['{name}']", "data.paths=['no']"))
    assert f"run.report: {name} cannot be imported (" in error
    assert error.endswith(f": pip install '.[{name}]'")
    assert not (tmp_path / "runs").exists()


def test_what_is_drawn_comes_from_the_most_likely_tokens(config: Path) -> None:
    """Each text is that of a plain model which sees it alone."""
    torch.manual_seed(0)
    model = import_factory("models.gpt2:GPT")(**load_config(config).model.args)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(8)  # probabilities that differ
    texts = [[7], [1, 2, 3, 4], [9] * 20]
    written = continue_texts(model, texts, tokens=6, context=16, temperature=0.5, top_k=3, seed=5)
    assert model.training
    model.eval()
    for text, found in zip(texts, written, strict=True):
        draws, expected = torch.Generator().manual_seed(5), [*text]
        for _ in range(6):
            with torch.no_grad():
                logits = model(torch.tensor([expected[-16:]]))[0, -1]
            values, tokens = logits.topk(3)
            odds = torch.zeros(256).scatter(0, tokens, torch.softmax(values / 0.5, 0))
            expected.append(int(torch.multinomial(odds, 1, generator=draws)))
        assert found == expected[len(text) :]


def test_the_learning_rate_rises_and_falls_as_the_config_says(config: Path, tmp_path: Path) -> None:
    options = ["run.steps=12", "optimizer.warmup_steps=4", "optimizer.min_lr=1e-3", "run.eval_every=20"]
    factor = schedule(load_config(config, options).optimizer, 12)
    falling = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    expected = [0.25, 0.5, 0.75, 1.0, *falling]
    assert [factor(step) for step in range(13)] == pytest.approx(expected, rel=1e-12)
    assert [factor(step) for step in (13, 100)] == pytest.approx([0.1, 0.1])
    assert main(["train", str(config), *sets(*options)]) == 0
    rates = [line["lr"] for line in logged(tmp_path / "runs" / "tiny", "loss")]
    # of the step that comes
    assert rates == pytest.approx([0.01 * rate for rate in expected[1:]])


@pytest.mark.parametrize(
    ("shape", "library", "options"),
    [
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("constant", "constant_with_warmup", {}),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear"}),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 25, "decay_type": "linear"}),
    ],
)
def test_schedules_are_those_of_transformers(shape: str, library: str, options: dict[str, Any]) -> None:
    """After the warm-up, in which the first step of theirs has a rate of 0."""
    given = OptimizerConfig(
        1e-3,
        schedule=shape,
        warmup_steps=0.1,
        decay_steps=0.5 if options.get("num_decay_steps") == 25 else None,
        min_lr=1e-4 if shape == "wsd" else 0.0,
    )
    factor = schedule(given, 50)
    if shape == "wsd":
        options = {**options, "min_lr_ratio": 0.1}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    rates = transformers.get_scheduler(
        library, optimizer, num_warmup_steps=5, num_training_steps=50, scheduler_specific_kwargs=options
    )
    for step in range(50):
        expected = (step + 1) / 5 if step < 5 else rates.get_last_lr()[0] / 1e-3
        assert factor(step) == pytest.approx(expected, rel=1e-12), step
        optimizer.step()
        rates.step()


@pytest.mark.parametrize("accumulate", [2, 3, 4])
@pytest.mark.parametrize("micro", [None, 1])
def test_a_batch_in_several_passes_is_the_same_batch(
    config: Path, tmp_path: Path, accumulate: int, micro: int | None
) -> None:
    """Also where passes differ in how many of their tokens are learnt."""
    in_passes = [f"data.accumulate={accumulate}", *([f"stream.micro_batch_size={micro}"] if micro else [])]
    for name, options in (("whole", []), ("passes", in_passes)):
        assert main(["train", str(config), *sets(f"run.name={name}", *options)]) == 0
    whole, parts = (logged(tmp_path / "runs" / name, "loss") for name in ("whole", "passes"))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in parts] == pytest.approx([line[key] for line in whole], rel=2e-4), key


@pytest.mark.parametrize(("rows", "count", "sizes"), [(4, 3, [2, 1, 1]), (16, 4, [4] * 4), (2, 4, [1, 1])])
def test_passes_are_as_many_as_were_asked_for(rows: int, count: int, sizes: list[int]) -> None:
    tokens = torch.arange(rows)[:, None]
    parts = ALONE.parts((tokens, tokens + 1), count)
    assert [len(x) for x, _ in parts] == sizes
    assert torch.equal(torch.cat([y for _, y in parts]), tokens + 1)


def test_passes_share_one_mean() -> None:
    """A pass with little to learn weighs as little as it has, unlike in a mean of the passes' means."""
    torch.manual_seed(0)
    plain = GPT(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=16)
    model = streamer.wrap(copy.deepcopy(plain), layers="transformer.h", device="cpu")
    tokens, targets = torch.randint(256, (2, 4, 16)).unbind()
    targets[0, 1:] = targets[2] = IGNORED
    given = load_config(
        HOME / "configs/gpt2-demo.toml",
        ["data.batch_size=4", "data.accumulate=3", "optimizer.grad_clip=0", "optimizer.weight_decay=0.0"],
    )
    optimizer = build_optimizer(given.optimizer, model)
    measured = step_on(given, model, optimizer, TokenLoss(model), (tokens, targets))
    loss = torch.nn.functional.cross_entropy(
        plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert measured["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    assert measured["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
    streamer.unwrap(model)


def test_a_step_tells_its_share_of_the_peak_of_a_gpu_that_is_known(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peak_flops("NVIDIA GeForce RTX 4090", torch.bfloat16) == 165.2e12
    assert peak_flops("NVIDIA GeForce RTX 4090", torch.float32) == 82.6e12
    assert peak_flops("Another GPU", torch.float32) is None
    assert {id(machine) for machine in BY_GPU.values()} <= {id(machine) for machine in MACHINES.values()}
    assert main(["train", str(config), "--set", "run.name=cpu"]) == 0
    assert not logged(tmp_path / "runs" / "cpu", "mfu")
    monkeypatch.setattr("streamer.app.train.peak_of", lambda model: 1e12)
    assert main(["train", str(config)]) == 0
    lines = logged(tmp_path / "runs" / "tiny", "mfu")
    parameters = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["parameters"]
    assert len(lines) == 6
    for line in lines:
        assert line["mfu"] == pytest.approx(6 * parameters * line["tokens_per_second"] / 1e12)


def test_the_optimizer_is_that_of_the_config(config: Path) -> None:
    options = {"lr": 0.03, "betas": [0.7, 0.8], "eps": 1e-4, "weight_decay": 0.3}
    loaded = load_config(config, [f"optimizer.{name}={value}" for name, value in options.items()])
    model = build_model(loaded)
    try:
        optimizer = build_optimizer(loaded.optimizer, model, skip_nonfinite=True)
        assert {name: optimizer.param_groups[0][name] for name in options} == options | {"betas": (0.7, 0.8)}
    finally:
        streamer.unwrap(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.paths=['no/such/file']"], "no/such/file: no such file or folder"),
        # before data are looked for
        (["data.batch_size=1000000000", "data.paths=['no']"], "are 16,000,000,000 tokens a step, and 67,"),
        (["data.context=1000000000", "data.paths=['no']"], "are 4,000,000,000 tokens a step, and 67,108,8"),
        (["data.batch_size=4000000", "stream.micro_batch_size=2"], "into 2,000,000 slices, and 16,384 are"),
        (["stream.layers='transformer.g'"], "stream.layers='transformer.g': there is no such module."),
        (["stream.activations='keeep'"], "[stream]: stream.activations='keeep' is unknown: use one of"),
        (["optimizer.state_dtype='int8'"], "[optimizer]: moments in int8 need bfloat16 parameters"),
        (["stream.update='backward'"], "set optimizer.grad_clip = 0"),
        (
            ["stream.update='backward'", "optimizer.grad_clip=0", "stream.dtype='float16'"],
            'a gradient in fp16 has overflowed: set stream.dtype = "bfloat16"',
        ),
        (["stream.host_threads=1000000"], "stream.host_threads=1000000: it must be an integer from 1"),
        (["stream.device_memory='much'"], "stream.device_memory must be a string of a number and its unit, "),
        (["sample.prompts=[[]]"], "sample.prompts must be an array of texts, none empty, and of chats: [{r"),
        (["sample.tokens=3"], "[sample] without sample.prompts does nothing: give some"),
        (["sample.prompts=['a']", "sample.chat=true"], "read without a tokenizer: set data.tokenizer"),
        (["stream.compile=1"], "stream.compile must be true or false, not 1"),
        (["model.init='initialise'"], "model.init = 'initialise': GPT has no such method"),
        (["model.args.n_layers=3"], "model.factory models.gpt2:GPT with these args: "),
        (["model.factory='json:loads'", "model.args={s='1'}"], "it returns a int, not an nn.Module"),
        (["data.context=4000"], "split has"),
        (["data.context=17"], "a sequence of 17 tokens is longer than block_size=16"),
        (["model.args.vocab_size=100"], "(tokens 0 to 255): index out of range"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    config: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "train", str(config), *sets(*settings))
    assert not (config.parent / "runs").exists(), "a run that has not begun leaves nothing"


def test_options_stand_for_keys_of_the_config(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--save-every", "2", "--keep", "1", "--data", str(tmp_path / "text" / "a")]
    assert main(["train", str(config), *sets("run.steps=3", "run.keep=3"), *options]) == 0
    changed = ["run.steps=3", "run.save_every=2", "run.keep=1", f"data.paths=['{tmp_path}/text/a']"]
    assert load_config(tmp_path / "runs" / "tiny" / "config.toml") == load_config(config, changed)
    error = refused(capsys, "train", str(config), "--save-every", "often")
    assert 'run.save_every must be an integer of 0 or more, not "often"' in error
    error = refused(capsys, "train", str(config), "--model", "")
    assert "tiny.toml: model.pretrained must be a string that is not empty" in error


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [
        # the run's plan asks twice how much is free, wrap as often, for the device too, then the optimizer
        (2, "[stream]: not enough memory for the model: the device needs ", "or freeze parameters"),
        (4, "[optimizer]: not enough memory for the moments: the host needs ", "or freeze parameters"),
    ],
)
def test_memory_that_is_gone_after_the_plan_is_one_line_and_the_ledger(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: int,
    begin: str,
    end: str,
) -> None:
    free = iter([1 << 40] * asked)
    monkeypatch.setattr(ThreadBackend, "host_available", lambda self: next(free, 1000))
    assert main(["train", str(config)]) == 2
    line, *table = capsys.readouterr().err.splitlines()
    assert line.startswith(f"streamer: {begin}") and line.endswith(end)
    if asked == 2:
        assert "and has 1000 bytes" in line
        assert [row.split("  ")[0] for row in table if not row.startswith(" ")] == ["device", "host"]
        assert table[-2].split()[-2:] == ["available", "1,000"]
    else:
        assert "  held already" in "\n".join(table)
    assert not (config.parent / "runs").exists()


@pytest.fixture
def on_disk(tmp_path: Path) -> list[str]:
    """Options that leave state of the tiny model on disk."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return sets(f'memory.host="{BUDGET}B"', f'memory.disk=["{folder}"]', *DEEPER)


#: Too little for the state of the tiny model with more layers, enough for the rest of it and the ring.
BUDGET, DEEPER = 560_000, ("model.args.n_layer=12", "run.sample_tokens=0")


@pytest.mark.filterwarnings("ignore:no direct I/O")  # temporary files may be in memory
def test_a_run_on_disk_ends_as_one_in_memory(
    config: Path, tmp_path: Path, on_disk: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    losses, summaries = [], []
    for name, options in {"memory": sets(*DEEPER), "disk": on_disk}.items():
        assert main(["train", str(config), *options, "--set", f'run.name="{name}"']) == 0
        losses.append([line["loss"] for line in logged(tmp_path / "runs" / name, "loss")])
        summaries.append(json.loads((tmp_path / "runs" / name / "summary.json").read_text()))
    assert losses[0] == losses[1]
    memory, disk = summaries
    assert memory["disk_bytes_per_parameter"] == 0 < disk["disk_bytes_per_parameter"]
    assert disk["host_bytes_per_parameter"] * disk["parameters"] <= BUDGET
    assert memory["busy_seconds"]["disk_read"] == 0 < disk["busy_seconds"]["disk_read"]
    in_memory, beside = capsys.readouterr().out.split("\ndisk: ")
    assert "disk_" not in in_memory.replace("run_on_disk_", "")
    for words in (" on disk\n", "disk bytes per parameter", "\ndisk_read ", "\ndisk_write "):
        assert words in beside
    assert load_config(tmp_path / "runs" / "disk" / "config.toml").memory.host == f"{BUDGET}B"


@pytest.mark.filterwarnings("ignore:no direct I/O")
def test_what_is_on_disk_leaves_room_for_layer_inputs_that_wait(
    config: Path, tmp_path: Path, on_disk: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They come with the first step, when the rest has its place."""
    losses = []
    waiting = sets("stream.activations='recompute+offload'", "data.batch_size=32", 'memory.host="850kB"')
    for name, options in {
        "memory": sets(*DEEPER, "data.batch_size=32"),
        "disk": [*on_disk, *waiting],
    }.items():
        assert main(["train", str(config), *options, "--set", f'run.name="{name}"']) == 0
        losses.append([line["loss"] for line in logged(tmp_path / "runs" / name, "loss")])
    assert losses[0] == losses[1]
    summary = json.loads((tmp_path / "runs" / "disk" / "summary.json").read_text())
    assert summary["host_bytes_per_parameter"] * summary["parameters"] <= 850_000
    assert 'host = "850kB"' in (tmp_path / "runs" / "disk" / "config.toml").read_text()
    # less than the inputs and the rings take is refused before the run begins
    less = [*on_disk, *waiting, *sets('memory.host="700kB"', "run.name='less'")]
    capsys.readouterr()
    assert main(["train", str(config), *less]) == 2
    line, *table = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "streamer: this run does not fit on the host; it would with --set data.accumulate="
    )
    assert "  saved inputs " in "\n".join(table) and not (tmp_path / "runs" / "less").exists()


@pytest.mark.filterwarnings("ignore:no direct I/O")
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('memory.disk="{missing}"', "memory.disk={missing}: this process sees no such folder"),
        ('memory.disk=["/", "{missing}"]', "memory.disk={missing}: this process sees no such folder"),
        ('memory.disk="{file}"', "[memory]: memory.disk={file} is not a folder: give a folder"),
        ('memory.disk="/proc"', "[memory]: memory.disk=/proc: this process can make no file there"),
        ("memory.disk=[]", "memory.disk must be a folder, or an array of folders on different drives"),
        ('memory.disks="{missing}"', "unknown key 'disks' in [memory]; did you mean 'disk'?"),
        ('memory.host="48 gib"', "memory.host must be a string of a number and its unit, such as "),
        ('memory.host="0B"', "[stream] and [memory]: memory.host='0B': give a number and its unit"),
        ('memory.host="1kB"', "the model with what can be on disk there: memory.host needs "),
    ],
)
def test_what_cannot_be_on_disk_is_told_in_one_line(
    config: Path,
    tmp_path: Path,
    on_disk: list[str],
    setting: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"missing": tmp_path / "missing", "file": config}
    options = [*on_disk, *sets(setting.format(**names))]
    assert words.format(**names) in refused(capsys, "train", str(config), *options)
    assert not (tmp_path / "runs").exists()


def test_a_budget_without_a_disk_names_one(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = sets(f'memory.host="{BUDGET}B"', *DEEPER)
    assert main(["train", str(config), *options]) == 2
    line, *table = capsys.readouterr().err.splitlines()
    assert line.startswith("streamer: [stream] and [memory]: not enough memory for the model: ")
    assert ": give memory.disk a folder for the optimizer's state, or raise memory.host" in line and table
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore:no direct I/O")
def test_a_disk_without_a_budget_is_for_what_is_not_free(config: Path, tmp_path: Path) -> None:
    assert main(["train", str(config), *sets(f'memory.disk="{tmp_path}"')]) == 0
    assert (
        json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["disk_bytes_per_parameter"] == 0
    )


def test_the_overlap_of_an_idle_lane_is_null_in_the_summary_and_one_that_came_late_is_explained(
    config: Path,
) -> None:
    trained = dict.fromkeys(("tokens_per_second", "first_val_loss", "last_val_loss", "unigram_loss"), 1.0)
    model = build_model(load_config(config))
    try:
        backend = wrapped(model).executor.backend
        for lane in (Lane.COMPUTE, Lane.H2D):
            backend.submit(lane, lambda: None, (), 0).wait()
        streamer.synchronize(model)
        busy = streamer.stats(model).busy_seconds
        summary = summary_of(model, Lanes({}, {}), **trained)
        # what the first step took, in which kernels are compiled, is left out
        half = {lane: seconds / 2 for lane, seconds in busy.items()}
        assert summary_of(model, Lanes(half, {}), **trained)["busy_seconds"] == half
        assert summary_of(model, Lanes(busy, busy), **trained)["busy_seconds"] == busy, "there is no other"
    finally:
        streamer.unwrap(model)
    assert None in summary["overlap"].values()
    seconds = {"compute": 9.0, "h2d": 1.0, "d2h": 2.0, "host": 0.0}
    late = {"busy_seconds": seconds, "overlap": {"compute": 1.0, "h2d": -7.663, "d2h": 0.25, "host": None}}
    *_, compute, h2d, d2h, host, remark = summary_table(summary | late).splitlines()
    assert [line.split()[-1] for line in (compute, h2d, d2h, host)] == ["-", "none", "25.0%", "-"]
    assert remark.startswith("h2d: compute waited longer than the lane worked")
