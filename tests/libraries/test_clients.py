"""Code that reads or writes the weights of a wrapped model after ``optimizer.step()``, as on a plain one.

The update still runs on the host when ``step`` returns. A client here is an ordinary piece of a training
script, or of a library, that does not know this: it reads parameters, or writes them through ``param.data``,
without a call of `streamer.synchronize`. It runs once on a plain model and once on a wrapped one whose
updates are slow, and everything that it has seen is the same to the bit. Single reads and writes are in
tests/engine/test_guard.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("ema_pytorch", reason="ema_pytorch is not installed")
pytest.importorskip("torch_ema", reason="torch_ema is not installed")

import lightning as L
import torch
import torch.nn.functional as F
from diffusers.training_utils import EMAModel
from ema_pytorch import EMA
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch_ema import ExponentialMovingAverage

import streamer
import streamer_native as native
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.store.shard import HALF_OF_LAST_PLACE, array
from tests.libraries.common import LIGHTNINGS_OWN, fit
from tests.libraries.test_huggingface import loss as labelled_loss
from tests.libraries.test_peft import lora
from tests.reference import VOCAB, assert_equal, batch, flat, in_turn

STEPS = 3
#: Seconds by which each update comes late: longer than a client takes to its first read.
LATE = 0.004
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


#: Where the plain optimizer calls the kernels: they set the number of OpenMP threads of the thread that calls
#: them, by which PyTorch's own sums are cut.
KERNELS = ThreadPoolExecutor(1)


class Adam(torch.optim.Optimizer):
    """`streamer.AdamW`'s arithmetic in a plain optimizer, whose ``step`` returns when all is done."""

    def __init__(self, params: Any, **hyper: Any) -> None:
        super().__init__(params, HYPER | hyper)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        KERNELS.submit(self._step).result()
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        param, gradient = param.detach(), param.grad
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros(param.shape)}
            state |= {"exp_avg_sq": torch.zeros(param.shape)}
            state["remainder"] = torch.full(param.shape, HALF_OF_LAST_PLACE, dtype=torch.uint16)
        state["step"] += 1
        hyper = native.Hyper(
            group["lr"], *group["betas"], group["eps"], group["weight_decay"], int(state["step"])
        )
        whole = [native.Segment(0, param.numel(), hyper)]
        grad, moments = array(gradient), (array(state["exp_avg"]), array(state["exp_avg_sq"]))
        if param.dtype == torch.float32:
            native.adamw_fp32(array(param), grad, *moments, whole)
        else:
            native.adamw_split(array(param), array(state["remainder"]), grad, *moments, whole)
        torch.autograd.graph.increment_version(param)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model of three layers; its last normalisation keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@cache
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def token_loss(model: nn.Module, step: int) -> torch.Tensor:
    return token_loss_of(model, batch(step))


def token_loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Run:
    """A model in training, and what the loop itself sees of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[nn.Module, int], torch.Tensor] = token_loss
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def steps(self, when: str = "after step") -> Iterator[int]:
        """Train; the client's turn is ``when``: before forward, after backward, after step."""
        for step in range(STEPS):
            if when == "before forward":
                yield step
            with torch.enable_grad():  # the client may be in a block without
                loss = self.loss_of(self.model, step)
                loss.backward()
            if when == "after backward":
                yield step
            self.optimizer.step()
            if when == "after step":
                yield step
            self.optimizer.zero_grad()
            self.seen[f"loss {step}"] = loss.detach()

    def evaluate(self, name: str) -> None:
        """Note the loss of the model as it is."""
        self.model.eval()
        with torch.no_grad():
            self.seen[name] = self.loss_of(self.model, 100)
        self.model.train()


Client = Callable[[Run], Any]


def run_client(client: Client, run: Run) -> dict[str, torch.Tensor]:
    """What ``client`` returns, by where in it, beside what the loop has seen and left."""
    found = {"client": client(run)}
    run.evaluate("last loss")
    return flat({**found, "loop": run.seen, "weights": run.model.state_dict()})


