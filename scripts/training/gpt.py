"""A small GPT of the Llama family, and its conversion to a recipe.

Each block adds to a residual stream h, as in Llama (arXiv:2302.13971):

    h = h + attention(rms_norm(h))      causal, rotary positions on queries and keys
    h = h + swiglu(rms_norm(h))         down(silu(gate) * up), hidden width 8/3 of the model's

The vocabulary is the 256 bytes. Queries, keys and values come from one matrix product, and so do
gate and up: an input is then cast, and kept for backward, once and not two or three times, in
float8 and in bf16 alike.

Parameters stay float32 and the arithmetic is `torch.autocast(bfloat16)`, the usual mixed precision;
a recipe changes only what the blocks' linear layers do inside that. The output head keeps bf16 in
every recipe, as is usual: its output feeds the loss directly, and casting it to float8 costs more
accuracy than the layer costs time.

Shapes: B batch, T context, C width, H heads, D = C / H, F hidden width of the feed-forward part,
V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)

VOCABULARY = 256
INIT_STD = 0.02  # GPT-2's and Llama's; the last layer of each branch is divided by sqrt(2 layers)
UNIT = ("unit_bf16", "unit")  # recipes of the unit-scaled model
OWN = ("bf16", "bf16_rounded", "naive", "unit_bf16")  # recipes that float8 does not know by name


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if self.width % 16:
            raise ValueError(f"--width {self.width}: float8 products need a multiple of 16")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width {self.width} is not --heads {self.heads} of even width")

    @property
    def hidden(self) -> int:
        """8/3 of the width (so SwiGLU's three matrices cost what two of 4x do), in 64s."""
        return math.ceil(self.width * 8 / 3 / 64) * 64


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor, rotary: Tensor) -> Tensor:
        qkv_BTHD = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q_BHTD, k_BHTD, v_BHTD = (z.transpose(1, 2) for z in qkv_BTHD)
        q_BHTD, k_BHTD = rotate(q_BHTD, rotary), rotate(k_BHTD, rotary)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate_BTF) * up_BTF)
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


class GPT(nn.Module):
    rotary: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)
        table = rotary_table(sizes.context, sizes.width // sizes.heads)
        self.register_buffer("rotary", table, persistent=False)
        self._initialise(sizes.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                last = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * layers if last else 1))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross-entropy of the next byte, in nats."""
        h_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            h_BTC = block(h_BTC, self.rotary[:, : tokens_BT.shape[1]])
        logits_BTV = self.head(self.norm(h_BTC))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def rotary_table(context: int, head_width: int) -> Tensor:
    """(2, T, D/2): cosines and sines of position x frequency (RoFormer, arXiv:2104.09864)."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTD: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by their position's angles, rounding once at the end."""
    cos, sin = rotary.unbind(0)
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTD.dtype)


def in_recipe(model: M, recipe: str, gathers: bool = False) -> M:
    """The model with its linear layers in `recipe`, unit-scaled if it is one of `UNIT`.

    The layer called ``head`` keeps its precision. Unit scaling copies the model; otherwise it is
    the same object, with the same parameters. ``gathers``: FSDP2 gathers its weights as float8.

    Raises:
        ValueError: for an unknown recipe.
    """
    if recipe == "bf16_rounded":  # a control: bf16 again, from weights that differ by a rounding
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    if recipe in ("bf16", "bf16_rounded"):
        return model
    # Here, not at the top: the bf16 baseline then needs nothing but PyTorch.
    from float8 import Float8LinearConfig, convert_to_float8_training
    from float8.config import RECIPES

    if recipe in UNIT:
        from float8.unit_scaling.transforms import float8, unit_scale

        model = unit_scale(model)
        is_bf16 = recipe not in RECIPES
        return model if is_bf16 else float8(model, RECIPES[recipe], module_filter_fn=_is_body)
    if recipe not in (*OWN, *RECIPES):
        raise ValueError(f"unknown recipe {recipe!r}; known recipes: {', '.join((*OWN, *RECIPES))}")
    # "naive" is a plain `.to(torch.float8_e4m3fn)` without any scale, which is
    # what recipe "unit" is where nothing is unit-scaled. The mean over B x T tokens makes gradients
    # of 1e-5 and less, which E5M2, whose smallest number is 1.5e-5, rounds to zero; weights of 0.02
    # lie where E4M3 has one or two bits left.
    config = Float8LinearConfig.from_recipe_name("unit" if recipe == "naive" else recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers)
    with warnings.catch_warnings():
        if recipe == "naive":  # conversion warns of just that
            warnings.filterwarnings("ignore", 'recipe "unit" casts with a scale of 1')
        convert_to_float8_training(model, config=config, module_filter_fn=_is_body)
    return model


def _is_body(_: nn.Module, fqn: str) -> bool:
    return fqn != "head"
