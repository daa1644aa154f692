"""`streamer.from_pretrained`: what the transformers library loads, in host memory a layer at a time."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import streamer
from bench.architectures import ALL, Architecture
from models.gpt2 import GPT
from streamer.engine.handle import home_of
from tests.model.test_moving import LINUX, MIB, ROOT
from tests.model_folders import FILE, SIZES, differing, in_use, load, rewritten, saved, unwrapped
from tests.reference import assert_parity, batch, train

# --- what the library loads -----------------------------------------------------------------------------

CASES = [
    ("gpt2", "20kB"),  # the head is in no file
    ("llama", "20kB"),
    ("bert", "5GB"),
    ("marian", "20kB"),  # sines of positions are in no file
    ("mixtral", "200kB"),  # its experts are stored one by one
    ("qwen3_moe", "20kB"),
    ("deepseek_v3", "5GB"),
    ("jamba", "5GB"),
    ("t5", "5GB"),
    ("resnet", "5GB"),
    ("clip", "5GB"),
    ("llava", "20kB"),
    ("funnel", "5GB"),
]


@pytest.mark.filterwarnings("ignore")  # the library's own, on tiny configs
@pytest.mark.parametrize(("name", "size"), CASES)
def test_it_equals_the_model_that_the_library_loads(name: str, size: str, tmp_path: Path) -> None:
    architecture = ALL[name]
    kind = type(saved(tmp_path, name, max_shard_size=size))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (size != "5GB")
    mine = load(tmp_path, layers=architecture.layers)
    assert in_use(tmp_path) == []
    theirs = kind.from_pretrained(tmp_path)
    assert type(mine) is kind
    assert not any(module.training for module in mine.modules())
    assert differing(mine.state_dict(), theirs.state_dict()) == []
    assert differing(dict(mine.named_buffers()), dict(theirs.named_buffers())) == []
    assert mine.config.to_dict() == theirs.config.to_dict()
    if theirs.can_generate():
        assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    with torch.no_grad():
        assert torch.equal(*(seeded_loss(architecture, model) for model in (mine, theirs)))
    frozen = {key: param.requires_grad for key, param in ALL[name].build().named_parameters()}
    assert {key: param.requires_grad for key, param in mine.named_parameters()} == frozen
    streamer.unwrap(mine)
    assert differing(mine.state_dict(), theirs.state_dict()) == []


def seeded_loss(architecture: Architecture, model: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    return architecture.loss(model, 1)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "bert"])
def test_training_equals_that_of_the_model_that_the_library_loads(name: str, tmp_path: Path) -> None:
    architecture = ALL[name]
    kind = type(saved(tmp_path, name))
    mine, theirs = load(tmp_path).train(), kind.from_pretrained(tmp_path).train()
    theirs.config.use_cache = False
    for param, same in zip(theirs.parameters(), mine.parameters(), strict=True):
        param.requires_grad_(same.requires_grad)  # that library trains what a constructor has frozen
    settings = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}
    options = {"steps": 2, "loss_of": architecture.loss}
    clips = partial(streamer.clip_grad_norm_, mine, 1.0)
    actual = train(mine, streamer.AdamW(mine.parameters(), **settings), clips, **options)
    clips = partial(torch.nn.utils.clip_grad_norm_, list(theirs.parameters()), 1.0)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **settings), clips, **options)
    if not architecture.order:
        assert_parity(actual, expected)
    assert actual.losses[0] == expected.losses[0]
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
    streamer.unwrap(mine)


def test_the_class_is_that_of_the_config_or_of_the_argument(gpt2: Path) -> None:
    full, body = transformers.GPT2LMHeadModel, transformers.GPT2Model
    expected = full.from_pretrained(gpt2)
    for arguments, kind in (
        ((), full),
        ((full, "transformer.h"), full),
        ((transformers.AutoModelForCausalLM,), full),
        ((body, "h"), body),
        ((transformers.AutoModel,), body),
    ):
        model = unwrapped(gpt2, *arguments)
        assert type(model) is kind
        same = expected if kind is full else expected.transformer
        assert differing(model.state_dict(), same.state_dict()) == []
    assert type(unwrapped(gpt2 / FILE)) is full


def test_how_it_generates_is_taken_over(gpt2: Path, tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    mine = load(tmp_path)
    assert mine.generation_config.max_new_tokens == 5
    prompt = batch(0, size=2, time=4)
    assert torch.equal(mine.generate(prompt, do_sample=False), model.generate(prompt, do_sample=False))
    streamer.unwrap(mine)
    # older folders have it among the rest, and a model that cannot generate has none
    (tmp_path / "generation_config.json").unlink()
    card = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**card, "num_beams": 3}))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert unwrapped(tmp_path).generation_config.to_dict() == theirs.generation_config.to_dict()
    assert theirs.generation_config.num_beams == 3
    assert not hasattr(unwrapped(tmp_path, transformers.GPT2Model), "generation_config")


def test_a_config_in_place_of_the_one_in_the_folder(gpt2: Path) -> None:
    config = transformers.GPT2Config.from_pretrained(gpt2, resid_pdrop=0.5)
    before = copy.deepcopy(config.to_dict())
    model = load(gpt2, config=config, dtype="bfloat16")
    assert model.transformer.h[0].mlp.dropout.p == 0.5
    assert config.to_dict() == before
    assert model.config is not config
    architecture = ALL["gpt2"]
    quiet = seeded_loss(architecture, model)
    assert torch.equal(quiet, seeded_loss(architecture, model))
    assert not torch.equal(quiet, seeded_loss(architecture, model.train()))
    streamer.unwrap(model)


def test_the_library_loads_a_model_that_is_saved_again(tmp_path: Path) -> None:
    before = saved(tmp_path / "one", "mixtral")
    unwrapped(tmp_path / "one").save_pretrained(tmp_path / "two")
    after = type(before).from_pretrained(tmp_path / "two")
    assert differing(after.state_dict(), before.state_dict()) == []


# --- dtypes ---------------------------------------------------------------------------------------------


def streamed_dtypes(model: nn.Module) -> set[torch.dtype]:
    homes = [home_of(param) for param in model.parameters()]
    return {home.slice.param.dtype for home in homes if home is not None}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_nothing_is_lost_in_whatever_dtype(
    stored: torch.dtype, dtype: torch.dtype | None, llama: Path, tmp_path: Path
) -> None:
    plain = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=stored)
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype)
    assert streamed_dtypes(model) == {dtype or stored}
    assert model.config.dtype == (dtype or stored)
    masters = torch.promote_types(stored, dtype or stored)
    expected = {name: value.to(masters) for name, value in load_file(tmp_path / FILE).items()}
    actual = streamer.unwrap(model).state_dict()
    assert differing({name: actual[name] for name in expected}, expected) == []
    assert not torch.equal(
        expected["lm_head.weight"], expected["lm_head.weight"].to(torch.float8_e4m3fn).float()
    )


def test_each_tensor_has_the_dtype_of_the_files(llama: Path, tmp_path: Path) -> None:
    plain = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path)
    rewritten(
        tmp_path / FILE, lambda held: held.update({k: v.float() for k, v in held.items() if "norm" in k})
    )
    plain.config.dtype = torch.float16  # which is not that of most weights
    plain.config.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.dtype == torch.bfloat16
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    assert dtypes == {name: value.dtype for name, value in load_file(tmp_path / FILE).items()}
    assert len(set(dtypes.values())) == 2
    streamer.unwrap(model)


@pytest.mark.parametrize("name", ["deepseek_v3", "resnet"])
def test_buffers_have_the_dtypes_of_the_files_or_those_that_the_class_gives_them(
    name: str, tmp_path: Path
) -> None:
    kind = type(saved(tmp_path, name))
    rewritten(
        tmp_path / FILE,
        lambda held: held.update({k: v + 1 / 3 for k, v in held.items() if "e_score" in k or "running" in k}),
    )
    theirs = dict(kind.from_pretrained(tmp_path, dtype=torch.bfloat16).named_buffers())
    model = load(tmp_path, dtype=torch.bfloat16)
    assert differing(dict(model.named_buffers()), theirs) == []
    streamer.unwrap(model)
    # floats that are narrow elsewhere: biases of routers stay exact in models of bf16
    rewritten(
        tmp_path / FILE,
        lambda held: held.update({k: v.bfloat16() for k, v in held.items() if k.endswith("weight")}),
    )
    files = load_file(tmp_path / FILE)
    buffers = {key: value for key, value in unwrapped(tmp_path).named_buffers() if key in files}
    assert buffers
    assert differing(buffers, {key: files[key] for key in buffers}) == []


# --- functions that make a model ------------------------------------------------------------------------


def small() -> GPT:
    torch.manual_seed(7)
    return GPT(**SIZES)


def test_a_file_and_a_function(tmp_path: Path) -> None:
    plain = small()
    save_file(
        {name: value for name, value in plain.state_dict().items() if name != "lm_head.weight"},
        tmp_path / FILE,
    )
    for path in (tmp_path, tmp_path / FILE):
        torch.manual_seed(1)
        model = load(path, lambda: GPT(**SIZES), "transformer.h")
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.training
        assert torch.equal(model(batch(0)[:, :16]), plain(batch(0)[:, :16]))
        assert differing(streamer.unwrap(model).state_dict(), plain.state_dict()) == []


# --- what is in no file ---------------------------------------------------------------------------------


def fill_score(module: nn.Module) -> None:
    if isinstance(module, transformers.GPT2ForSequenceClassification):
        nn.init.constant_(module.score.weight, 0.5)


@pytest.mark.parametrize(
    ("init", "dtype"), [("_init_weights", torch.bfloat16), (fill_score, None)], ids=["own", "a function"]
)
def test_a_new_head_and_nothing_else_is_initialised(init: Any, dtype: torch.dtype | None, gpt2: Path) -> None:
    torch.manual_seed(0)
    model = unwrapped(gpt2, transformers.GPT2ForSequenceClassification, init=init, dtype=dtype)
    body = transformers.GPT2Model.from_pretrained(gpt2)
    assert differing(model.transformer.state_dict(), body.state_dict()) == []
    score = model.score.weight
    assert score.dtype == torch.float32
    if init is fill_score:
        assert torch.equal(score, torch.full_like(score, 0.5))
    else:
        assert score.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("ignore", [["lm_head", "nowhere"], r"_head\.weight$"])
def test_a_head_is_left_out(ignore: Any, llama: Path) -> None:
    expected = transformers.LlamaModel.from_pretrained(llama)
    model = unwrapped(llama, transformers.LlamaModel, ignore=ignore)
    assert differing(model.state_dict(), expected.state_dict()) == []


# --- memory ---------------------------------------------------------------------------------------------

#: Ten layers of four tensors of 2 MiB.
CHILD = """
import gc, json, sys
sys.path.insert(0, {root!r})
import torch, streamer
from safetensors.torch import save_file
from torch import nn
from streamer.store.host import HostStore

