"""Which unit-scaled function stands for which function of torch, and how a transform sees calls.

A transform (`float8.unit_scaling.transforms`) is a torch function mode: it sees the functions that
a model calls. This file says what it makes of them:

1. `SPELLINGS`: spelling -> torch function. ``x @ w``, ``x.matmul(w)`` and ``torch.matmul(x, w)``
   are one function. Eager mode reports the method behind an operator, ``torch.compile`` the method
   or the operator, and looks through some functions of `torch.nn.functional`.
2. `torch_map`: torch function -> unit-scaled function. Entries are called with the arguments that
   the model wrote for torch, by position or by torch's names.
3. `overridable`: a decorator that makes a mode see a unit-scaled function as one call, as it sees
   ``F.linear``, before anything inside it runs. The mode replaces it, calls it, or looks inside
   (``function.implementation``).

4. `decomposition_of`: functions of torch that hide other calls, run so that modes see these calls.
   ``F.multi_head_attention_forward`` asks for modes at its beginning, and its linear layers are
   hidden; the decomposition runs the same code of torch without that question. ``unflatten`` is
   here for ``torch.compile``, which does not trace torch's method under a mode.

Register a function of your own, or another one for a function of torch::

    U.register(torch.nn.functional.silu, my_unit_scaled_silu, replace=True)
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

Function = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Function)


def overridable(function: Decorated) -> Decorated:
    """Make torch function modes see the calls of ``function``, as a decorator.

    `float8.unit_scaling.transforms` are such modes.

    Args:
        function: called with tensors among its arguments.
    """

    @functools.wraps(function)
    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
        # has_torch_function under torch.compile misses modes that are entered in the graph.
        if has_torch_function(tensors) or (
            torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0
        ):
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    visible.implementation = function  # type: ignore[attr-defined]
    return visible  # type: ignore[return-value]


# A spelling takes the arguments of its function. In-place spellings (``x += y``) are one function
# too: a transform must know that the first operand changes.
SPELLINGS: dict[Function, Function] = {
    **{
        getattr(Tensor, name): getattr(torch, name)
        for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "add", "softmax")
    },
    **dict.fromkeys((Tensor.__matmul__, operator.matmul, torch.linalg.matmul), torch.matmul),
    # addition commutes, so __radd__ is a spelling too
    **dict.fromkeys((Tensor.__add__, Tensor.__radd__, operator.add), torch.add),
    **dict.fromkeys((Tensor.__iadd__, operator.iadd), Tensor.add_),
    torch.special.softmax: torch.softmax,
    torch.rms_norm: F.rms_norm,
    torch.layer_norm: F.layer_norm,
}


def respelt(func: Any) -> Any:
    """The function that ``func`` is a spelling of, or ``func``."""
    if func is Tensor.unflatten:  # dynamo can neither trace its super() nor find it in a dict
        return torch.unflatten
    return SPELLINGS.get(func, func)


torch_map: dict[Function, Function] = {}
"""torch function -> its unit-scaled function; `register` adds to it."""


def register(
    torch_function: Function, unit_scaled_function: Function, *, replace: bool = False
) -> None:
    """Add an entry to ``torch_map``.

    Args:
        torch_function: what models call.
        unit_scaled_function: what a unit-scaled model calls instead, with the same arguments.
        replace: whether an existing entry may be replaced.

    Raises:
        ValueError: there is an entry already and ``replace`` is False.
    """
    if torch_function in torch_map and not replace:
        raise ValueError(f"{torch_function} is registered already; pass replace=True")
    torch_map[torch_function] = unit_scaled_function


# --- decompositions


_opened: Any = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, *rest: Any, **kw: Any
) -> tuple[Tensor, Tensor | None]:
    """Call torch's function of this name such that modes see the calls inside."""
    mask, padding = kw.get("attn_mask"), kw.get("key_padding_mask")
    if mask is not None and padding is not None:
        # Torch adds the two, and transforms take additions for sums of signals. The difference is
        # the same number.
        columns = _added(padding, query).view(-1, 1, 1, padding.shape[-1])
        rows = columns.expand(-1, num_heads, -1, -1).flatten(0, 1)
        mask = _added(mask, query) - rows.neg()
        kw |= {"attn_mask": mask, "key_padding_mask": None, "is_causal": False}
    return _opened(query, key, value, embed_dim, num_heads, *rest, **kw)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """``torch.unflatten``: one dimension as several, of which one may be -1."""
    dim = dim % input.dim()
    return input.reshape(*input.shape[:dim], *sizes, *input.shape[dim + 1 :])


def decomposition_of(function: Function) -> Function | None:
    """The decomposition of a function; None if it has none."""
    if function is F.multi_head_attention_forward:
        return multi_head_attention_forward
    return unflatten if function is torch.unflatten else None
