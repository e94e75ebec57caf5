"""Multi-head self-attention of unit scale, `MHSA`, and rotary position embedding, `rotary`.

A head of d features attends with logits ``mult * q k / d`` and not ``/ sqrt(d)`` (u-muP, arXiv
2407.17465, appendix B): as training correlates queries and keys, their products grow like d. The
result is divided by the scale of attention's output. With muS's square-root softmax it has unit
scale without a factor. `float8.unit_scaling.functional.attention` derives both.

Rotary embedding (arXiv 2104.09864) takes features i and i + d/2 of a head as a point of a plane. At
position s the point turns by the angle ``s * base ** (-2 i / d)``, so that a product of a query and
a key depends on their distance only:

    y_i       = x_i cos - x_(i + d/2) sin
    y_(i+d/2) = x_i sin + x_(i + d/2) cos

A rotation keeps the length of vectors, forward and backward, so it needs no scale. The S x d/2
angles are computed in each call, not cached. A cache could be too short for a sequence, would be
uninitialised after construction on the meta device, and would appear in checkpoints.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.modules.layers import Linear

Attention = Literal["softmax", "sqrt_softmax"]

_ATTENTIONS = {
    "softmax": U.scaled_dot_product_attention,
    "sqrt_softmax": U.sqrt_softmax_attention,
}


class MHSA(nn.Module):
    """Unit-scaled multi-head self-attention, (..., sequence, hidden_size) -> the same.

    Args:
        hidden_size: features of input and output, a multiple of ``heads``.
        heads: the number of heads.
        is_causal: whether a position sees earlier ones only.
        dropout_p: the probability of dropping an attention weight, in training.
        mult: the inverse temperature of the softmax (a hyperparameter of u-muP).
        rotary_base: of rotary position embedding (arXiv 2104.09864), for example 10000.0; None
            for no position embedding.
        attention: "softmax", or muS's "sqrt_softmax" (arXiv 2502.05967).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        is_causal: bool,
        dropout_p: float = 0.0,
        mult: float = 1.0,
        rotary_base: float | None = None,
        attention: Attention = "softmax",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.dropout_p = dropout_p
        self.mult = mult
        self.rotary_base = rotary_base
        self.attention: Attention = attention
        self.linear_qkv = Linear(hidden_size, 3 * hidden_size)
        self.linear_o = Linear(hidden_size, hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        """(..., sequence, hidden_size) -> the same."""
        qkv: Tensor = self.linear_qkv(input)
        qkv = qkv.unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        q_HSD, k_HSD, v_HSD = qkv.unbind(0)
        if self.rotary_base is not None:
            q_HSD, k_HSD = (rotary(x, self.rotary_base) for x in (q_HSD, k_HSD))
        heads_HSD = _ATTENTIONS[self.attention](
            q_HSD,
            k_HSD,
            v_HSD,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.is_causal,
            mult=self.mult,
        )
        out: Tensor = self.linear_o(heads_HSD.transpose(-3, -2).flatten(-2))
        return out


def rotary(x_SD: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate the features of every position, see the module's docstring.

    ``x_SD`` (..., S, d) has heads of S positions and d features; the result has its shape and
    dtype. Angles and products are computed in float32 or better. The wavelengths are ``2 pi`` to
    ``2 pi base`` positions. d is even.
    """
    positions, features = x_SD.shape[-2:]
    wide = torch.promote_types(x_SD.dtype, torch.float32)
    exponents = torch.arange(0, features, 2, device=x_SD.device, dtype=wide) / -features
    places = torch.arange(positions, device=x_SD.device, dtype=wide)
    angles = places[:, None] * base**exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = x_SD.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x_SD.dtype)