def assert_same(
    client: Client,
    model: nn.Module | None = None,
    *,
    loss_of: Callable[[nn.Module, int], torch.Tensor] = token_loss,
    **options: Any,
) -> None:
    """``client`` sees, and leaves behind, the same on a plain model and on one wrapped with ``options``."""
    plain = copy.deepcopy(net() if model is None else model)
    streamed = copy.deepcopy(plain)
    expected = run_client(client, Run(plain, Adam(trained(plain)), loss_of))
    with wrapped(streamed, **options):
        run = Run(streamed, streamer.AdamW(trained(streamed), **HYPER), loss_of)
        actual = run_client(client, run)
    assert_equal(actual, expected)
    assert_equal(streamed.state_dict(), plain.state_dict())


@contextmanager
def wrapped(model: nn.Module, **options: Any) -> Iterator[None]:
    """``model`` is wrapped inside the block, where updates come late and slots that are given up are full of
    NaN."""
    late = [0.0]
    backend = ThreadBackend(delays={Lane.HOST: lambda: late[0]}, poison=True)
    streamer.wrap(model, backend=backend, **options)
    try:
        late[0] = LATE
        yield
    finally:
        late[0] = 0.0
        streamer.unwrap(model)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


# --- reads ----------------------------------------------------------------------------------------------


def swa(run: Run, **options: Any) -> Any:
    average = AveragedModel(run.model, **options)
    for _ in run.steps():
        average.update_parameters(run.model)
    return average.state_dict()


def batch_norm(run: Run) -> Any:
    average = AveragedModel(run.model)
    for _ in run.steps():
        average.update_parameters(run.model)
        update_bn([batch(seed)[:, :-1] for seed in (7, 8)], run.model)
    update_bn([batch(seed)[:, :-1] for seed in (7, 8)], average)
    return average.state_dict()


