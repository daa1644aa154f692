"""LoRA outside of the model, as kohya's scripts have it: python docs/examples/kohya_lora.py

The network replaces the forward of Linear modules and holds its own parameters. They stay on the device, with
an ordinary optimizer. The wrapped base is frozen and streamed.
"""

import torch
from torch import nn
from torch.nn import functional as F

import streamer
from models.gpt2 import GPT


class LoRAModule(nn.Module):
    """Adds a low-rank product to a Linear module, which it does not own."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank
        self.original = linear.forward  # no submodule
        linear.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.original(x) + self.up(self.down(x)) * self.scale


class LoRANetwork(nn.Module):
    def __init__(self, model: nn.Module, rank: int = 4, alpha: float = 4.0) -> None:
        super().__init__()
        linears = [module for module in model.transformer.h.modules() if isinstance(module, nn.Linear)]
        self.loras = nn.ModuleList(LoRAModule(linear, rank, alpha) for linear in linears)


torch.manual_seed(0)
model = GPT(vocab_size=256, block_size=32, n_layer=3, n_head=2, n_embd=32)
model.requires_grad_(False)
streamer.wrap(model, layers="transformer.h")
device = model.lm_head.weight.device
network = LoRANetwork(model).to(device)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)

tokens = torch.randint(256, (4, 33), device=device)
for step in range(10):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
torch.save(network.state_dict(), "lora.pt")
