"""Decompositions: functions of torch that hide other calls, run so that transforms see these calls.

A torch function mode sees ``F.multi_head_attention_forward`` as one call, because the function asks
for modes at its beginning; its linear layers are hidden. `multi_head_attention_forward` runs the
same code of torch without that question.

`unflatten` is here for ``torch.compile``, which does not trace torch's method under a mode.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _no_modes(tensors: Any) -> bool:
    return False


_opened: Any = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": _no_modes},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    *rest: Any,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As torch's function of this name, whose calls modes see."""
    if attn_mask is not None and key_padding_mask is not None:
        # Torch adds the two, and transforms take additions for sums of signals. The difference is
        # the same number.
        padding = _added(key_padding_mask, query).view(-1, 1, 1, key_padding_mask.shape[-1])
        rows = padding.expand(-1, num_heads, -1, -1).flatten(0, 1)
        attn_mask, key_padding_mask = _added(attn_mask, query) - rows.neg(), None
        options["is_causal"] = False
    options |= {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    found: tuple[Tensor, Tensor | None] = _opened(
        query, key, value, embed_dim_to_check, num_heads, *rest, **options
    )
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


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
