"""One transformer on bytes, as Llama; and the same unit-scaled.

Each block adds to a residual stream h, as in Llama (arXiv:2302.13971):

    h = h + attention(rms_norm(h))      causal, rotary positions, also with grouped queries
    h = h + swiglu(rms_norm(h))         down(silu(gate) * up)

There are no biases and no dropout. `Stack` is the blocks alone, whose time is measured; `GPT` is
the whole model. Query, key and value are one product, and so are gate and up.

Shapes: B batch, T tokens, C width, H query heads, G key/value heads, D = C / H, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import float8.unit_scaling as uu

INIT_STD = 0.02  # GPT-2's and Llama's; the last layer of each branch is divided by sqrt(2 layers)
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of a batch that it trains on.

    Args:
        context: tokens of a sequence.
        kv_heads: of grouped queries; as many as ``heads`` by default.
        feed_forward: 8/3 of the width in multiples of 64 by default.
    """

    layers: int
    width: int
    heads: int
    context: int
    kv_heads: int = 0
    feed_forward: int = 0
    vocabulary: int = 256
    batch: int = 1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.width % 16:
            raise ValueError(
                f"width {self.width} must be a multiple of 16 and of twice the {self.heads} heads"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return self.feed_forward or math.ceil(self.width * 8 / 3 / 64) * 64


# LLaMA at batch 2 and the papers' context of pre-training (arXiv:2307.09288 and 2407.21783, table
# 3); COAT's 2048 for Llama-2-7B. "8b" is a few blocks of Llama-3-8B, to be timed.
# fmt: off
LLAMA = {
    "llama2-7b": Sizes(32, 4096, 32, 2048, 32, 11008, 32_000, 2),
    "llama3-8b": Sizes(32, 4096, 32, 8192, 8, 14336, 128_256, 2),
    "llama3-70b": Sizes(80, 8192, 64, 8192, 8, 28672, 128_256, 2),
    "8b": Sizes(4, 4096, 32, 8192, 8, 14336, batch=2),
    "tiny": Sizes(2, 256, 4, 128, 2, 896),
}
# fmt: on


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads or sizes.heads
        self.head_dim = sizes.head_dim
        together = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(sizes.width, together, bias=False)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor, rotary: Tensor) -> Tensor:
        qkv_BTHD = self.qkv(x_BTC).unflatten(-1, (-1, self.head_dim))
        split = qkv_BTHD.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q_BHTD, k_BGTD, v_BGTD = (z.transpose(1, 2) for z in split)
        rotary = rotary[:, : q_BHTD.shape[2]]
        q_BHTD, k_BGTD = rotate(q_BHTD, rotary), rotate(k_BGTD, rotary)
        v_BGTD = v_BGTD.contiguous()  # a view would keep all three for backward
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=self.kv_heads < self.heads
        )
        out: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.width)
        self.feed_forward = SwiGLU(sizes)

    def forward(self, h_BTC: Tensor, rotary: Tensor) -> Tensor:
        h_BTC = h_BTC + self.attention(self.attention_norm(h_BTC), rotary)
        out: Tensor = h_BTC + self.feed_forward(self.feed_forward_norm(h_BTC))
        return out


class Stack(nn.ModuleList):
    """The blocks: (B, T, C) -> (B, T, C)."""

    rotary: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(Block(sizes) for _ in range(sizes.layers))
        table = rotary_table(sizes.context, sizes.head_dim)
        self.register_buffer("rotary", table, persistent=False)

    def forward(self, h_BTC: Tensor) -> Tensor:
        for block in self:
            h_BTC = block(h_BTC, self.rotary)
        return h_BTC


class GPT(nn.Module):
    """Tokens (B, T) and targets (B, T) -> their mean cross-entropy, in nats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = Stack(sizes)
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                last = name.endswith(("proj.weight", "down.weight"))
                std = INIT_STD / math.sqrt(2 * sizes.layers if last else 1)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = self.head(self.norm(self.blocks(self.embedding(tokens_BT))))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def rotary_table(context: int, head_dim: int) -> Tensor:
    """(2, T, D/2): cosines and sines of position x frequency (RoFormer, arXiv:2104.09864)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTD: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by their position's angles, rounding once at the end."""
    cos, sin = rotary.unbind(0)
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTD.dtype)


def unit_stack(sizes: Sizes, **options: Any) -> nn.Module:
    """The blocks of a unit-scaled model; options are those of `uu.TransformerLayer`."""
    return uu.TransformerStack(
        sizes.layers, hidden_size=sizes.width, heads=sizes.heads, is_causal=True,
        rotary_base=ROTARY_BASE, **options,
    )  # fmt: skip


class UnitGPT(nn.Sequential):
    """The same unit-scaled; the feed-forward width is four times the model's."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        super().__init__(
            OrderedDict(
                embedding=uu.Embedding(sizes.vocabulary, sizes.width),
                layers=unit_stack(sizes, **options),
                norm=uu.RMSNorm(sizes.width),
                head=uu.LinearReadout(sizes.width, sizes.vocabulary),
            )
        )

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:  # type: ignore[override]
        logits_BTV = super().forward(tokens_BT).float()
        return uu.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
