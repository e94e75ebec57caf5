"""LLaMA: a stack of its blocks, and the whole model.

Each block adds to a residual stream h (arXiv:2302.13971, 2407.21783, and the published code):

    h = h + attention(rms_norm(h))     causal, grouped queries, rotary positions of base 500000
    h = h + swiglu(rms_norm(h))        w2(silu(gate) * up)

with query, key and value in one product and gate and up in another. Norms, rotation, attention and
SwiGLU stay in bfloat16 in every recipe: their time makes a model's speed-up less than a
layer's. `Llama` is the stack alone, whose time is measured; `LanguageModel` has embedding, last
norm, head (not the embedding's weight) and loss as well, whose memory is counted. Embedding and
head stay in high precision in practice.

Shapes: B batch, T tokens, C hidden, H query heads, G key/value heads, D = C / H, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class Sizes:
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int  # of one sequence
    blocks: int
    vocabulary: int = 256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES = {
    "8b": Sizes(4096, 14336, 32, 8, batch=2, tokens=8192, blocks=4),
    "tiny": Sizes(256, 896, 4, 2, batch=1, tokens=128, blocks=2),
}
# Whole models (arXiv:2307.09288 and 2407.21783, table 3), at batch 2 and the papers' context of
# pre-training: 2048 is COAT's for 7B, 4096 and 8192 the models' own.
# fmt: off
MODELS = {
    "llama2-7b": Sizes(4096, 11008, 32, 32, batch=2, tokens=2048, blocks=32, vocabulary=32_000),
    "llama2-70b": Sizes(8192, 28672, 64, 8, batch=2, tokens=4096, blocks=80, vocabulary=32_000),
    "llama3-8b": Sizes(4096, 14336, 32, 8, batch=2, tokens=8192, blocks=32, vocabulary=128_256),
    "llama3-70b": Sizes(8192, 28672, 64, 8, batch=2, tokens=8192, blocks=80, vocabulary=128_256),
    "tiny": SIZES["tiny"],
}
# fmt: on


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        together = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.wqkv = nn.Linear(sizes.hidden, together, bias=False)
        self.wo = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x_BTC: Tensor, rotary: Tensor) -> Tensor:
        qkv_BTHD = self.wqkv(x_BTC).unflatten(-1, (-1, self.head_dim))
        split = qkv_BTHD.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q_BHTD, k_BGTD, v_BGTD = (z.transpose(1, 2) for z in split)
        q_BHTD, k_BGTD = rotate(q_BHTD, rotary), rotate(k_BGTD, rotary)
        v_BGTD = v_BGTD.contiguous()  # a view would keep all three for backward
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.wo(y_BHTD.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w13 = nn.Linear(sizes.hidden, 2 * sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.w13(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.w2(F.silu(gate_BTF) * up_BTF)
        return out


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, h_BTC: Tensor, rotary: Tensor) -> Tensor:
        h_BTC = h_BTC + self.attention(self.attention_norm(h_BTC), rotary)
        out: Tensor = h_BTC + self.feed_forward(self.feed_forward_norm(h_BTC))
        return out


class Llama(nn.Module):
    rotary: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.register_buffer("rotary", rotary_table(sizes.tokens, sizes.head_dim))

    def forward(self, h_BTC: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTC = block(h_BTC, self.rotary)
        return h_BTC


class LanguageModel(nn.Module):
    """The whole model: tokens (B, T) and the tokens after them -> mean cross-entropy, in nats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.stack = Llama(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        h_BTC = self.stack(self.embedding(tokens_BT))
        logits_BTV = self.head(self.norm(h_BTC))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def rotary_table(tokens: int, head_dim: int) -> Tensor:
    """(2, T, D/2): cosines and sines of position x frequency (RoFormer, arXiv:2104.09864)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(tokens).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTD: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by their position's angles."""
    cos, sin = rotary.unbind(0)
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTD.dtype)
