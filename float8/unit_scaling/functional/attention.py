"""Attention of unit scale.

Attention averages values: ``y_i = sum_j p_ij v_j``, with ``p = softmax(mult q k^T / d)``. For
independent values of unit variance ``var(y_i) = sum_j p_ij**2``, which is 1/S where attention is
flat over S keys and 1 where it is one-hot. Position i of causal attention sees i keys: if flat, the
mean variance is ``(1/1 + 1/2 + ... + 1/S) / S``, about ``log(S) / S``. Between flat and one-hot
u-muP interpolates (arXiv 2407.17465, appendix B):

    std(y) = flat ** (1 - alpha)      flat = sqrt(1/S) or sqrt(log(S)/S)
                                      alpha = 1 / (1 + 4 d / mult**2)

The output is divided by std(y). The gradients of q, k and v take the same factor, which is right
for v and too small for q and k: that is the price of the constraint. Logits are divided by d, not
by its root (muP), so at initialisation they are small and attention is nearly flat.

Of L causal queries the first n = min(L, S) see one key more each and the others all S, so the mean
variance is ``(log(n) + (L - n) / S) / L``. A value's gradient sums over L queries what the output
sums over S keys: its scale is ``sqrt(L/S)``, and ``sqrt(r L/S)`` where r query heads share it.
Values are no cut edge, so they get no factor of their own.

**Square-root softmax attention** (muS, arXiv 2502.05967) needs no factor: weights
``w = sqrt(softmax(z)) = exp(z/2) / |exp(z/2)|`` have ``sum_j w_ij**2 = 1`` in every row, whatever
S, the mask or the sharpness. Each y_i has unit variance; the factor above fits on average only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.core.functional import check_mult, logarithmic_interpolation, refuse
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd


@overridable
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A unit-scaled ``F.scaled_dot_product_attention``, fused wherever torch's is.

    Args:
        query, key, value: (..., L, D), (..., S, D) and (..., S, Dv).
        attn_mask: as torch's. The factor assumes flat attention to all S keys, so pass
            ``is_causal`` for a causal mask.
        dropout_p: in [0, 1). As in torch, the caller passes 0 in evaluation.
        is_causal: whether position i attends to the keys up to i.
        mult: multiplies the logits ``q k^T / D``.
        scale: multiplies ``q k^T`` instead of ``mult / D``: torch's name for the sharpness.
        enable_gqa: whether query heads share key and value heads, as torch's.

    Returns:
        (..., L, Dv). For D of 64 and mult in [1/4, 4] the output's root mean square is within 5 %
        of 1, and so is the values' gradient's where L = S and no heads share them; with mult 16
        within 16 %. Causal attention is within 12 % for 16 positions or more, and within 30 % for 2
        to 15, where log(S)/S is less than the mean of 1/i that it approximates.
    """
    temperature = _temperature(query, mult, scale)
    sharpness = temperature * query.shape[-1]  # equals mult, where scale is not given
    alpha = 1 / (1 + 4 * query.shape[-1] / sharpness**2)
    flat = _std_of_flat_attention(query.shape[-2], key.shape[-2], is_causal)
    factor = (1 - dropout_p) ** 0.5 / logarithmic_interpolation(alpha, flat, 1.0)
    query, key, value = [scale_bwd(x, factor) for x in (query, key, value)]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=temperature, enable_gqa=enable_gqa
    )
    return scale_fwd(output, factor)


@overridable
def sqrt_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the root of the softmax as weights (muS, arXiv 2502.05967).

    The arguments are those of `scaled_dot_product_attention`. For independent values of unit
    variance the output has unit variance at every position; a query that attends to nothing gets 0.
    The values' gradient has unit scale too where L = S; no factor is applied to any gradient. The
    attention is not fused: it stores the (L, S) weights of each head.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = [x.repeat_interleave(repeats, dim=-3) for x in (key, value)]
    logits_LS = query @ key.transpose(-2, -1) * _temperature(query, mult, scale)
    if is_causal:
        seen = torch.ones(logits_LS.shape[-2:], dtype=torch.bool, device=logits_LS.device).tril()
        logits_LS = logits_LS.masked_fill(~seen, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits_LS = logits_LS.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        logits_LS = logits_LS + attn_mask
    # Not sqrt(softmax), whose derivative is infinite where a weight is 0. Any shift gives the same
    # weights, this one without overflow; that of a row of -inf is finite, so its weights are 0.
    wide = logits_LS.to(torch.promote_types(logits_LS.dtype, torch.float32))
    shift = wide.detach().logsumexp(-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).min)
    weights_LS = F.normalize(torch.exp((wide - shift) / 2), dim=-1)
    if dropout_p:
        weights_LS = F.dropout(weights_LS, dropout_p) * (1 - dropout_p) ** 0.5
    return weights_LS.to(value.dtype) @ value


def _std_of_flat_attention(queries: int, keys: int, is_causal: bool) -> float:
    queries, keys = max(queries, 1), max(keys, 1)
    if not is_causal:
        return float(1 / keys**0.5)
    first = min(queries, keys)
    # log(n) is 0 for one key, where the variance is 1: for up to 2 keys, less than e, it is 1 here.
    # math.log would make a symbolic size a constant, and recompile for the next one.
    seen_by_first = math.log2(first) * math.log(2) if first > 2 else 1.0
    return float(((seen_by_first + (queries - first) / keys) / queries) ** 0.5)


def _temperature(query: Tensor, mult: float, scale: float | None) -> float:
    check_mult(mult, "attention")
    if scale is None:
        return mult / query.shape[-1]
    refuse(mult != 1, "attention", f"mult={mult} with scale={scale}", "scale is mult / D")
    return scale
