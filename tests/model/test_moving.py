"""Moving a model in and out of host memory: never more than one unit besides the shards, and all of it comes
back. Measured on processes of their own, by the resident set that the system counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.executor import Executor
from streamer.model import streaming
from tests.reference import attached

MIB = 1 << 20
ROOT = str(Path(__file__).parents[2])
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

#: Eight layers of 16 MiB in fp32, and a root of 1 MiB.
CHILD = """
import gc, json, sys
sys.path.insert(0, {root!r})
import torch, streamer
from torch import nn
from streamer.backends.thread import ThreadBackend
from streamer.store.host import HostStore

torch.set_num_threads(1)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Linear(width, 128, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

def init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)

# memory that is taken once: by threads, kernels, modules
small = streamer.wrap(Net(256, 2), layers="layers", device="cpu", dtype={dtype})
streamer.AdamW(small.parameters())
streamer.unwrap(small)
del small
gc.collect()
empty = status("VmRSS")
device = "meta" if {on_meta} else "cpu"
with torch.device(device):
    model = Net(2048, 8)
built = status("VmRSS")
# only what moving takes, without the gradients and slots that are allocated after it
moved = []
add = HostStore.add
def then_add(self, *args, **kwargs):
    moved.append((status("VmHWM"), status("VmRSS")))
    add(self, *args, **kwargs)
HostStore.add = then_add
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
streamer.wrap(model, layers="layers", device="cpu", dtype={dtype}, init=init if {on_meta} else None)
planned = streamer.stats(model)
optimizer = streamer.AdamW(model.parameters())
wrapped = status("VmRSS")
del optimizer
open("/proc/self/clear_refs", "w").write("5")
streamer.unwrap(model)
unwrap_peak = status("VmHWM")
gc.collect()
print(json.dumps(dict(
    empty=empty, built=built, peak=moved[0][0], moved=moved[0][1], wrapped=wrapped,
    unwrap_peak=unwrap_peak, end=status("VmRSS"),
    host=sum(planned.host_bytes.values()), device=sum(planned.device_bytes.values()),
    shards=sum(planned.host_bytes.get(name, 0) for name in ("weights", "remainders", "fp32 masters")),
)))
"""


def measured(*, on_meta: bool, dtype: str) -> dict[str, int]:
    program = CHILD.format(root=ROOT, on_meta=on_meta, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


#: A layer in fp32, and a quarter of one for what the interpreter and its threads take.
UNIT, SLACK = 16 * MIB, 4 * MIB


@LINUX
@pytest.mark.parametrize(
    ("on_meta", "dtype"), [(True, "torch.bfloat16"), (False, "torch.float32")], ids=["meta", "real"]
)
def test_beside_the_shards_there_is_never_more_than_one_unit(on_meta: bool, dtype: str) -> None:
    seen = measured(on_meta=on_meta, dtype=dtype)
    weights = 8 * UNIT + MIB
    assert seen["shards"] == weights
    assert seen["built"] - seen["empty"] == pytest.approx(0 if on_meta else weights, abs=SLACK)
    # a whole model beside its shards would take twice the weights
    assert seen["peak"] - seen["empty"] <= weights + UNIT + SLACK
    assert seen["moved"] - seen["empty"] <= weights + SLACK
    # the process holds all that is planned, the moments, and nothing else
    moments = 2 * weights
    planned = seen["host"] + seen["device"] + moments
    assert seen["wrapped"] - seen["empty"] == pytest.approx(planned, rel=0.02)
    # gradients and moments are given up before the weights come out
    assert seen["unwrap_peak"] - seen["empty"] <= max(planned, 2 * weights) + SLACK
    # a plain model in fp32 is left
    assert seen["end"] - seen["empty"] == pytest.approx(weights, rel=0.02)


# Errors on the way


class Trouble(Exception):
    """What the tests raise."""


def trouble(*_: Any, **__: Any) -> None:
    raise Trouble


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Linear(8, 8), "layers": nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))}
    )


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ((ThreadBackend, "pin"), torch.bfloat16),
        ((ThreadBackend, "host_buffer"), None),
        ((ThreadBackend, "device_buffer"), torch.float16),
        ((Executor, "__init__"), torch.bfloat16),
        ((streaming, "settle_in"), None),
        ((nn.Module, "register_state_dict_post_hook"), torch.float16),
        ((streaming, "Wrapped"), torch.bfloat16),
    ],
    ids=str,
)
def test_after_an_error_the_model_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, part: tuple[type, str], dtype: torch.dtype | None
) -> None:
    model = stack()
    before, values = attached(model), {k: v.clone() for k, v in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(*part, trouble)
        with pytest.raises(Trouble):
            streamer.wrap(model, layers="layers", device="cpu", dtype=dtype)
    assert attached(model) == before
    after = model.state_dict()
    assert [key for key in values if not torch.equal(after[key], values[key])] == []
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    with_own_storage = {param.untyped_storage().nbytes() for param in model.parameters()}
    assert with_own_storage == {8 * 8 * 4, 8 * 4}
    streamer.unwrap(streamer.wrap(model, layers="layers", device="cpu"))


def test_gradients_that_are_dropped_are_named() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    for layer in model["layers"]:  # type: ignore[attr-defined]
        layer(torch.ones(2)).sum().backward()
    match = r"drops the gradients of layers\.0\.weight, layers\.0\.bias and 2 more: wrap before"
    with pytest.warns(UserWarning, match=match):
        streamer.wrap(model, device="cpu")
    assert all(param.grad is None for param in model.parameters())
    streamer.unwrap(model)
