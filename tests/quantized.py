"""A Llama whose layers hold quantized weights, by kind of quantization, with adapters beside them; what is
compared of such models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import streamer
from streamer.backends.base import Lane
from streamer.engine.handle import home_of, wrapped
from tests.optim.masters import SGDOnMasters
from tests.reference import hugging_face

#: Kinds by the library that makes them.
TORCHAO = ("torchao int8", "torchao float8", "torchao nf4")
BITSANDBYTES = ("bitsandbytes nf4", "bitsandbytes fp4", "bitsandbytes int8")
KINDS = (*TORCHAO, *BITSANDBYTES)

LAYERS = "model.layers"


@pytest.fixture(autouse=True)
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes evaluates 4 bits on some CPUs in another layout, in which their scales have fewer bits."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


class Adapted(nn.Module):
    """A linear module and a LoRA adapter with dropout beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x)
        return base + self.up(self.down(self.dropout(x)))


def quantize(linear: nn.Linear, kind: str | None) -> nn.Module:
    """``linear``, or what stands in for it, with a quantized weight; without a ``kind`` as it is."""
    if kind is None:
        return linear
    if kind == "torchao nf4":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        linear.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 16), requires_grad=False)
        return linear
    if kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(linear, Int8WeightOnlyConfig() if kind.endswith("int8") else Float8WeightOnlyConfig())
        return linear
    import bitsandbytes as bnb

    sizes = linear.in_features, linear.out_features
    if kind.endswith("int8"):
        made: Any = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        quant_type = kind.split()[-1]
        made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=linear.weight.dtype, quant_type=quant_type)
        made.weight = bnb.nn.Params4bit(
            linear.weight.data,
            requires_grad=False,
            quant_type=quant_type,
            module=made,
            # both ways to store the scales
            compress_statistics=quant_type == "nf4",
        )
        # an evaluation of the plain model would pack it anew on some CPUs, and lose bits
        made.support_avx512bf16_for_cpu = False
    quantized: nn.Module = made.to("cpu")
    return quantized


def by_table(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """The values of ``codes``. Kernels of bitsandbytes for some CPUs take scales of others, where a row is no
    whole number of blocks."""
    packed = codes.view(torch.uint8).view(-1)
    scales = state.absmax
    if state.nested:
        of_scales = state.state2
        by_block = of_scales.absmax.repeat_interleave(of_scales.blocksize)[: scales.numel()]
        scales = of_scales.code[scales.int()] * by_block + state.offset
    values = state.code[torch.stack([packed >> 4, packed & 15], 1).view(-1).int()]
    numel = state.shape.numel()
    scaled = values[:numel] * scales.repeat_interleave(state.blocksize)[:numel]
    return scaled.to(state.dtype).view(state.shape)


def sizes(width: int, layers: int) -> dict[str, Any]:
    """Of a tiny Llama with dropout."""
    return {
        "vocab_size": 128,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": 0.1,
        "use_cache": False,
        "max_position_embeddings": 32,
    }


def llama(kind: str | None, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """In training mode, with dropout; only the adapters are trained."""
    model: LlamaForCausalLM = hugging_face(**sizes(64, layers)).to(dtype)
    for layer in model.model.layers:
        for name, linear in [*linears(layer)]:
            owner = layer.get_submodule(name.rpartition(".")[0])
            base = quantize(linear, kind)
            adapted = Adapted(base, linear.in_features, linear.out_features).to(dtype=dtype)
            setattr(owner, name.rpartition(".")[2], adapted if "proj" in name else base)
    for name, param in model.named_parameters():
        param.requires_grad_(".up." in name or ".down." in name)
    return model.train()


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    tokens = torch.randint(0, 128, (2, 16))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def history(model: nn.Module) -> list[Any]:
    """The losses and gradients of two steps, the second with weights that were updated."""
    optimizer = sgd(model)
    seen: list[Any] = []
    for step in range(2):
        loss = loss_of(model, step)
        loss.backward()
        seen.append(loss.item())
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of PyTorch over what ``model`` trains, with fp32 masters whether it is wrapped or not."""
    is_wrapped = home_of(trained(model)[0]) is not None
    return (torch.optim.SGD if is_wrapped else SGDOnMasters)(trained(model), lr=0.1)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.train(False)(input_ids=torch.arange(16)[None]).logits
    return found


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """A step without values on the device "meta"."""
    tokens = torch.zeros(2, 16, dtype=torch.long, device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_moved(model: nn.Module, run: Callable[[], None]) -> dict[Lane, int]:
    """By lane, in ``run``, to its end."""
    moved: dict[Lane, int] = dict.fromkeys(Lane, 0)
    backend = wrapped(model).executor.backend
    submit = backend.submit

    def counted(lane: Lane, work: Any, waits: Any, nbytes: int) -> Any:
        moved[lane] += nbytes
        return submit(lane, work, waits, nbytes)

    backend.submit = counted  # type: ignore[method-assign]
    try:
        run()
        streamer.synchronize(model)
    finally:
        backend.submit = submit  # type: ignore[method-assign]
    return moved
