"""Names of PyTorch that this library uses and PyTorch does not document.

Any release may change them. If one is missing, `_find` raises an ImportError of one line that names its use
in the library; functions below document their own fallbacks. Each has a test of its behaviour in
tests/test_torch_private.py, which passes with releases 2.10 to 2.15.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

P = ParamSpec("P")
T = TypeVar("T")


def _find(path: str, why: str) -> Any:
    """The attribute ``path`` of ``torch``. Raises ImportError, with ``why``, if it is missing."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise ImportError(
                f"PyTorch {torch.__version__} has no torch.{path}, by which streamer {why}: "
                "install a release from 2.10 to 2.15"
            )
    return found


# tensor subclasses: `SubclassesOff` opens a block in which PyTorch treats them as plain tensors,
# `SubclassesOn` one inside it in which it does not
SubclassesOff: Any = _find("_C.DisableTorchFunctionSubclass", "touches guarded parameters as plain ones")
SubclassesOn: Any = _find("_C._EnableTorchFunction", "runs a layer as its user would")

# autograd: the number of the backward that runs in this thread (-1 outside of one), whether it keeps its
# graph, whether it will execute a node (RuntimeError in `torch.autograd.grad`), a function for its end; a
# way through a graph without the checks of `torch.autograd.backward`
backward_number: Callable[[], int] = _find("_C._current_graph_task_id", "knows one backward from another")
keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", "frees graphs")
comes_to: Callable[[Node], bool] = _find("_C._will_engine_execute_node", "knows which gradients to make")
when_backward_ends: Callable[[Callable[[], None]], None] = _find(
    "autograd.Variable._execution_engine.queue_callback", "waits for gradients where backward ends"
)
run_backward: Callable[..., Any] = _find(
    "autograd.Variable._execution_engine.run_backward", "goes back through a layer's own graph"
)

# hooks for saved tensors (pack, unpack): remove the last ones, set others, read the last ones
_HOOKS = "saves past a checkpoint"
pop_saved_hooks: Callable[[], None] = _find("_C._autograd._pop_saved_tensors_default_hooks", _HOOKS)
push_saved_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _find(
    "_C._autograd._push_saved_tensors_default_hooks", _HOOKS
)
_top_hooks: Any = _find("_C._autograd._top_saved_tensors_default_hooks", _HOOKS)

# modes: the open ones of `torch.utils._python_dispatch`, autocast of any device, `torch.jit.trace`, and
# transforms of `torch.func`; tensors that belong to one, and batches of gradients
# (``is_grads_batched=True``)
dispatch_modes: Callable[[], list[Any]] = _find(
    "utils._python_dispatch._get_current_dispatch_mode_stack", "counts a loop's operations by one round"
)
in_autocast: Callable[[], bool] = _find("_C._is_any_autocast_enabled", "lets autocast keep no cast weights")
in_trace: Callable[[], bool] = _find("_C._is_tracing", "refuses to be recorded")
in_transform: Callable[[], bool] = _find("_C._are_functorch_transforms_active", "refuses torch.func")
is_of_transform: Callable[[torch.Tensor], bool] = _find(
    "_C._functorch.is_functorch_wrapped_tensor", "knows tensors that have no memory to share"
)
is_batched: Callable[[torch.Tensor], bool] = _find(
    "_C._functorch.is_legacy_batchedtensor", "refuses batched gradients"
)

# GradScaler divides gradients by its scale with the first of these, or checks whether they are finite; all of
# them read numbers that PyTorch has copied with ``non_blocking=True``: a scale, a flag, a learning rate
check_finite: Callable[..., Any] = _find(
    "_amp_foreach_non_finite_check_and_unscale_", "knows what a GradScaler does to gradients"
)
take_copies: frozenset[Callable[..., Any]] = frozenset(
    (
        check_finite,
        *(_find(f"_fused_{name}_", "waits for such numbers") for name in ("adam", "adamw", "adagrad")),
    )
)

