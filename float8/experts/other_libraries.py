"""The experts of other libraries, which conversion finds by itself.

*Transformers* (5.x) decorates its classes of experts with ``use_experts_implementation``: their
forward asks the model's config which of several functions to run, among them a loop over experts
and one that calls ``grouped_mm``. A converted module runs the latter, whatever the config says.

*torchtitan*'s ``GroupedExperts``, and what is derived from it, multiply in their method
``_grouped_mm``. A subclass with a ``_grouped_mm`` of its own has another precision already.

Neither library is imported: the classes say what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Forward = Callable[..., Any]
"""(module, its arguments) -> its result, by calls of ``grouped_mm``."""
# The functions by which experts multiply: (x (T, K), w (E, K, N), offs (E,)) -> (T, N)
_ATEN = torch.ops.aten._grouped_mm
GROUPED_MM: set[Any] = {F.grouped_mm, torch._grouped_mm, _ATEN, _ATEN.default}
_TRANSFORMERS = "transformers.integrations.moe"
_TORCHTITAN = "torchtitan.models.common.moe"


def forward_of_library(kind: type[nn.Module]) -> Forward | None:
    """The forward of a library's type of experts that calls ``grouped_mm``, or None."""
    namespace: dict[str, Any] = getattr(kind.forward, "__globals__", {})
    if namespace.get("__name__") != _TRANSFORMERS:  # where the decorator's forward is written
        method = getattr(kind, "_grouped_mm", None)
        return kind.forward if getattr(method, "__module__", None) == _TORCHTITAN else None
    functions: Any = namespace["ALL_EXPERTS_FUNCTIONS"]
    variables = inspect.getclosurevars(kind.forward).nonlocals
    if id(variables.get("experts_interface")) != id(functions):
        return None  # those of experts in another precision
    # What it multiplies with where torch's function does not take a dtype under torch.compile.
    GROUPED_MM.add(torch.ops.transformers.grouped_mm_fallback)
    return functions["grouped_mm"]
