"""Matrix and attention products in float8, as functions that `float8` puts in torch's place.

A product of matrices is a linear layer whose weight is the transpose of the right one, so each runs
as the three GEMMs of `linear.autograd`, with the configuration's casts: the left operand is the
"input", the right one the "weight". Tensor cores multiply matrices, not batches of them: a batched
product is one GEMM per matrix, each with scales of its own where the recipe finds scales.

Attention is written out, ``softmax(scale * q k^T) v``: two batched products around a softmax in
high precision. Its weights lie in [0, 1] and are about 1/S over S keys, where E4M3 has few bits and
soon none; they are multiplied by `ATTENTION_SHIFT`, the product's factor takes it back, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.config import Float8LinearConfig
from float8.formats import HIGH_PRECISION_DTYPES
from float8.linear.autograd import NO_FACTORS, Factors, call_of, linear_in_float8
from float8.unit_scaling.functional.attention import masked_logits, one_per_head

# A power of two that every E4M3 holds (its maximum is 448, or 240 where it is fnuz).
ATTENTION_SHIFT = 128.0


def float8_matmul(
    left: Tensor, right: Tensor, config: Float8LinearConfig, factors: Factors | None = None
) -> Tensor:
    """``torch.matmul`` in float8, forward and backward.

    Args:
        left: (..., M, K).
        right: (..., K, N); leading dimensions broadcast.
        config: without delayed casts.
        factors: what output, left gradient and right gradient are multiplied by.

    Returns:
        (..., M, N).

    Raises:
        TypeError: a dtype that float8 is not cast from.
    """
    for name, x in (("left", left), ("right", right)):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"matmul in float8: {name} is {x.dtype}; cast it to bfloat16 or float32"
            )
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts = left.expand(*batch, *left.shape[-2:]).flatten(0, -3) if batch else left[None]
    rights = right.expand(*batch, *right.shape[-2:]).flatten(0, -3) if batch else right[None]
    products = [
        linear_in_float8(x_MK, w_KN.t(), None, call_of(config, x_MK, factors=factors or NO_FACTORS))
        for x_MK, w_KN in zip(lefts.unbind(0), rights.unbind(0), strict=True)
    ]
    if not products:
        return torch.matmul(left, right)  # of no matrix, with the gradients of that
    return torch.stack(products).reshape(*batch, left.shape[-2], right.shape[-1])


def float8_attention(
    config: Float8LinearConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with both its products in float8; arguments as torch's.

    It holds the (L, S) weights of each head, as no fused attention does.
    """
    if enable_gqa:
        key, value = one_per_head(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits_LS = float8_matmul(query, key.transpose(-2, -1), config, (scale,) * 3).float()
    logits_LS = masked_logits(logits_LS, attn_mask, is_causal)
    weights_LS = F.dropout(_softmax(logits_LS), dropout_p) * ATTENTION_SHIFT
    back = 1 / ATTENTION_SHIFT
    return float8_matmul(weights_LS.to(value.dtype), value, config, (back,) * 3)


def _softmax(logits_LS: Tensor) -> Tensor:
    # Of a query that may attend to nothing the weights are 0, as in torch's attention, not NaN.
    blind = (logits_LS == float("-inf")).all(-1, keepdim=True)
    return logits_LS.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