# memory: a CUDA event without the Python frame that `torch.cuda.Event` adds, the holders of a storage,
# settings of CUDA's allocator (written as in ``PYTORCH_CUDA_ALLOC_CONF``; omitted ones return to their
# defaults)
CudaMark: Any = _find("_C._CudaEventBase", "marks when copies and kernels are done")
_use_count: Callable[[int], int] = _find("_C._storage_Use_Count", "sees who else holds a slot")
_LIMIT = "keeps to a limit of device memory"
set_allocator: Callable[[str], None] = _find("_C._accelerator_setAllocatorSettings", _LIMIT)
_allocator_now: Any = _find("cuda.memory._snapshot", _LIMIT)


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of the storage of ``tensor``, also on the meta device, where all addresses are equal. For
    a tensor without a storage (a sparse one) it is negative, and unique to this object."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return -id(tensor)


#: By layout, the functions that return the tensors in a sparse tensor.
_SPARSE_PARTS: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is sparse, in any layout."""
    return tensor.layout in _SPARSE_PARTS


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and, last, the values of a sparse tensor, without gradients."""
    plain = tensor.detach()
    return [part(plain) for part in _SPARSE_PARTS[tensor.layout]]


def sparse_of(like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sparse tensor in the form of ``like``, with other ``parts``, as from `sparse_parts`."""
    if like.layout is torch.sparse_coo:
        make: Any = partial(torch.sparse_coo_tensor, is_coalesced=like.is_coalesced())
    else:
        make = partial(torch.sparse_compressed_tensor, layout=like.layout)
    # the indices are PyTorch's own and need no check
    tensor: torch.Tensor = make(*parts, like.shape, check_invariants=False)
    return tensor


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage of ``tensor``; of its elements if it has no accessible storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return tensor.numel() * tensor.element_size()


def storage_owners(tensor: torch.Tensor) -> int:
    """The number of tensors and other objects that hold the storage of ``tensor``."""
    return _use_count(storage_id(tensor))


def top_saved_hooks() -> Any:
    """The hooks for saved tensors, (pack, unpack), that were set last; None if there are none."""
    return _top_hooks(True)


def set_accumulation_hook(leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Set a hook on ``leaf``, which has no such hooks, that runs after a gradient was added, as
    `torch.Tensor.register_post_accumulate_grad_hook` does, without a handle."""
    leaf._post_accumulate_grad_hooks = OrderedDict(only=hook)


def allocator_settings() -> dict[str, Any]:
    """The settings of PyTorch's allocator of CUDA memory; with ``PYTORCH_CUDA_ALLOC_CONF`` the text that was
    set last, in the environment or later."""
    return dict(_allocator_now()["allocator_settings"])


def skip_code(code: CodeType) -> None:
    """Make `torch.compile` run functions with this ``code``, and their callees, uncompiled."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def without_compiler(method: Callable[P, T]) -> Callable[P, T]:
    """``method`` without the wrapper that keeps `torch.compile` away from it, unless the compiler is
    imported: the wrapper imports it, which takes as long as all of PyTorch."""
    plain: Callable[P, T] = getattr(method, "__wrapped__", method)
    return method if "torch._dynamo" in sys.modules else plain


def without_values() -> AbstractContextManager[object]:
    """Inside the block PyTorch creates tensors with shapes and storages, but without values or memory."""
    # imported here: it takes half a second
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def in_distributed_forward() -> bool:
    """Whether a module inside a `DistributedDataParallel` is running its forward."""
    return DistributedDataParallel._active_ddp_module is not None


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """The timeout of a process group's collectives on ``device``; if its backend has none, PyTorch's default
    for gloo, 30 minutes."""
    try:
        found = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        found = None
    return found if isinstance(found, timedelta) else timedelta(minutes=30)


def store_of(name: str) -> Any:
    """The store of torch.distributed, for keys that begin with ``name``, on a separate connection."""
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    group: Any = dist.group.WORLD
    return PrefixStore(name, group.get_group_store().clone())


def gloo_group(store: Any, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Connections between ``size`` processes that find one another in ``store`` under ``name``, for messages
    between two of them. They are closed with the last reference."""
    from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)


def all_gather_flat(found: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    """Fill ``found`` with the ``mine`` of each rank of ``group``, one after the other."""
    from torch import distributed as dist  # PyTorch may be built without it

    # newer releases warn of the old name
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found, mine, group=group)


def import_compiler() -> None:
    """Import `torch._dynamo`, which some operations do at their first run: the frames of that import keep
    tensors that a plan would count."""
    importlib.import_module("torch._dynamo")
