"""Multi-head self-attention of unit scale: `MHSA`.

A head of d features attends with logits ``mult * q k / d`` and not ``/ sqrt(d)`` (u-muP, arXiv
2407.17465, appendix B): as training correlates queries and keys their products grow like d. What
comes out is divided by the scale that attention leaves, or, with muS's square-root softmax, has
unit scale by itself; `float8.unit_scaling.functional.attention` has both.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.modules.layers import Linear
from float8.unit_scaling.modules.rotary import rotary

Attention = Literal["softmax", "sqrt_softmax"]

_ATTENTIONS = {
    "softmax": U.scaled_dot_product_attention,
    "sqrt_softmax": U.sqrt_softmax_attention,
}


class MHSA(nn.Module):
    """Unit-scaled multi-head self-attention, without position embedding by default.

    Args:
        hidden_size: features of input and output, a multiple of ``heads``.
        heads: the number of heads.
        is_causal: whether a position sees earlier ones only.
        dropout_p: the probability of dropping an attention weight, in training.
        mult: the inverse temperature of the softmax (a hyperparameter of u-muP).
        rotary_base: for rotary position embedding, as of `rotary.rotary`, for example 10000.0;
            None for no position embedding.
        attention: "softmax", or muS's "sqrt_softmax" (arXiv 2502.05967).

    Shape:
        (..., sequence, hidden_size) -> the same.

    Raises:
        ValueError: the heads do not divide the features, or a head has an odd number of features
            to turn; ``dropout_p`` is not in [0, 1); an unknown attention.
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
        _check_heads(hidden_size, heads, rotary_base)
        _check_dropout(dropout_p)
        if attention not in _ATTENTIONS:
            raise ValueError(f"attention must be one of {list(_ATTENTIONS)}, got {attention!r}")
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
        heads_HSD = self._attend(q_HSD, k_HSD, v_HSD)
        out: Tensor = self.linear_o(heads_HSD.transpose(-3, -2).flatten(-2))
        return out

    def _attend(self, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor) -> Tensor:
        return _ATTENTIONS[self.attention](
            q_HSD,
            k_HSD,
            v_HSD,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.is_causal,
            mult=self.mult,
        )


def _check_heads(hidden_size: int, heads: int, rotary_base: float | None) -> None:
    if heads < 1 or hidden_size % heads:
        raise ValueError(f"hidden_size={hidden_size} is not a multiple of heads={heads}")
    if rotary_base is not None and hidden_size // heads % 2:
        raise ValueError(
            f"hidden_size={hidden_size} with heads={heads} gives heads of {hidden_size // heads} "
            "features, and rotary embedding turns pairs: use an even number, or no rotary_base"
        )


def _check_dropout(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {p}: dropping all leaves no scale")
