"""A small BERT on bytes: plain or unit-scaled, in float32, float16 or float8.

Masked language modelling (arXiv 1810.04805, section 3.1): 15 % of the bytes are chosen; 80 % of
these are replaced by [MASK], 10 % by a random byte, 10 % stay, and the model predicts the original
byte from both sides. The encoder is the decoder of `decoders.py` without the causal mask; the
weights have equal shapes in both models:

    base    weights from N(0, 0.02), residual branches added as they are, logits / sqrt(d), AdamW
    unit    `uu.TransformerStack` and `uu.optim.AdamW`

A format says what the layers multiply in; parameters, norms, the loss and the readout's product
stay float32:

    fp32    all
    fp16    `torch.autocast` to float16, without loss scaling; on a CPU with the products of
            `scripts/training/half_products.py`, float16's own by a faster way
    fp8     recipe `unit`, that is `.to(float8)` without any scale: E4M3, gradients in E5M2

Shapes: B batch, T bytes, C width, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import float8.unit_scaling as uu
from benchmarks.models.decoders import BETAS, HEAD, Sizes
from benchmarks.models.training import Batches, Loss
from float8 import Float8LinearConfig, convert_to_float8_training
from float8.unit_scaling import functional as U
from scripts.training import gpt
from scripts.training.half_products import HalfProducts

BYTES = 256
MASK = BYTES  # the token that stands for a hidden byte
PADDING = BYTES + 1  # the token after the end of a text that is shorter than its batch
VOCABULARY = BYTES + 16  # [MASK] and padding, rounded up to what tensor cores take
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
IGNORED = -100  # a target that does not count: torch's default

KINDS = ("base", "unit")
FORMATS = ("fp32", "fp16", "fp8")


class _Attention(gpt.Attention):
    """The attention of `scripts/training/gpt.py` to all tokens, or to those that a mask keeps."""

    def forward(self, x_BTC: Tensor, rotary: Tensor, keep_B11T: Tensor | None = None) -> Tensor:
        qkv_BTHD = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q_BHTD, k_BHTD, v_BHTD = (z.transpose(1, 2) for z in qkv_BTHD)
        q_BHTD, k_BHTD = gpt.rotate(q_BHTD, rotary), gpt.rotate(k_BHTD, rotary)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, keep_B11T)
        out: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class _Block(gpt.Block):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.attention = _Attention(sizes)

    def forward(self, h_BTC: Tensor, rotary: Tensor, keep_B11T: Tensor | None = None) -> Tensor:
        h_BTC = h_BTC + self.attention(self.attention_norm(h_BTC), rotary, keep_B11T)
        out: Tensor = h_BTC + self.feed_forward(self.feed_forward_norm(h_BTC))
        return out


class BaseBert(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), in the standard parametrisation.

    Tokens that are `PADDING` are seen by no other token.
    """

    rotary: Tensor

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        sizes = Sizes(layers, width, width // HEAD, context)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Block(sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.readout = nn.Linear(width, VOCABULARY, bias=False)
        table = gpt.rotary_table(context, HEAD)
        self.register_buffer("rotary", table, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("proj.weight", "down.weight"))
                std = gpt.INIT_STD / math.sqrt(2 * layers if last else 1)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        h_BTC = self.embedding(tokens_BT)
        keep_BT = tokens_BT != PADDING
        keep_B11T = None if bool(keep_BT.all()) else keep_BT[:, None, None]
        for block in self.layers:
            h_BTC = block(h_BTC, self.rotary[:, : tokens_BT.shape[1]], keep_B11T)
        logits_BTV: Tensor = self.readout(self.norm(h_BTC))
        return logits_BTV


class UnitBert(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), unit-scaled."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = uu.Embedding(VOCABULARY, width)
        self.layers = uu.TransformerStack(
            layers,
            hidden_size=width,
            heads=width // HEAD,
            is_causal=False,
            rotary_base=10_000.0,  # as scripts/training/gpt.py
        )
        self.norm = uu.RMSNorm(width)
        self.readout = uu.LinearReadout(width, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.readout(self.norm(self.layers(self.embedding(tokens_BT))))
        return logits_BTV


def build(kind: str, fmt: str, width: int, layers: int, context: int) -> nn.Module:
    """A model whose layers run in a format; float16 is up to `loss_of`."""
    model = {"base": BaseBert, "unit": UnitBert}[kind](width, layers, context)
    if fmt == "fp8":
        with warnings.catch_warnings():
            if kind == "base":  # conversion warns that it is not unit-scaled, as intended
                warnings.filterwarnings("ignore", 'recipe "unit" casts with a scale of 1')
            convert_to_float8_training(
                model,
                config=Float8LinearConfig.from_recipe_name("unit"),
                module_filter_fn=lambda _, fqn: fqn != "readout",
            )
    return model


def optimizer(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, with u-muP's learning rates for a unit-scaled model."""
    if kind == "unit":
        return uu.optim.AdamW(model.parameters(), lr, BETAS)
    return torch.optim.AdamW(model.parameters(), lr, BETAS, weight_decay=0.0)


def loss_of(kind: str, fmt: str, model: nn.Module) -> Loss:
    """The mean loss over hidden bytes; its gradient has unit scale in a unit-scaled model."""
    cross_entropy: Callable[..., Tensor] = U.cross_entropy if kind == "unit" else F.cross_entropy

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with _half(tokens_BT.device.type) if fmt == "fp16" else nullcontext():
            logits_BTV = model(tokens_BT)
        return cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())

    return loss


def products(fmt: str, device: str) -> AbstractContextManager[object]:
    """The context in which a format trains."""
    slow = fmt == "fp16" and torch.device(device).type == "cpu"
    return HalfProducts() if slow else nullcontext()


def _half(device: str) -> AbstractContextManager[None]:
    half: AbstractContextManager[None] = torch.autocast(device, torch.float16)
    return half


def masked(batches: Batches, seed: int) -> Batches:
    """Batches with bytes hidden: (tokens, targets), where targets that do not count are `IGNORED`.

    Args:
        batches: (tokens, whatever).
        seed: of what is hidden; the same for every run.
    """
    generator = torch.Generator().manual_seed(seed)
    for bytes_BT, _ in batches:
        yield hide(bytes_BT, generator)


def hide(bytes_BT: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch with bytes hidden, and the hidden bytes."""
    shape = bytes_BT.shape
    chosen_BT = torch.rand(shape, generator=generator) < CHOSEN
    lot_BT = torch.rand(shape, generator=generator)
    other_BT = torch.randint(BYTES, shape, generator=generator)
    to = bytes_BT.device
    chosen_BT, lot_BT, other_BT = (x.to(to) for x in (chosen_BT, lot_BT, other_BT))
    shown_BT = torch.where(lot_BT < MASKED + RANDOM, other_BT, bytes_BT)
    shown_BT = shown_BT.masked_fill(lot_BT < MASKED, MASK)
    tokens_BT = torch.where(chosen_BT, shown_BT, bytes_BT)
    return tokens_BT, bytes_BT.masked_fill(~chosen_BT, IGNORED)