READS: dict[str, Client] = {
    "ema": partial(swa, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    "update_bn": batch_norm,
}


@pytest.mark.parametrize(
    ("client", "dtype"), [*((client, torch.float32) for client in READS), ("ema", torch.bfloat16)], ids=str
)
def test_reads_after_a_step(client: str, dtype: torch.dtype) -> None:
    assert_same(READS[client], copy.deepcopy(net()).to(dtype), layers="layers")


# --- writes through .data -------------------------------------------------------------------------------


#: Layers that are copied at every visit, and layers that stay in their slots.
PLACES = {
    "paged": {"num_slots": 2, "activations": "recompute"},
    "resident": {"num_slots": 3, "activations": "keep"},
}
# --- more that a training script does -------------------------------------------------------------------


def sharpness_aware(run: Run) -> None:
    """SAM: the gradient at weights that were moved uphill through ``.data``, and are moved back."""
    for _ in run.steps("after backward"):
        kept = [param.data.clone() for param in run.params]
        for param in run.params:
            param.data.add_(param.grad, alpha=0.05)
        run.optimizer.zero_grad()
        run.loss_of(run.model, 7).backward()
        for param, value in zip(run.params, kept, strict=True):
            param.data.copy_(value)


def moments_are_reset(run: Run) -> Any:
    for _ in run.steps():
        for param in run.params[::2]:
            run.optimizer.state[param]["exp_avg"].zero_()
            run.optimizer.state[param]["exp_avg_sq"].data.mul_(0.5)
    return [run.optimizer.state[param][name] for param in run.params for name in ("exp_avg", "exp_avg_sq")]


def gradients_kept(run: Run) -> Any:
    """PCGrad and its like: gradients of one loss are kept while those of another are made."""
    for step in range(STEPS):
        run.loss_of(run.model, step).backward()
        first = [param.grad for param in run.params]
        run.optimizer.zero_grad()
        run.loss_of(run.model, step + 50).backward()
        for param, gradient in zip(run.params, first, strict=True):
            param.grad = param.grad + 0.5 * gradient
        run.optimizer.step()
        run.optimizer.zero_grad()


SCRIPTS = [sharpness_aware, moments_are_reset, gradients_kept]


@pytest.mark.parametrize("client", SCRIPTS)
def test_scripts(client: Client) -> None:
    assert_same(client, layers="layers")


# --- averages of libraries ------------------------------------------------------------------------------


def torch_emas(run: Run) -> Any:
    average = ExponentialMovingAverage(run.params, decay=0.5)
    for step in run.steps():
        average.update()
        with average.average_parameters():
            run.evaluate(f"average after {step}")
    average.copy_to()
    return average.shadow_params


def ema_pytorchs(run: Run) -> Any:
    average = EMA(run.model, beta=0.5, update_after_step=0, update_every=1, include_online_model=False)
    for _ in run.steps():
        average.update()
    average.update_model_with_ema()
    return average.ema_model.state_dict()


def diffusers_ema(run: Run, *, foreach: bool = False) -> Any:
    average = EMAModel(run.params, decay=0.5, foreach=foreach)
    for step in run.steps():
        average.step(run.params)
        average.store(run.params)
        average.copy_to(run.params)
        run.evaluate(f"average after {step}")
        average.restore(run.params)
    average.copy_to(run.params)
    return average.shadow_params


AVERAGES = [torch_emas, ema_pytorchs, diffusers_ema, partial(diffusers_ema, foreach=True)]


@pytest.mark.parametrize(("client", "place"), in_turn(AVERAGES, PLACES))
def test_averages_of_libraries(client: Client, place: str) -> None:
    assert_same(client, layers="layers", **PLACES[place])


# --- trainers and models of libraries -------------------------------------------------------------------


def merging(run: Run) -> Any:
    """Evaluates with the adapters merged into the frozen base, which peft writes through ``.data``."""
    base = []
    for step in run.steps():
        run.model.merge_adapter()
        run.evaluate(f"merged after {step}")
        base.append([param.detach().clone() for param in run.params if not param.requires_grad])
        run.model.unmerge_adapter()
        run.evaluate(f"unmerged after {step}")
    run.model.merge_adapter()
    return base


@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")
@pytest.mark.parametrize("place", PLACES)
def test_peft_merges_adapters(place: str) -> None:
    assert_same(merging, lora(lora_dropout=0.0), loss_of=labelled_loss, **PLACES[place])


class Module(L.LightningModule):
    """Validates after each epoch, with whatever weights a callback has put into its place."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = run.model
        #: a function is the same in a copy, which is made of the module: no copies of the optimizer
        self.run = lambda: run

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = token_loss_of(self.model, tokens)
        self.run().seen[f"loss {self.global_step}"] = loss.detach()
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.run().seen[f"validation loss {self.global_step}"] = token_loss_of(self.model, tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.run().optimizer


def with_lightning(run: Run, make: Callable[[], L.Callback]) -> Any:
    callback = make()
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    fit(Module(run), callback, list(batch(0, size=8)), list(batch(1, size=4)), **options)
    return callback._average_model.module.model.state_dict()


@pytest.mark.filterwarnings(*LIGHTNINGS_OWN)
@pytest.mark.parametrize("make", [WeightAveraging, partial(EMAWeightAveraging, decay=0.5)])
def test_lightning_averages(make: Callable[[], L.Callback]) -> None:
    assert_same(partial(with_lightning, make=make), layers="layers")


def decoder() -> nn.Module:
    with warnings.catch_warnings():
        # it scripts a function when it is imported, of which PyTorch warns, in releases' own categories
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        from x_transformers import Decoder, TransformerWrapper
    torch.manual_seed(0)
    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers)


def test_a_model_of_x_transformers() -> None:
    assert_same(diffusers_ema, decoder())
