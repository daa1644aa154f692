"""Loops as people write them, each beside the same loop of plain PyTorch."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import home_of, wrapped
from tests.reference import VOCAB, History, assert_parity, batch, language_loss, streamed

#: An epsilon with which Adam does not blow rounding errors up.
CALM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}

Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]
Make = Callable[[nn.Module, Any], torch.optim.Optimizer]


class Calls(list[None]):
    """A list of a class of its own: plain lists are set back before a layer runs again."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)
        self.forwards = Calls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.append(None)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def adamw(model: nn.Module, kind: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **CALM)
    return optimizer


def run(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> History:
    history = History()

    def keep(*_: Any) -> None:
        first.remove()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        history.first_gradients = {name: grad.clone() for name, grad in grads.items()}

    first = optimizer.register_step_pre_hook(keep)
    torch.manual_seed(1)
    history.losses = loop(model, optimizer)
    history.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return history


def compare(loop: Loop, *, make: Make = adamw, net: Callable[[], nn.Module] = Net, **options: Any) -> None:
    """The loop trains a streamed model as it does a plain one; ``make`` is told which AdamW to take."""
    plain = net()
    expected = run(loop, plain, make(plain, torch.optim.AdamW))
    with streamed(net(), layers="layers", **options) as model:
        assert_parity(run(loop, model, make(model, streamer.AdamW)), expected)


def steps(*numbers: int, loss_of: Callable[[nn.Module, int], torch.Tensor] = language_loss) -> Loop:
    """Plain steps with these numbers."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in numbers:
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


# --- optimizers ---------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    # changes betas too
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=10),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        schedule = SCHEDULES[name](optimizer)
        losses, rates = [], []
        for step in range(6):
            losses += steps(step)(model, optimizer)
            schedule.step(*([losses[-1]] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) > 1
        return [*losses, *rates]

    compare(loop)


def test_groups_by_name_and_a_checkpoint_of_them(tmp_path: Path) -> None:
    def make(model: nn.Module, kind: Any) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        plain = [(name, param) for name, param in named if name.endswith("bias") or "norm" in name]
        decayed = [pair for pair in named if pair not in plain]
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.3}]
        optimizer: torch.optim.Optimizer = kind(groups, lr=1e-2, eps=1e-2)
        return optimizer

    compare(steps(0, 1, 2, 3), make=make)
    with streamed(Net()) as model:
        optimizer = make(model, streamer.AdamW)
        steps(0)(model, optimizer)
        state = optimizer.state_dict()
        assert state["param_groups"][0]["param_names"][0] == "layers.0.norm.weight"
        streamer.save(model, optimizer, tmp_path / "here", step=1)
        again = make(model, streamer.AdamW)
        streamer.load(model, again, tmp_path / "here")
        assert again.state_dict()["param_groups"] == state["param_groups"]
        again.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("kind", ["ours", "LBFGS"])
def test_a_closure_that_clips(kind: str) -> None:
    def make(model: nn.Module, ours: Any) -> torch.optim.Optimizer:
        if kind == "ours":
            return adamw(model, ours)
        return torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, history_size=2)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        def closure() -> torch.Tensor:
            torch.manual_seed(0)
            optimizer.zero_grad()
            loss = language_loss(model, step)
            loss.backward()
            if getattr(model, "_streamer", None) is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            else:
                streamer.clip_grad_norm_(model, 0.2)
            return loss

        losses = []
        for step in range(3):  # noqa: B007 - the closure reads it
            losses.append(optimizer.step(closure).item())
        return losses

    compare(loop, make=make)


# --- saving parts of a model --------------------------------------------------------------------------


def test_a_tensor_is_saved_without_its_neighbours(tmp_path: Path) -> None:
    with streamed(Net(), dtype=torch.bfloat16) as model:
        for name in ("layers.1.down.bias", "head.bias"):
            for state in (model.state_dict(), dict(model.named_parameters())):
                file = io.BytesIO()
                torch.save(state[name].detach(), file)
                assert len(file.getvalue()) < 2048, name
        save_model(model, str(tmp_path / "model.safetensors"))  # refuses tensors that share a storage
        saved = load_file(tmp_path / "model.safetensors")
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
        with pytest.raises(
            RuntimeError, match=r"'embed.weight' belongs to a wrapped model.*model.state_dict"
        ):
            torch.save(list(model.parameters()), io.BytesIO())


# --- workers of a data loader -------------------------------------------------------------------------


class Tokens(Dataset[torch.Tensor]):
    """Rows of tokens, and a model that the data set happens to hold."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.model is None or self.model.training
        return batch(index, size=1)[0]


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


#: Python warns so from 3.12 on.
FORKING = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@FORKING
@pytest.mark.usefixtures("no_process_is_left")
def test_forked_workers() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for holder in (None, model):
            loader = DataLoader(
                Tokens(holder),
                4,
                num_workers=2,
                persistent_workers=holder is not None,
                multiprocessing_context="fork",
            )
            for tokens in (tokens for _ in range(2) for tokens in loader):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    # updates are under way when workers are forked
    compare(loop, backend=ThreadBackend(delays={Lane.HOST: lambda: 0.005}))


@FORKING
def test_a_forked_process_neither_hangs_nor_ends_the_lanes() -> None:
    def child(results: Any) -> None:
        # what runs when the process ends, or drops the model
        wrapped(model).close()
        for use in (
            lambda: model(batch(0)[:, :-1]),
            lambda: optimizer.step(),
            lambda: model.state_dict(),
            lambda: streamer.synchronize(model),
            lambda: streamer.unwrap(model),
        ):
            try:
                use()
            except RuntimeError as error:
                results.put(str(error))

    context = multiprocessing.get_context("fork")
    with streamed(Net(), backend=ThreadBackend(delays={Lane.HOST: lambda: 0.01})) as model:
        optimizer = adamw(model, streamer.AdamW)
        language_loss(model, 0).backward()
        optimizer.step()
        language_loss(model, 1).backward()
        results = context.SimpleQueue()
        process = context.Process(target=child, args=(results,))
        process.start()
        process.join(10)
        assert process.exitcode == 0
        for _ in range(5):
            assert "this process was forked from the one that wrapped the model" in results.get()
        steps(0, 1)(model, optimizer)
        assert [t.name for t in threading.enumerate() if t.name.startswith("streamer-")] != []


@pytest.mark.usefixtures("no_process_is_left")
def test_spawned_workers() -> None:
    with streamed(Net()) as model:
        rows = batch(0)
        loader = DataLoader(TensorDataset(rows), 4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(next(iter(loader))[0], rows)
        held = DataLoader(Tokens(model), 2, num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(RuntimeError, match="a wrapped model cannot be pickled"):
            next(iter(held))


# --- checkpoints of activations -----------------------------------------------------------------------


class Around(Net):
    """Checkpoints around every layer."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Segment(Net):
    """One checkpoint around several layers and what is between them."""

    def last(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = torch.sin(layer(x))
        return x

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.last, self.layers[0](self.embed(tokens)), use_reentrant=False)


class Inside(Layer):
    """Checkpoints inside of the layer, with a weight that is used inside and outside of them."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        assert all(home_of(param) is None for param in self.parameters()), "those in the slot"
        return F.gelu(F.linear(x, self.up.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.append(None)
        part = checkpoint(self.part, self.norm(x), use_reentrant=self.reentrant)
        again = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + self.dropout(self.down(part + again + F.linear(x, self.up.weight)))


class OwnFlag(Layer):
    """A layer that checkpoints itself where a flag is set, as Hugging Face's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
@pytest.mark.parametrize(
    ("net", "forwards"),
    [
        (Around, {"recompute": 2, "keep": 1}),
        (partial(Around, True), {"recompute": 3, "keep": 2}),
        (Segment, {"recompute": 3, "keep": 2}),
        (lambda: Net(Inside), {"recompute": 2, "keep": 1}),
        (lambda: Net(partial(Inside, True)), {"recompute": 2, "keep": 1}),
        (lambda: Net(OwnFlag), {"recompute": 2, "keep": 1}),
    ],
    ids=["around", "around-reentrant", "segment", "inside", "inside-reentrant", "own-flag"],
)
def test_checkpoints(net: Callable[[], nn.Module], forwards: dict[str, int], activations: str) -> None:
    counts: list[int] = []

    def counted(model: nn.Module, step: int) -> torch.Tensor:
        counts.append(len(model.layers[1].forwards))
        loss = language_loss(model, step)
        with torch.no_grad():
            model.layers[0](torch.ones(1, 16))  # the others go through backward in other slots than forward
        return loss

    compare(
        steps(0, 1, 2, loss_of=counted), net=net, activations=activations, backend=ThreadBackend(poison=True)
    )
    assert counts[-1] == 2 * forwards[activations.removesuffix("+offload")]
