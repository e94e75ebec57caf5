"""The scales of a model's activations after training, measured on one batch.

    stream_std     the standard deviation of the residual stream behind every layer, first to last;
                   unit scaling makes it 1 before training
    operand_max    the largest magnitude that a linear layer of the stack reads; E4M3, without a
                   scale, ends at 448
    operand_std    the least and the greatest standard deviation of what they read

A parametrisation is stable if these stay near 1 at learning rates that it is trained with: nothing
then saturates, and nothing becomes too small for a format without scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.harness import Row
from benchmarks.models.training import Loss


@torch.no_grad()
def measure(loss_of: Loss, layers: Iterable[nn.Module], batch: tuple[Tensor, Tensor]) -> Row:
    """The scales of one forward pass.

    Args:
        loss_of: runs the model.
        layers: its residual layers, in order.
        batch: tokens and targets.

    Returns:
        The fields of the module's docstring.
    """
    stream: list[float] = []
    operands: list[Tensor] = []

    def after_layer(module: nn.Module, args: Any, out: Tensor) -> None:
        stream.append(out.float().std().item())

    def before_linear(module: nn.Module, args: Any) -> None:
        operands.append(args[0].float())

    handles = []
    for layer in layers:
        handles.append(layer.register_forward_hook(after_layer))
        linears = (module for module in layer.modules() if isinstance(module, nn.Linear))
        handles += [linear.register_forward_pre_hook(before_linear) for linear in linears]
    try:
        loss_of(*batch)
    finally:
        for handle in handles:
            handle.remove()
    stds = [operand.std().item() for operand in operands]
    return {
        "stream_std": stream,
        "operand_max": max(operand.abs().max().item() for operand in operands),
        "operand_std": [min(stds), max(stds)],
    }
