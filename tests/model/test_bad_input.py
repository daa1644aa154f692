"""What cannot be honoured is one error that names the remedy, and leaves no trace."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import streamer
from streamer.backends import host_memory
from streamer.backends.thread import ThreadBackend
from streamer.engine import device_memory as watch
from streamer.model.layers import find_layers
from streamer.model.options import parse_bytes
from streamer.store.ledger import SHARED
from tests.reference import attached, in_turn, unwrapping


class Net(nn.Module):
    """Three layers of 4x4; every parameter takes 32 elements, 128 bytes in fp32."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.single = nn.Linear(4, 4)
        self.empty = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.single(x)


KNOWN = re.escape("Found in this model: 'blocks' (3 x Linear)")
LIST = (
    r"it must be an nn\.ModuleList, nn\.Sequential or nn\.ModuleDict, or a glob of modules that are called "
    r"\('layers\.\*\.mlp'\)\. " + KNOWN
)
DTYPES = r"use torch\.float32, torch\.bfloat16 or torch\.float16"
POLICIES = r"use one of 'recompute', 'recompute\+offload', 'keep'"
X = torch.ones(2, 4)


def address(tensor: torch.Tensor) -> int | None:
    return None if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.data_ptr()


def snapshot(model: nn.Module) -> list[object]:
    """All that wrap could change about a model but its values."""
    return attached(model) + [
        (id(param), address(param), param.dtype, param._version) for param in model.parameters()
    ]


