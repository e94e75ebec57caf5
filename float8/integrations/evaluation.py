"""Evaluation in high precision: what a model in eval mode computes without gradients.

A framework's evaluation loop has no place for ``with float8.high_precision(model):``. So the model
enters it by itself, by hooks around its own forward: in eval mode, where no gradients are asked
for. Wrappers (DDP, FSDP2, torch.compile) call that forward, so they need not know.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from float8.convert import high_precision


class EvaluationInHighPrecision:
    """Hooks around a model's forward; made by `evaluate_in_high_precision`."""

    def __init__(self) -> None:
        self.open: list[ExitStack] = []  # of the calls that are under way, innermost last

    def before(self, model: nn.Module, args: Any) -> None:
        """Forward begins."""
        stack = ExitStack()
        if not (model.training or torch.is_grad_enabled()):
            stack.enter_context(high_precision(model))
        self.open.append(stack)

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forward has ended, with a result or an error."""
        self.open.pop().close()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles begin anew."""
        return {"open": []}


def evaluate_in_high_precision(model: nn.Module) -> None:
    """Have a model leave float8 in eval mode where gradients are disabled. Once is enough."""
    hooks = EvaluationInHighPrecision()
    for hook in model._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), EvaluationInHighPrecision):
            return
    model.register_forward_pre_hook(hooks.before)
    model.register_forward_hook(hooks.after, always_call=True)
