"""What kernels take of a GPU's memory while they run, operation by operation: the rules by which plans count
it beside PyTorch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from streamer.simulate.cost import EFFICIENT_TAKES_GROUPS
from streamer.simulate.machine import H200, gpu_properties
from streamer.simulate.temporaries import temporary_bytes, workspace_bytes

#: What the allocator may give on top of what is asked for, rather than split a block.
UNSPLIT = 1 << 20


class Compared(TorchDispatchMode):
    """Inside the block each operation's memory beside its result, by the rules and as allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = gpu_properties(H200, torch.device("cuda"))
        self.found: list[tuple[str, int, int]] = []

    def __enter__(self) -> Compared:
        # What is freed during an operation would be taken for its own. Autograd's thread may hold what is
        # left of a backward until it takes up the next one.
        one = torch.ones((), device="cuda", requires_grad=True)
        torch.autograd.grad(one * one, one)
        gc.collect()
        gc.disable()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        gc.enable()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # blocks of before would be taken for what is a little smaller
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **kwargs)
        taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        said = temporary_bytes(self.machine, func, args, kwargs, result)
        if max(said, taken) > UNSPLIT and not func.is_view:
            shapes = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor)]
            self.found.append((f"{func} of {shapes}", said, taken))
        return result

    def check(self, *, at_least: int) -> None:
        """Fail unless at least so many operations took some MiB, each as much as its rule says."""
        assert len(self.found) >= at_least
        for name, said, taken in self.found:
            assert said == pytest.approx(taken, rel=0.03, abs=UNSPLIT), f"{name}: {said} bytes, taken {taken}"


Reduction = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.cuda_api
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("reduction", "at_least"),
    [
        (lambda x: x.sum(0), 10),
        (lambda x: x.mean(0), 10),
        (lambda x: x.view(4, -1, x.shape[1]).sum((0, 1), keepdim=True), 10),
        (lambda x: x.view(4, -1, x.shape[1]).sum(1), 5),
        (lambda x: x.t().sum(1), 10),
        (lambda x: x[:, : x.shape[1] // 4 * 4].sum(0), 10),
        (lambda x: x.sum(1), 0),
        (lambda x: x.t().sum(0), 0),
        (lambda x: x.sum(), 0),
    ],
    ids=["rows", "mean", "two", "inner", "transposed", "part", "columns", "transposed columns", "all"],
)
def test_reductions(reduction: Reduction, at_least: int, dtype: torch.dtype) -> None:
    with Compared() as compared:
        for rows in (32, 300, 4096, 16384):
            for columns in (64, 768, 1000, 1023, 1026, 4096, 12288):
                reduction(torch.empty(rows, columns, dtype=dtype, device="cuda"))
    compared.check(at_least=at_least)


@pytest.mark.cuda_api
@pytest.mark.parametrize("rows", [5000, 50257])
@pytest.mark.parametrize("width", [512, 4096])
def test_gradients_of_embeddings(rows: int, width: int) -> None:
    with Compared() as compared:
        for places in (1000, 3072, 3073, 8192):
            indices = torch.zeros(places, dtype=torch.long, device="cuda")
            gradient = torch.empty(places, width, dtype=torch.bfloat16, device="cuda")
            torch.ops.aten.embedding_dense_backward(gradient, indices, rows, -1, False)
    compared.check(at_least=2)


@pytest.mark.cuda_api
@pytest.mark.parametrize("shape", [(4096, 1000), (2, 8, 512, 512)])
def test_softmax(shape: tuple[int, ...]) -> None:
    scores = torch.empty(shape, device="cuda", requires_grad=True)
    with Compared() as compared:
        torch.autograd.grad(torch.softmax(scores, -1), scores, torch.empty_like(scores))
        torch.ops.aten._safe_softmax(scores, -1)
    compared.check(at_least=2)


#: Sequences, heads, tokens, numbers of a head, heads of keys.
ATTENTIONS = [
    (2, 8, 1024, 64, 8),
    (2, 8, 1000, 64, 8),
    (2, 16, 2048, 80, 16),
    (2, 8, 1024, 128, 2),
    (2, 8, 1024, 192, 8),
    (1, 2, 4096, 64, 2),
    (1, 1, 16384, 64, 1),
    (1, 4, 300, 128, 4),
]
KINDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, False),
    "efficient, fp32": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, False),
    "efficient, mask": (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, True),
}


def heads_of(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, as projections of tokens give them."""
    sequences, heads, tokens, dim, key_heads = sizes

    def made(heads: int) -> torch.Tensor:
        made = torch.empty(sequences, tokens, heads, dim, dtype=dtype, device="cuda")
        return made.transpose(1, 2).requires_grad_()

    return made(heads), made(key_heads), made(key_heads)


@pytest.mark.cuda_api
@pytest.mark.parametrize("sizes", ATTENTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, sizes: tuple[int, int, int, int, int]) -> None:
    backend, dtype, masked = KINDS[kind]
    sequences, heads, tokens, _, key_heads = sizes
    grouped = key_heads != heads
    if grouped and (masked or (backend is SDPBackend.EFFICIENT_ATTENTION and not EFFICIENT_TAKES_GROUPS)):
        pytest.skip("this kernel has no groups of heads")
    query, key, value = heads_of(sizes, dtype)
    mask = torch.empty(sequences, 1, tokens, tokens, dtype=dtype, device="cuda") if masked else None
    with sdpa_kernel(backend), Compared() as compared:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=grouped
        )
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    compared.check(at_least=int(tokens >= 1000))


@pytest.mark.cuda_values  # nullgpu has no cuDNN
@pytest.mark.parametrize("sizes", [sizes for sizes in ATTENTIONS if sizes[3] <= 128], ids=str)
def test_attention_of_cudnn_takes_what_flash_attention_takes(sizes: tuple[int, int, int, int, int]) -> None:
    """Plans count flash attention in half precision; from compute capability 9.0 on PyTorch takes cuDNN's."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN's attention in bf16 needs compute capability 8.0")
    query, key, value = heads_of(sizes, torch.bfloat16)

    def taken(backend: SDPBackend) -> int:
        with sdpa_kernel(backend):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
            torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
            return torch.cuda.max_memory_allocated() - before

    expected = taken(SDPBackend.FLASH_ATTENTION)
    assert taken(SDPBackend.CUDNN_ATTENTION) == pytest.approx(expected, rel=0.03, abs=UNSPLIT)


@pytest.mark.cuda_api
def test_workspaces_of_cublas() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    layer = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="cuda") for _ in range(2)))
    inputs = torch.empty(64, 64, device="cuda")
    # autograd's thread adds a bias too where a layer runs again
    checkpoint(layer, inputs, use_reentrant=False).sum().backward()
    layer.zero_grad()
    with_products = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    expected = workspace_bytes(gpu_properties(H200, torch.device("cuda")))
    assert with_products - torch.cuda.memory_allocated() == expected
