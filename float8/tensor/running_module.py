"""Which module is running: for errors that are raised far below it.

An op on a tensor does not know for whom it runs; the Python stack does. Every frame whose ``self``
is an ``nn.Module`` is one level of the model, the outermost one knows the names of all others. The
stack is only walked when something has failed already, so that knowing costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

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


def _running_modules() -> Iterator[nn.Module]:
    """The modules on the stack, the innermost first."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
