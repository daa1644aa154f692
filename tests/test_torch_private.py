"""What PyTorch does not document means what this library takes it to mean, and is used in one file alone."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from streamer import torch_private as private

HOME = Path(__file__).parent.parent / "streamer"
#: What only `streamer.torch_private` may write. Attributes of tensors and modules that PyTorch's own
#: documentation speaks of (_version, _base, _parameters, _buffers, _modules) are anybody's.
PRIVATE = re.compile(
    r"torch\._C\b|\._cdata\b|_execution_engine|_active_ddp_module|_current_level|_sequence_nr\b|_raw_saved_|"
    r"\._is_view\b|_creation_meta|torch\._amp_|torch\._fused_ada"
)


def test_no_other_file_uses_what_is_private() -> None:
    found = [
        (path.name, line)
        for path in HOME.rglob("*.py")
        if path.name != "torch_private.py"
        for line in ast.unparse(ast.parse(path.read_text())).splitlines()
        if PRIVATE.search(line) and not line.lstrip().startswith('"""')
    ]
    assert found == []


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"PyTorch .* has no torch\._C\._gone, by which streamer counts"):
        private._find("_C._gone", "counts")


def test_a_gradscaler_and_fused_optimizers_call_what_takes_copies() -> None:
    called = set()

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(function)
            return function(*args, **kwargs or {})

    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        weight = nn.Parameter(torch.ones(2))
        scaler, optimizer = torch.amp.GradScaler("cpu"), kind([weight], fused=True)
        scaler.scale(weight.sum()).backward()
        with Calls():
            scaler.step(optimizer)
    assert private.take_copies <= called


def test_subclasses_are_switched_off_and_on() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("asked")

    tensor = torch.ones(2).as_subclass(Loud)
    with private.SubclassesOff():
        assert torch.Tensor.sum(tensor).item() == 2
        with private.SubclassesOn(), pytest.raises(AssertionError, match="asked"):
            torch.Tensor.sum(tensor)


def test_the_backward_that_is_running_is_known() -> None:
    found: list[Any] = []
    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in (x, other)]
    y = x * other

    def look(_: object) -> None:
        private.when_backward_ends(lambda: found.append("ended"))
        found.append((private.backward_number(), private.keeps_graph(), list(map(private.comes_to, nodes))))

    y.register_hook(look)
    assert private.backward_number() == -1
    y.backward(retain_graph=True, inputs=[x])
    y.backward()
    (first, kept, comes), ended, (second, kept_again, comes_again), _ = found
    assert ended == "ended"
    assert first != second and min(first, second) >= 0
    assert (kept, kept_again) == (True, False)
    assert (comes, comes_again) == ([True, False], [True, True])
    with pytest.raises(RuntimeError, match=r"running autograd\.grad\(\)"):
        z = x * 2
        z.register_hook(lambda _: private.comes_to(nodes[0]) and None)
        torch.autograd.grad(z, x)


def test_a_backward_runs_from_edges_and_adds_gradients_up() -> None:
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    results = (weight * 2, weight * other)
    edges = tuple(get_gradient_edge(result) for result in results)
    gradients = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    for keeps in (True, False):
        private.run_backward(edges, gradients, keeps, False, (), allow_unreachable=True, accumulate_grad=True)
    assert weight.grad is not None and weight.grad.tolist() == [10, 16]
    assert other.grad is not None and other.grad.tolist() == [6, 8]
    with pytest.raises(RuntimeError, match="second time"):
        private.run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def test_storages_and_their_owners_are_told() -> None:
    tensor, meta = torch.zeros(4), torch.zeros(4, device="meta")
    assert private.storage_id(tensor) == private.storage_id(tensor[2:])
    assert private.storage_id(meta) != private.storage_id(torch.zeros(4, device="meta"))
    before = private.storage_owners(tensor)
    view = tensor[2:]
    assert private.storage_owners(tensor) == before + 1
    del view
    assert private.storage_owners(tensor) == before


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_consists_of_others_and_has_no_storage(layout: str) -> None:
    size = ((2, 2),) if layout.startswith("b") else ()
    tensor = getattr(torch.eye(4), "to_sparse" if layout == "coo" else f"to_sparse_{layout}")(*size)
    with pytest.raises(NotImplementedError):
        tensor.untyped_storage()
    assert private.is_sparse(tensor) and not private.is_sparse(torch.eye(4))
    assert private.storage_id(tensor) == private.storage_id(tensor) != private.storage_id(tensor.detach())
    parts = private.sparse_parts(tensor)
    again = private.sparse_of(tensor, parts)
    assert again.layout is tensor.layout and torch.equal(again.to_dense(), torch.eye(4))
    assert [*map(private.storage_id, private.sparse_parts(again))] == [*map(private.storage_id, parts)]


def test_hooks_for_saved_tensors_are_taken_off_and_put_back() -> None:
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooks = private.top_saved_hooks()
        private.pop_saved_hooks()
        assert private.top_saved_hooks() is None
        torch.ones(2, requires_grad=True).exp()
        private.push_saved_hooks(*hooks)
        torch.ones(3, requires_grad=True).exp()
    assert saved == [3]


def test_hooks_are_set_without_handles() -> None:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    private.set_accumulation_hook(x, lambda leaf: seen.append(("added", leaf.grad.item())))  # type: ignore[union-attr]
    (2 * x).backward()
    assert seen == [("added", 2)]


def test_transforms_are_seen() -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((private.in_transform(), private.is_of_transform(x)))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [(True, True), (False, False)]
    with forward_ad.dual_level():
        assert private.in_forward_mode()
    assert not private.in_forward_mode()
    assert not private.in_distributed_forward()


def test_batched_gradients_are_seen() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(private.is_batched(gradient)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    y.sum().backward()
    assert seen == [True, False]


def test_code_is_left_as_it_is_where_the_user_compiles() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    seen: list[bool] = []
    private.skip_code(inner.__code__)
    torch.compile(inner, backend="eager")(torch.ones(1))
    assert seen == [False]


def test_the_store_is_reached_by_another_connection(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        one, other, elsewhere = (private.store_of(name) for name in ("here", "here", "there"))
        one.set("key", "value")
        assert other.get("key") == b"value"
        assert one is not other and not elsewhere.check(["key"])
    finally:
        dist.destroy_process_group()


def test_an_optimizer_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict):
        monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
        assert private.without_compiler(method) is method
        monkeypatch.delitem(sys.modules, "torch._dynamo")
        plain = private.without_compiler(method)
        assert plain.__module__ == method.__module__ and "disable" not in plain.__code__.co_names
        assert plain.__code__ is not method.__code__ and plain.__code__.co_name == method.__name__


def test_an_event_of_cuda_is_what_pytorchs_own_is_made_of() -> None:
    """What it does is seen in tests/backends/test_cuda.py."""
    assert torch.cuda.Event.__bases__ == (private.CudaMark,)
    if torch.cuda.is_available():
        methods = {"record", "wait", "query", "elapsed_time", "synchronize"}
        assert methods <= {*dir(private.CudaMark)}


def test_autocast_is_seen() -> None:
    assert not private.in_autocast()
    with torch.autocast("cpu"):
        assert private.in_autocast()
    assert not private.in_autocast()
