"""Evaluation in high precision: what a model in eval mode computes without gradients.

A framework's evaluation loop has no place for ``with float8.high_precision(model):``. So each layer
leaves float8 by itself, by hooks around its forward: in eval mode, where no gradients are asked
for. Wrappers (DDP, FSDP2, torch.compile) call that forward, so they need not know, and neither need
who calls a part of the model, as generation does with an encoder. The model has the same hooks, for
what casts a layer's input before it (`float8.distributed.tensor_parallel`).

A part of a model in training is meant too, if it is in eval mode and under ``torch.no_grad()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from float8.convert import FLOAT8_MODULES


def evaluate_in_high_precision(model: nn.Module) -> None:
    """Have a model leave float8 in eval mode where gradients are disabled. Once is enough."""
    for module in (model, *_float8_modules(model)):
        if _enter not in module._forward_pre_hooks.values():
            module.is_evaluating = False
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)


# Functions, and what they know is the module's: copies and pickles need nothing else.
def _enter(module: Any, args: Any) -> None:
    _end(module)  # what Ctrl-C broke off: torch calls no hook for it
    if not (module.training or torch.is_grad_enabled()):
        module.is_evaluating = True
        _count(module, 1)


def _leave(module: Any, args: Any, output: Any) -> None:
    """Forward has ended, with a result or an error, which may be that of a hook before `_enter`."""
    _end(module)


def _end(module: Any) -> None:
    if module.is_evaluating:
        module.is_evaluating = False
        _count(module, -1)


def _count(module: nn.Module, by: int) -> None:
    """As `float8.high_precision`, whose contexts may be open besides."""
    for layer in _float8_modules(module):
        layer.high_precision += by


def _float8_modules(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, tuple(FLOAT8_MODULES))]
