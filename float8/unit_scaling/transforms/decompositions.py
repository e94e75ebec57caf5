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
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, *rest: Any, **kw: Any
) -> tuple[Tensor, Tensor | None]:
    """As torch's function of this name, whose calls modes see."""
    mask, padding = kw.get("attn_mask"), kw.get("key_padding_mask")
    if mask is not None and padding is not None:
        # Torch adds the two, and transforms take additions for sums of signals. The difference is
        # the same number.
        columns = _added(padding, query).view(-1, 1, 1, padding.shape[-1])
        rows = columns.expand(-1, num_heads, -1, -1).flatten(0, 1)
        mask = _added(mask, query) - rows.neg()
        kw |= {"attn_mask": mask, "key_padding_mask": None, "is_causal": False}
    found: tuple[Tensor, Tensor | None] = _opened(
        query, key, value, embed_dim, num_heads, *rest, **kw
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


def decomposition_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The decomposition of a function; None if it has none."""
    if function is F.multi_head_attention_forward:
        return multi_head_attention_forward
    return unflatten if function is torch.unflatten else None