torch.set_num_threads(1)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(4))
    def forward(self, x):
        return x

class Net(nn.Module):
    def __init__(self, width=512, layers=10):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

# what comes once: threads, kernels, modules, and pages of libraries, which differ by release
small = {path!r}.replace(".safetensors", "-small.safetensors")
save_file(Net(8, 2).state_dict(), small)
streamer.unwrap(streamer.from_pretrained(small, lambda: Net(8, 2), device="cpu", dtype=torch.bfloat16))
gc.collect()
empty = status("VmRSS")
moved = []
add = HostStore.add
def then_add(self, *args, **kwargs):
    moved.append((status("VmHWM"), status("RssAnon")))
    add(self, *args, **kwargs)
HostStore.add = then_add
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
model = streamer.from_pretrained({path!r}, Net, device="cpu", dtype=torch.bfloat16)
print(json.dumps(dict(
    empty=empty, peak=moved[0][0], mapped={path!r} in open("/proc/self/maps").read(),
    host=streamer.stats(model).host_bytes,
)))
"""


@LINUX
def test_memory_is_that_of_the_shards_and_at_most_one_layer(tmp_path: Path) -> None:
    path = str(tmp_path / FILE)
    tensor, layer = 2 * MIB, 8 * MIB
    names = [f"layers.{layer}.parts.{part}.weight" for layer in range(10) for part in range(4)]
    save_file({name: torch.rand(1024, 512) for name in names}, path)
    program = CHILD.format(root=ROOT, path=path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = sum(found["host"].get(name, 0) for name in ("weights", "remainders"))
    assert weights == 10 * layer
    # a layer on its way, and of the files the tensor that is being read
    assert found["peak"] - found["empty"] <= weights + layer + tensor + 4 * MIB
    assert not found["mapped"]
