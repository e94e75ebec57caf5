"""`compile`: ``torch.compile`` of a transformed model.

Transforms run a model's own Python, and ``torch.compile`` traces it with them, in one graph. So
this is ``torch.compile`` with a check; it exists for code that spells it so::

    from float8.unit_scaling.transforms import compile, simulate_fp8, unit_scale

    model = compile(simulate_fp8(unit_scale(model)))
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def compile(module: M, **kwargs: Any) -> M:
    """A compiled model; transforms come first, since they do not reach into compiled code.

    Args:
        module: a module, with any transforms or none.
        kwargs: those of ``torch.compile``, such as ``fullgraph=True``.

    Returns:
        An ``nn.Module`` that shares its parameters with ``module``.

    Raises:
        TypeError: ``module`` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"compile takes an nn.Module, got {type(module).__name__}")
    return torch.compile(module, **kwargs)  # type: ignore[return-value]
