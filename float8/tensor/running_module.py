"""Which module is running, and whose weight it reads: for errors that are raised far below it.

An op on a tensor does not know for whom it runs; the Python stack does. Every frame whose ``self``
is an ``nn.Module`` is one level of the model, the outermost one knows the names of all others. The
stack is only walked when something has failed already, so that knowing costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def innermost_module() -> str:
    """The module whose forward is running, as ``"layers.0.mlp (MLP)"``; "" where there is none."""
    stack = list(_running_modules())
    if not stack:
        return ""
    inner = stack[0]
    for outer in reversed(stack):
        for name, module in outer.named_modules():
            if module is inner and name:
                return f"{name} ({type(inner).__name__})"
    return type(inner).__name__


def remedy_for(operands: Any) -> str:
    """What to do about an op on the float8 weight of a layer that runs; "" for other operands."""
    memory = {x.float8_data.untyped_storage()._cdata for x in operands if hasattr(x, "float8_data")}
    for module in reversed([*_running_modules()]):
        for name, weight in module.named_parameters():
            data = getattr(weight, "float8_data", None)
            if data is not None and data.untyped_storage()._cdata in memory:
                # Wrappers, such as torch.compile's `_orig_mod`, are no part of the name.
                layer = ".".join(p for p in name.split(".")[:-1] if not p.startswith("_"))
                return (
                    f". It is the weight of {layer}: leave that out by "
                    f"float8.filters.skip_names({layer!r}), or call "
                    "float8.convert_from_float8_training(model) first, if PEFT reads it"
                )
    return ""


def _running_modules() -> Iterator[nn.Module]:
    """The modules on the stack, the innermost first."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
