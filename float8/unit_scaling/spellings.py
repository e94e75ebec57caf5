"""One name for each torch function, whichever way a model spells the call.

``x @ w``, ``x.matmul(w)`` and ``torch.matmul(x, w)`` are one function to a transform. Eager mode
reports the method behind an operator, ``torch.compile`` the method or the operator, and looks
through some functions of `torch.nn.functional` to the one they call; `SPELLINGS` maps each to the
function that `float8.unit_scaling.registry` and the transforms know. A spelling takes the same
arguments as what it stands for.

In-place spellings (``x += y``, ``x.add_(y)``) are one function too, `torch.Tensor.add_`: a
transform has to know that the first operand changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# spelling -> the torch function that it is a spelling of
SPELLINGS: dict[Callable[..., Any], Callable[..., Any]] = {
    # products
    Tensor.matmul: torch.matmul,
    Tensor.__matmul__: torch.matmul,
    operator.matmul: torch.matmul,
    torch.linalg.matmul: torch.matmul,
    Tensor.mm: torch.mm,
    Tensor.bmm: torch.bmm,
    Tensor.addmm: torch.addmm,
    Tensor.baddbmm: torch.baddbmm,
    Tensor.addbmm: torch.addbmm,
    # sums; addition commutes, so that __radd__ is one more spelling
    Tensor.add: torch.add,
    Tensor.__add__: torch.add,
    Tensor.__radd__: torch.add,
    operator.add: torch.add,
    Tensor.__iadd__: Tensor.add_,
    operator.iadd: Tensor.add_,
    # the rest
    Tensor.softmax: torch.softmax,
    torch.special.softmax: torch.softmax,
    torch.rms_norm: F.rms_norm,
    torch.layer_norm: F.layer_norm,
}


def respelt(func: Any) -> Any:
    """The function that ``func`` is a spelling of, or ``func``."""
    if func is Tensor.unflatten:  # a Python method whose super() dynamo cannot trace, nor find here
        return torch.unflatten
    return SPELLINGS.get(func, func)
