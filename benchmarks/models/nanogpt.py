"""nanoGPT's model (https://github.com/karpathy/nanoGPT): GPT-2's blocks, on bytes.

Each block adds to a residual stream h, as in GPT-2:

    h = h + attention(layer_norm(h))       causal; positions are an embedding, added once
    h = h + mlp(layer_norm(h))             down(gelu(up(x))), hidden width 4 times the model's

Linear layers and norms have no biases, and the head's weight is the token embedding's, as in
nanoGPT's ``train.py``. Weights start from N(0, 0.02), the last of each branch divided by
sqrt(2 layers). `CHARACTERS` is the shape of its published ``config/train_shakespeare_char.py``;
the vocabulary is the 256 bytes instead of Shakespeare's 65 characters. That config has a dropout of
0.2, because its 5,000 steps of 64 windows see one megabyte many times. There is none here, as in
nanoGPT's own example for a CPU: short runs on a long text see hardly any byte twice.

Shapes: B batch, T context, C width, H heads, D = C / H, F = 4 C, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.training.gpt import INIT_STD, VOCABULARY, Sizes

CHARACTERS = Sizes(layers=6, width=384, heads=6, context=256)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTHD = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q_BHTD, k_BHTD, v_BHTD = (z.transpose(1, 2) for z in qkv_BTHD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BTC)))
        return out


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width, bias=False)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width, bias=False)
        self.mlp = MLP(sizes)

    def forward(self, h_BTC: Tensor) -> Tensor:
        h_BTC = h_BTC + self.attention(self.attention_norm(h_BTC))
        out: Tensor = h_BTC + self.mlp(self.mlp_norm(h_BTC))
        return out


class NanoGPT(nn.Module):
    """Tokens (B, T) and the tokens after them -> the mean cross-entropy, in nats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("proj.weight", "down.weight"))
                std = INIT_STD / math.sqrt(2 * sizes.layers if last else 1)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        h_BTC = self.embedding(tokens_BT) + self.positions(positions_T)
        for block in self.blocks:
            h_BTC = block(h_BTC)
        logits_BTV = self.head(self.norm(h_BTC))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
