"""Evaluation in high precision: what a model in eval mode computes without gradients.

A framework's evaluation loop has no place for ``with float8.high_precision(model):``. So each
module leaves float8 by itself where it is in eval mode and no gradients are asked for. Wrappers
(DDP, FSDP2, torch.compile) need not know, nor does code that calls a part of the model, as
generation does with an encoder. Nothing is entered or left: an evaluation that is broken off leaves
nothing behind, and threads see their own gradient mode.

A part of a model in training is meant too, if it is in eval mode and under ``torch.no_grad()``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from float8.linear.switch import Float8Module


def evaluate_in_high_precision(model: nn.Module) -> None:
    """Have a model leave float8 in eval mode where gradients are disabled. Once is enough."""
    for module in model.modules():
        if isinstance(module, Float8Module):
            module.evaluates_in_high_precision = True


def _enter(module: Any, args: Any) -> None:
    """The hook of models that were pickled by version 0.6.0, which load it by this name."""
    module.evaluates_in_high_precision = True


def _leave(module: Any, args: Any, output: Any) -> None:
    """The other hook of such models; there is nothing left to do."""
