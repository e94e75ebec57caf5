"""Which unit-scaled function stands for which function of torch.

``torch_map`` has one entry for each; a transform reads it to rewrite what a model calls. A function
of torch has one entry whichever way a model spells it (`float8.unit_scaling.spellings`). Entries
are called with the arguments that the model wrote for torch: positional ones agree by the design
of `float8.unit_scaling.functional`, and where torch names an argument differently `handler` renames
it.

Register a function of your own, or another choice for one of torch's:

    U.register(torch.nn.functional.silu, my_unit_scaled_silu, replace=True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from float8.unit_scaling.functional import (
    activations,
    attention,
    convolution,
    losses,
    norms,
    products,
    residual,
)

Function = Callable[..., Any]

# torch function -> its unit-scaled function
torch_map: dict[Function, Function] = {
    F.linear: products.linear,
    torch.matmul: products.matmul,
    F.conv1d: convolution.conv1d,
    F.gelu: activations.gelu,
    F.silu: activations.silu,
    F.softmax: activations.softmax,
    torch.softmax: activations.softmax,
    F.dropout: activations.dropout,
    F.layer_norm: norms.layer_norm,
    F.rms_norm: norms.rms_norm,
    F.embedding: norms.embedding,
    torch.add: residual.add,
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    F.cross_entropy: losses.cross_entropy,
    F.mse_loss: losses.mse_loss,
}
# torch function -> torch's name of an argument -> ours
_KEYWORDS: dict[Function, Mapping[str, str]] = {torch.matmul: {"input": "left", "other": "right"}}


def register(
    torch_function: Function,
    unit_scaled_function: Function,
    *,
    replace: bool = False,
    keywords: Mapping[str, str] | None = None,
) -> None:
    """Adds an entry to ``torch_map``.

    Args:
        torch_function: what models call.
        unit_scaled_function: what a unit-scaled model calls instead, with the same arguments.
        replace: whether an entry that exists may be replaced.
        keywords: the function's names for arguments that ``torch_function`` names differently.

    Raises:
        TypeError: one of the two cannot be called.
        ValueError: there is an entry already and ``replace`` is False.
    """
    for function in (torch_function, unit_scaled_function):
        if not callable(function):
            raise TypeError(f"register takes two functions, got {function!r}")
    if torch_function in torch_map and not replace:
        raise ValueError(
            f"{_name(torch_function)} is registered already, as "
            f"{_name(torch_map[torch_function])}; pass replace=True to put "
            f"{_name(unit_scaled_function)} in its place"
        )
    torch_map[torch_function] = unit_scaled_function
    _KEYWORDS.pop(torch_function, None)
    if keywords:
        _KEYWORDS[torch_function] = dict(keywords)


def unregister(torch_function: Function) -> None:
    """Removes an entry of ``torch_map``.

    Raises:
        KeyError: there is none.
    """
    if torch_function not in torch_map:
        raise KeyError(f"{_name(torch_function)} is not registered")
    del torch_map[torch_function]
    _KEYWORDS.pop(torch_function, None)


def handler(torch_function: Function) -> Function:
    """The unit-scaled function for one of torch's, taking the keywords of torch's.

    Raises:
        KeyError: there is none.
    """
    if torch_function not in torch_map:
        raise KeyError(f"{_name(torch_function)} has no unit-scaled function: register one")
    function, renamed = torch_map[torch_function], _KEYWORDS.get(torch_function)
    if not renamed:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{renamed.get(name, name): x for name, x in kwargs.items()})

    return call


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
