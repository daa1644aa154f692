"""GPT-2 in plain PyTorch: the decoder of Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners". The submodules bear the names of the released weights, so those can be carried over."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

#: Makes a loss of hidden states and the head's weight.
LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention: [batch, time, n_embd] -> the same shape."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [batch, time, 3 * n_embd] -> three of [batch, n_head, time, head]
        query, key, value = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )
        # The functional form knows nothing of train() and eval(), so dropout is switched off by hand.
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(-2)))


class MLP(nn.Module):
    """Two linear layers around a GELU: [batch, time, n_embd] -> the same shape."""

    def __init__(self, n_embd: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        # The released weights were trained with the tanh approximation; the exact GELU gives other logits.
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """One layer: attention, then the MLP, each normalised before and added to its input."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd, bias=bias)
        self.attn = Attention(n_embd, n_head, dropout, bias)
        self.ln_2 = nn.LayerNorm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, dropout, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 language model; the defaults are the 124M-parameter one.

    Args:
        vocab_size: tokens are 0 .. vocab_size - 1.
        block_size: the longest sequence, in tokens.
        n_layer, n_head, n_embd: blocks, attention heads in each, and the width of the residual stream.
        dropout: the probability after the embeddings, in attention and after each residual projection.
        bias: whether linear layers and layer norms have one.
        tied: whether the head shares its weight with the token embedding, as in GPT-2.

    Raises ValueError where n_head does not divide n_embd. May be built under ``torch.device("meta")``.
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        block_size: int = 1024,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        dropout: float = 0.0,
        bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(
                f"n_embd={n_embd} is not divisible by n_head={n_head}; "
                f"the nearest larger n_embd is {-(-n_embd // n_head) * n_head}"
            )
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(n_embd, n_head, dropout, bias) for _ in range(n_layer)),
                "ln_f": nn.LayerNorm(n_embd, bias=bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.n_layer = n_layer
        self.apply(self.init_weights)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Give one of this model's modules its first values, those in it having theirs: for `apply`.

        GPT-2's initialisation (section 2.3 of the paper): N(0, 0.02), and the projections that end a residual
        branch scaled by 1/sqrt(2 * n_layer), so that the sum of all branches keeps its variance."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Attention | MLP):
            module.c_proj.weight.mul_(1 / math.sqrt(2 * self.n_layer))
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, loss_of: LossOf | None = None) -> torch.Tensor:
        """Logits [batch, time, vocab_size] of the next token, for int64 ``tokens`` [batch, time].

        With ``loss_of``, what that makes of the hidden states [batch, time, n_embd] and the head's weight
        [vocab_size, n_embd], whose product the logits are: a loss need not have all of them at once.

        Raises ValueError where time is greater than block_size.
        """
        time = tokens.shape[1]
        if time > self.block_size:
            raise ValueError(
                f"a sequence of {time} tokens is longer than block_size={self.block_size}; "
                f"shorten it or build GPT(block_size={time})"
            )
        positions = torch.arange(time, device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        hidden = self.transformer.ln_f(x)
        return self.lm_head(hidden) if loss_of is None else loss_of(hidden, self.lm_head.weight)

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """``tokens`` int64 [batch, time >= 1] and ``max_new_tokens`` sampled ones: [batch, time + new].

        Sees the last block_size tokens. ``top_k`` samples among the k likeliest only, 1 being greedy;
        ``generator`` lives on the device of the logits. Call ``eval()`` first where there is dropout.
        Raises ValueError for a temperature of 0 or less and for a top_k below 1.
        """
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0; for greedy choice give top_k=1")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1; None samples among all tokens")
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.block_size :])[:, -1] / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            next_token = torch.multinomial(logits.softmax(-1), num_samples=1, generator=generator)
            tokens = torch.cat((tokens, next_token), dim=1)
        return tokens
