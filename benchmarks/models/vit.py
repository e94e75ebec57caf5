"""A small vision transformer ("An image is worth 16x16 words", arXiv 2010.11929, section 3.1).

An image becomes patches by a convolution whose stride is its size, a class token stands before
them, and positions are learned. Blocks are those of the paper, before-norm with LayerNorm, biases
and GELU; the class token's last state gives the logits. 24 x 24 pixels in patches of 4 x 4 are
37 tokens, so that B images are 37 B rows: a multiple of 16 for few B only.

Shapes: B images, T tokens, C width, H heads, D = C / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.models.hex_digits import CLASSES, SIDE

PATCH = 4
TOKENS = (SIDE // PATCH) ** 2 + 1
STD = 0.02  # of positions; other weights as in the paper's code, Xavier's


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTHD = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q_BHTD, k_BHTD, v_BHTD = (z.transpose(1, 2) for z in qkv_BTHD)
        p_BHTT = (q_BHTD @ k_BHTD.mT / math.sqrt(q_BHTD.shape[-1])).float().softmax(-1)
        y_BHTD = p_BHTT.to(v_BHTD.dtype) @ v_BHTD
        out: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, h_BTC: Tensor) -> Tensor:
        h_BTC = h_BTC + self.attention(self.attention_norm(h_BTC))
        out: Tensor = h_BTC + self.feed_forward(self.feed_forward_norm(h_BTC))
        return out


class ViT(nn.Module):
    """Images (B, 1, 24, 24) -> logits (B, 16)."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(torch.empty(TOKENS, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        nn.init.normal_(self.positions, std=STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        patches_BTC = self.patches(images).flatten(2).transpose(1, 2)
        class_B1C = self.class_token.expand(len(images), 1, -1).to(patches_BTC.dtype)
        h_BTC = self.blocks(torch.cat((class_B1C, patches_BTC), 1) + self.positions)
        logits: Tensor = self.head(self.norm(h_BTC[:, 0]))
        return logits