@contextmanager
def refused(
    model: nn.Module, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The block raises ``error`` before anything is changed or allocated."""

    def allocate(self: ThreadBackend, nbytes: int, **_: Any) -> torch.Tensor:
        raise AssertionError(f"{nbytes} bytes are allocated before the input is checked")

    before = snapshot(model)
    with monkeypatch.context() as patch:
        for allocator in ("host_buffer", "host_reserve", "device_buffer"):
            patch.setattr(ThreadBackend, allocator, allocate)
        with pytest.raises(error, match=match):
            yield
    assert snapshot(model) == before


Refuses = Callable[..., None]


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> Refuses:
    """A function that checks that `wrap` refuses a model with some options."""

    def check(model: nn.Module, match: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with refused(model, error, match, monkeypatch):
            streamer.wrap(model, **({"layers": "blocks", "device": "cpu"} | options))

    return check


def wrapped(model: nn.Module | None = None, **options: Any) -> AbstractContextManager[Any]:
    model = Net() if model is None else model
    return unwrapping(streamer.wrap(model, **({"layers": "blocks", "device": "cpu"} | options)))


def step(model: nn.Module) -> None:
    """One step, to see that a model works."""
    optimizer = streamer.AdamW(model.parameters())
    model(X).sum().backward()
    streamer.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": "transformer.h"}, r"'transformer\.h': there is no such module\. " + KNOWN),
        ({"layers": "single"}, r"'single' is a Linear; " + LIST),
        ({"layers": ""}, r"layers='' is a Net; " + LIST),
        ({"layers": "empty"}, r"'empty' is an empty list\. " + KNOWN),
        ({"layers": ["blocks", "nowhere"]}, r"'nowhere': there is no such module\. " + KNOWN),
        ({"layers": []}, r"layers is empty: set it to the path of a list of layers\. " + KNOWN),
        ({"layers": 3}, "layers=3: it must be a dotted path, a glob, several of them, or None"),
        ({"num_slots": 0}, r"num_slots=0: it must be an integer of 1 or more"),
        ({"activations": "checkpoint"}, "activations='checkpoint' is unknown: " + POLICIES),
        ({"dtype": torch.float64}, r"torch\.float64.* " + DTYPES),
        ({"dtype": "fp8"}, "dtype='fp8' is not a dtype: use one of 'fp32', 'bf16', 'fp16', 'float32'"),
        ({"device": "mps"}, r"device='mps' is not supported: use 'cuda' or 'cpu'"),
        ({"host_threads": 0}, "host_threads=0: it must be an integer from 1 to"),
        ({"device_memory": "16"}, "device_memory='16': use a number and its unit such as '16GiB'"),
        ({"device_memory": 0}, "device_memory=0: use a number of bytes, or a text such as '16GiB'"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], match: str, refuses: Refuses) -> None:
    refuses(Net(), match, **options)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"])
def test_dtypes_by_name(name: str) -> None:
    dtype = {"bf": torch.bfloat16, "16": torch.float16, "32": torch.float32}
    expected = dtype["bf" if name.startswith("bf") else name[-2:]]
    with wrapped(dtype=name, grad_dtype="fp32") as model:
        assert model.blocks[0].weight.dtype is expected


def test_a_backend_that_was_given_is_closed_when_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots=0"):
        streamer.wrap(Net(), layers="blocks", num_slots=0, backend=ThreadBackend())


def test_without_cuda_no_device_means_the_cpu(refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        match = f"device='{device}': PyTorch finds no CUDA device here; use device='cpu' or None"
        refuses(Net(), match, device=device)
    with wrapped(device=None) as model:
        assert model(X).device.type == "cpu"


@pytest.mark.parametrize(
    ("model", "layers", "match"),
    [
        (nn.Linear(2, 2), None, "layers=None: .*This model has no list of modules"),
        (
            nn.Sequential(nn.ModuleList([None, nn.Tanh()]), nn.ModuleList([nn.Tanh()])),
            "",
            r"layers='' has no module with parameters in it\. Found",
        ),
        (
            nn.Sequential(nn.ParameterList([torch.ones(2, 2)]), nn.ParameterList([torch.ones(2, 2)])),
            "",
            r"layer '0' is a ParameterList, which has no forward",
        ),
        (
            nn.Sequential(nn.ParameterList([torch.ones(2, 2)]), nn.ParameterList([torch.ones(2, 2)])),
            None,
            "layers=None: no list of similar blocks",
        ),
    ],
)
def test_no_layers_to_be_found(model: nn.Module, layers: str | None, match: str, refuses: Refuses) -> None:
    refuses(model, match, layers=layers)


def linears(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, width) for width in widths]


STAGE = nn.ModuleList([nn.ModuleList([nn.LayerNorm(9), None]), nn.Linear(199, 9), None, nn.Tanh()])
A_DICT = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("2", "1", "last")})
MODELS: dict[str, tuple[nn.Module, tuple[str | None, ...], list[str]]] = {
    "every stack and no small list": (
        nn.ModuleDict(
            {
                "encoder": nn.ModuleList(linears(8, 8)),
                "decoder": nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)]),
                "small": nn.ModuleList(linears(2, 2)),
                "different": nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)),
            }
        ),
        (None,),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"],
    ),
    "what is in lists of lists, each once": (
        nn.ModuleDict(
            {"stages": nn.ModuleList([nn.ModuleList(linears(2)), nn.ModuleList([nn.Linear(2, 2)] * 2)])}
        ),
        (None, "stages"),
        ["stages.0.0", "stages.1.0"],
    ),
    "no children of a list in a list that have few parameters or none": (
        nn.ModuleDict({"stages": nn.ModuleList([STAGE, copy.deepcopy(STAGE)]), "head": nn.Linear(2, 2)}),
        (None, "stages"),
        ["stages.0.1", "stages.1.1"],
    ),
    # a dict with children of several classes may hold an embedding, the layers and a norm
    "a dict in its order, not one of several classes": (
        nn.ModuleDict(
            {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2), "blocks": A_DICT, "n": nn.LayerNorm(2)}
        ),
        (None, "blocks"),
        ["blocks.2", "blocks.1", "blocks.last"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found(name: str) -> None:
    model, paths, expected = MODELS[name]
    for layers in paths:
        assert [found for found, _ in find_layers(model, layers)] == expected


# --- parameters ---------------------------------------------------------------------------------------


Change = Callable[[Any], object]


def tied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer[1].weight = layer[0].weight
    return layer


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(4, 4), X)


BAD_MODELS: list[tuple[Change, str]] = [
    (
        lambda model: setattr(model.single, "bias", nn.Parameter(model.embed.bias.detach())),
        r"parameter 'single\.bias' has the same memory as another one: tie them by",
    ),
    (
        lambda model: model.blocks.append(nn.Tanh()),
        r"layer 'blocks\.3' has no parameters.* put what it does into the layer",
    ),
    (
        lambda model: model.to("meta"),
        r"'blocks\.0\.weight' is on the meta device and has no values: set wrap\(init=",
    ),
    *(
        (
            lambda model, place=place: setattr(model.get_submodule(place), "lazy", nn.LazyLinear(4)),
            rf"'{place}\.lazy\.weight' has no shape yet.*run the model once, then wrap it",
        )
        for place in ("blocks", "single")
    ),
    *(
        (
            lambda model, place=place: model.set_submodule(place, traced()),
            rf"'{place}' is TorchScript.*wrap the model with the module",
        )
        for place in ("blocks.1", "single")
    ),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize(("change", "match"), BAD_MODELS, ids=[match[:40] for _, match in BAD_MODELS])
def test_models_that_cannot_be_streamed(change: Change, match: str, refuses: Refuses) -> None:
    model = Net()
    change(model)
    refuses(model, match)


@pytest.mark.parametrize(
    ("values", "dtype", "match"),
    [
        (torch.eye(4).to_sparse(), None, r"is sparse \(torch\.sparse_coo\): make it dense"),
        (torch.eye(4, dtype=torch.complex64), torch.float32, r"is complex .*: store its real"),
        (torch.eye(4, dtype=torch.float64), None, r"torch\.float64.*set wrap\(dtype=\.\.\.\)"),
        (torch.eye(4).to(torch.float8_e4m3fn), None, r"torch\.float8_e4m3fn.*or cast the model first"),
    ],
)
def test_parameters_that_cannot_be_streamed(
    values: torch.Tensor, dtype: torch.dtype | None, match: str, refuses: Refuses
) -> None:
    model, place = Net(), "blocks.1"
    trainable = values.is_floating_point() or values.is_complex()
    model.get_submodule(place).weight = nn.Parameter(values, requires_grad=trainable)
    refuses(model, rf"parameter '{place}\.weight' .*{match}", dtype=dtype)


def test_float64_is_streamed_as_what_is_asked_for() -> None:
    model = Net().double()
    with wrapped(model, dtype=torch.float32):
        assert model(X).dtype == torch.float32
    assert {param.dtype for param in model.parameters()} == {torch.float64}


def test_wrapping_twice() -> None:
    model = Net()
    whole = nn.Sequential(model, nn.Linear(4, 4))
    with wrapped(model):
        before = snapshot(model)
        for again, layers, which in (
            (model, "blocks", "model"),
            (model.blocks, "", "it"),
            (whole, "0.blocks", r"model\.0"),
            (model.blocks[0], None, "it"),
        ):
            with pytest.raises(ValueError, match=rf"wrapped already: call streamer\.unwrap on {which} first"):
                streamer.wrap(again, layers=layers, device="cpu")
        assert snapshot(model) == before
        step(model)


# --- memory -------------------------------------------------------------------------------------------

#: A layer is two parameters of 128 bytes; so is each of the two modules of the rest.
HOST = f"the host{SHARED}"
TABLE = """\
device                         bytes
  weight slots                   512
  gradient slots                 512
  root weights                   512
  root gradients                 512
  needed                       2,048
  available                    2,047
host                           bytes
  weights                      1,280
  gradients                    1,280
  moments of AdamW at least    2,560
  needed                       5,120
  page-locked on a GPU         2,560
  available                  100,000
  freed by the model             400"""


BLOCK = "the largest layer, 'blocks.0', takes 256 bytes; 2048 bytes would do, or lower num_slots to 1"
HOST_REMEDY = "use dtype=torch.bfloat16 or freeze parameters"


@pytest.mark.parametrize(
    ("device", "host", "told"),
    [
        (2047, 10**5, f"the device needs 2048 bytes and has 2047 bytes (1 byte too few): {BLOCK}\n{TABLE}"),
        (
            1000,
            100,
            f"the device needs 2048 bytes and has 1000 bytes (1048 bytes too few), {HOST} needs 7168 bytes "
            "and has 500 bytes (6668 bytes too few): the parameters outside of layers alone "
            "take 1024 bytes; 2048 bytes "
            f"would do; {HOST_REMEDY}\ndevice ",
        ),
    ],
)
def test_too_little_memory(
    device: int, host: int, told: str, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadBackend, "device_available", lambda self: device)
    monkeypatch.setattr(ThreadBackend, "host_available", lambda self: host)
    refuses(Net(), re.escape(f"not enough memory for the model: {told}"), MemoryError)


@pytest.mark.parametrize(
    ("dtype", "frozen", "there", "told"),
    [
        (torch.bfloat16, 3, 10_000, 'quantize the frozen weights (from_pretrained(quantize="int8"))'),
        (torch.float16, 3, 3_000, 'quantize the frozen weights (from_pretrained(quantize="nf4"))'),
        # most of it is trained
        (torch.bfloat16, 1, 131_000, HOST_REMEDY),
    ],
)
def test_quantization_is_proposed_for_what_is_frozen(
    dtype: torch.dtype, frozen: int, there: int, told: str, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    model.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
    model.blocks[:frozen].requires_grad_(False)
    model.blocks.to(dtype)
    monkeypatch.setattr(ThreadBackend, "device_available", lambda self: 10**6)
    monkeypatch.setattr(ThreadBackend, "host_available", lambda self: there)
    refuses(model, rf"too few\): {re.escape(told)}\n", MemoryError)


def test_a_control_group_counts(tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"31 24 0:27 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "memory.max").write_text("12000\n")
    (tmp_path / "memory.current").write_text("5233\n")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.setattr(watch, "LOW_HOST_BYTES", 0)
    refuses(Net(), "and has 7167 bytes .1 byte too few.", MemoryError)
    (tmp_path / "memory.current").write_text("5232\n")
    with wrapped() as model:
        (tmp_path / "memory.current").write_text("9441\n")
        with pytest.raises(MemoryError, match="moments: the host needs 2560 bytes and has 2559 bytes"):
            streamer.AdamW(model.parameters())
        assert "exp_avg" not in streamer.stats(model).host_bytes


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [(None, None), (1, 1), ("16 GB", 16 * 10**9), (" 1.5KiB ", 1536), ("3kB", 3000), ("2TiB", 1 << 41)],
)
def test_amounts_of_memory(given: int | str | None, nbytes: int | None) -> None:
    assert parse_bytes("device_memory", given) == nbytes


# --- a wrapped model ----------------------------------------------------------------------------------

MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to device": lambda module: module.to("meta"),
    "half": lambda module: module.half(),
    "share_memory": lambda module: module.share_memory(),
}

STAYS: dict[str, Callable[[nn.Module], object]] = {
    "to device": lambda module: module.to("cpu"),
    "to device and dtype": lambda module: module.to("cpu", torch.float32, non_blocking=True),
    "float": lambda module: module.float(),
    "type": lambda module: module.type(torch.float32),
    "to memory format": lambda module: module.to(memory_format=torch.channels_last),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("place", ["", "blocks.1"])
def test_moving_and_casting(place: str) -> None:
    match = r"cannot be moved or cast.*runs on 'cpu'.*call streamer\.unwrap\(model\) first"
    model = Net()
    model.single.register_buffer("image", torch.zeros(1, 2, 3, 3))
    model.blocks[1].register_buffer("image", torch.zeros(1, 2, 3, 3))
    with wrapped(model):
        before = snapshot(model)
        for name, stay in STAYS.items():
            module = model.get_submodule(place)
            assert stay(module) is module
            assert snapshot(model) == before, name
        for name, move in MOVES.items():
            with pytest.raises(RuntimeError, match=match):
                move(model.get_submodule(place))
            assert snapshot(model) == before, name
        whole = nn.Sequential(model)
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            whole.half()
        assert whole.to("cpu") is whole
        step(model)


@pytest.mark.parametrize(
    ("duplicate", "place"), [(copy.copy, "blocks.1"), (pickle.dumps, ""), (pickle.dumps, "single")]
)
def test_copying_and_pickling(duplicate: Callable[[object], object], place: str) -> None:
    match = (
        r"cannot be pickled, nor copied by copy\.copy: use copy\.deepcopy\(model\).* or save model\.state_d"
    )
    with wrapped() as model:
        with pytest.raises(RuntimeError, match=match):
            duplicate(model.get_submodule(place))
        step(model)
    copy.deepcopy(model)
    pickle.dumps(model)


def test_load_with_assign() -> None:
    with wrapped() as model:
        before = snapshot(model)
        state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="load with assign=False, or before streamer.wrap"):
            model.load_state_dict(state, assign=True)
        assert snapshot(model) == before
        model.load_state_dict(state)
        assert not any(value.any() for value in model.state_dict().values())
        assert torch.equal(model(X), torch.zeros(2, 4)), "what was loaded is what runs"


def linear() -> nn.Module:
    return nn.Linear(4, 4)


GAINS: dict[str, Change] = {
    "an adapter around a layer": lambda model: model.blocks.__setitem__(
        1, nn.Sequential(model.blocks[1], linear())
    ),
    "a module in a layer": lambda model: setattr(model.blocks[1], "more", linear()),
}


@pytest.mark.parametrize("name", GAINS)
def test_parameters_that_a_model_gains(name: str) -> None:
    """They run as in plain PyTorch, and have gradients for whoever trains them."""
    with wrapped() as model:
        step(model)
        with torch.random.fork_rng(devices=[]):
            GAINS[name](model)
        plain = copy.deepcopy(model)
        for each in (model, plain):
            each.zero_grad()
            each(X).square().sum().backward()
        for (path, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), path
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), path


# --- optimizer and the other functions ----------------------------------------------------------------


def test_optimizer_of_a_plain_model() -> None:
    model = Net()
    match = r"belongs to no wrapped model: call streamer\.wrap\(model, \.\.\.\).*leave out parameters"
    with pytest.raises(ValueError, match=match):
        streamer.AdamW(model.parameters())
    with wrapped() as mine, pytest.raises(ValueError, match=match):
        streamer.AdamW([*mine.parameters(), *model.parameters()])
    with pytest.raises(ValueError, match=match):
        streamer.AdamW(mine.parameters())  # unwrapped meanwhile


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("betas", 0.9),
        ("betas", (0.9, 1.0)),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
    ],
)
def test_bad_hyperparameters(name: str, value: Any) -> None:
    match = re.escape(f"{name}={value} is out of range: betas are two numbers in [0, 1), the others are")
    with wrapped() as model:
        with pytest.raises(ValueError, match=match):
            streamer.AdamW(model.parameters(), **{name: value})
        with pytest.raises(ValueError, match=match):
            streamer.AdamW([{"params": list(model.parameters()), name: value}])
        assert set(streamer.stats(model).host_bytes) == {"weights", "gradients"}, "no moments were allocated"


PLACES = ["constructor", "add_param_group", "step", "backward", "load_state_dict"]
UPDATES = ["maximize", "amsgrad", "differentiable", "decoupled_weight_decay"]


@pytest.mark.parametrize(("where", "option"), in_turn(PLACES, UPDATES))
def test_options_of_torch_that_change_updates(option: str, where: str) -> None:
    value = option != "decoupled_weight_decay"
    changed = {option: value, "weight_decay": 0.1}
    with wrapped(update="backward" if where == "backward" else "step") as model:
        first, *others = model.parameters()
        optimizer = streamer.AdamW([{"params": others}])
        model(X).sum().backward()
        with pytest.raises(ValueError, match=f"{option}={value} in a parameter group is not supported by"):
            if where == "constructor":
                streamer.AdamW([{"params": [first], **changed}])
            elif where == "add_param_group":
                optimizer.add_param_group({"params": [first], **changed})
            elif where == "load_state_dict":
                saved = optimizer.state_dict()
                optimizer.load_state_dict({**saved, "param_groups": [saved["param_groups"][0] | changed]})
            else:
                optimizer.step()
                optimizer.param_groups[0].update(changed)
                model(X).sum().backward()
                optimizer.step()


PUBLIC: dict[str, Callable[[nn.Module], object]] = {
    "stats": streamer.stats,
    "synchronize": streamer.synchronize,
    "unwrap": streamer.unwrap,
    "clip_grad_norm_": lambda model: streamer.clip_grad_norm_(model, 1.0),
    "save_trace": lambda model: streamer.save_trace(model, "never-written.json"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_functions_on_a_plain_model(name: str) -> None:
    model = Net()
    before = snapshot(model)
    match = r"this Net is not wrapped: call streamer\.wrap\(model, layers=\.\.\.\) first"
    with pytest.raises(ValueError, match=match):
        PUBLIC[name](model)
    assert snapshot(model) == before
    with wrapped(model):
        pass
    with pytest.raises(ValueError, match=match):
        PUBLIC[name](model)
    assert not Path("never-written.json").exists()
