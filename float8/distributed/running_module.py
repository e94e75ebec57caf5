"""The name of the module that is running, for errors that are raised far below it.

An op on a tensor does not know for which module it runs; the Python stack does. Every frame whose
``self`` is an ``nn.Module`` is one level of the model, and the outermost module knows the names of
all others. The stack is only walked when something has failed already, so it costs nothing.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn


def innermost_module() -> str:
    """The module whose forward is running, as ``"layers.0.mlp (MLP)"``; "" where there is none."""
    stack: list[nn.Module] = []  # the innermost first
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            stack.append(module)
        frame = frame.f_back
    for outer in reversed(stack):
        for name, module in outer.named_modules():
            if module is stack[0] and name:
                return f"{name} ({type(module).__name__})"
    return type(stack[0]).__name__ if stack else ""
