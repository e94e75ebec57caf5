"""Decompositions: functions of torch that hide other calls, written in calls that transforms know.

A torch function mode sees ``F.multi_head_attention_forward`` as one call; its linear layers are
hidden. `multi_head_attention_forward` computes the same::

    q, k, v = F.linear(query), F.linear(key), F.linear(value)
    weights needed:  w = softmax(q k^T / sqrt(d) + mask);  out = dropout(w) v
    else:            out = F.scaled_dot_product_attention(q, k, v, mask)
    F.linear(out)

`unflatten` is here for ``torch.compile``, which does not trace torch's method under a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As torch's function of this name, with the same shapes.

    ``query`` is (T, B, E), ``key`` and ``value`` (S, B, E). ``attn_mask`` is (T, S) or (B *
    num_heads, T, S), and ``key_padding_mask`` (B, S): bool (True hides) or added to the scores. The
    output has the query's shape. The weights, if they are needed, are (B, T, S) or (B, num_heads,
    T, S). All are without the B if the inputs have none. Raises ValueError for ``bias_k``,
    ``bias_v``, ``add_zero_attn``, ``static_k`` and ``static_v``, which this function does not have.
    """
    _refuse(
        bias_k=bias_k,
        bias_v=bias_v,
        add_zero_attn=add_zero_attn or None,
        static_k=static_k,
        static_v=static_v,
    )
    if query.shape[-1] != embed_dim_to_check:
        raise ValueError(
            f"multi-head attention was built for embed_dim={embed_dim_to_check}, got a query of "
            f"shape {tuple(query.shape)}"
        )
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True is a hint about attn_mask: pass the mask too")
    batched = query.dim() == 3
    packed = None if use_separate_proj_weight else in_proj_weight
    weights = (
        _thirds(packed) if packed is not None else (q_proj_weight, k_proj_weight, v_proj_weight)
    )
    q, k, v = _projections(query, key, value, packed, weights, in_proj_bias)
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    q, k, v = _heads(q, num_heads), _heads(k, num_heads), _heads(v, num_heads)
    dropout_p = dropout_p if training else 0.0
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, q, k)
    scores = None
    if need_weights:
        context, scores = _attention(q, k, v, mask, dropout_p)
    else:
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal)
    context_TBE = context.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(context_TBE, out_proj_weight, out_proj_bias)
    if scores is not None and average_attn_weights:
        scores = scores.mean(dim=1)
    if not batched:
        out, scores = out.squeeze(1), None if scores is None else scores.squeeze(0)
    return out, scores


def _refuse(**options: Any) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"transforms do not cover multi-head attention with {', '.join(given)}: build "
            "nn.MultiheadAttention without it, or write the attention with linear layers"
        )


def _thirds(x: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if x is None else x.chunk(3)


def _projections(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor | None,
    weights: tuple[Tensor | None, ...],
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    if packed is not None and query is key and key is value:
        return F.linear(query, packed, bias).chunk(3, dim=-1)
    if packed is not None and key is value:
        sizes = [query.shape[-1], 2 * query.shape[-1]]
        weight_q, weight_kv = packed.split(sizes)
        bias_q, bias_kv = (None, None) if bias is None else bias.split(sizes)
        k, v = F.linear(key, weight_kv, bias_kv).chunk(2, dim=-1)
        return F.linear(query, weight_q, bias_q), k, v
    inputs = (query, key, value)
    biases = _thirds(bias)
    projected = []
    for x, weight, b in zip(inputs, weights, biases, strict=True):
        assert weight is not None, "nn.MultiheadAttention has one weight or three"
        projected.append(F.linear(x, weight, b))
    return tuple(projected)


def _heads(x_TBE: Tensor, num_heads: int) -> Tensor:
    """(B, num_heads, T, E / num_heads)."""
    return x_TBE.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def _mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """The mask to add to the scores: (T, S) or (B, num_heads or 1, T or 1, S)."""
    if attn_mask is not None:
        attn_mask = _added(attn_mask, q)
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(q.shape[0], -1, *attn_mask.shape[1:])
    if key_padding_mask is None:
        return attn_mask
    padding = _added(key_padding_mask, q).view(-1, 1, 1, k.shape[2])
    # Subtracted, not added: transforms take additions for sums of signals.
    return padding if attn_mask is None else attn_mask - padding.neg()


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=like.dtype)
    return zeros.masked_fill(mask, float("-inf"))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, p=dropout_p)
    return torch.matmul(weights, v), weights


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """``torch.unflatten``: one dimension as several, of which one may be -1."""
    dim = dim % input.dim()
    return input.reshape(*input.shape[:dim], *sizes, *input.shape[dim + 1 :])


# function of torch -> its decomposition
DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    torch.unflatten: unflatten,
}


def decomposition_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The decomposition of a function; None if it has none."""
    if function is Tensor.unflatten:  # under torch.compile dictionaries do not find it
        return unflatten
    return DECOMPOSITIONS.get(function)
