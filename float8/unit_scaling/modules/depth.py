"""Stacks that set the depth of their parameters: `DepthModuleList`, `DepthSequential`.

The updates of L residual layers add up in the residual stream, so each parameter in a stack of L
trains with a learning rate divided by ``sqrt(L)`` (u-muP, arXiv 2407.17465, table 2, "residual").
A stack sets ``mup_scaling_depth = L`` on all its parameters; `optim.lr_scale_for_depth` reads it.

L is the number of layers of one stack at construction; layers added later get no depth. A parameter
cannot be in two stacks, so stacks do not nest. A transformer layer counts once, though it has two
branches: that is a constant, which the global learning rate absorbs. A slice of a stack is a plain
module, whose parameters keep their depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from float8.unit_scaling.parameter import has_parameter_data, set_parameter_data


class DepthModuleList(nn.ModuleList):
    """An ``nn.ModuleList`` of residual layers; a layer that is given twice counts twice.

    Raises:
        ValueError: a parameter has no ``mup_type``, or is in a stack already.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        _set_depth(self, len(self))

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return nn.ModuleList(list(self)[idx])
        return super().__getitem__(idx)


class DepthSequential(nn.Sequential):
    """An ``nn.Sequential`` of residual layers, or of one ordered dict of them.

    Raises:
        ValueError: a parameter has no ``mup_type``, or is in a stack already.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _set_depth(self, len(self))

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return nn.Sequential(*list(self)[idx])
        return super().__getitem__(idx)


def _set_depth(stack: nn.Module, depth: int) -> None:
    """Set the depth of all parameters, or of none if one is refused."""
    parameters: dict[str, Any] = dict(stack.named_parameters())
    for name, parameter in parameters.items():
        if not has_parameter_data(parameter) or parameter.mup_scaling_depth is not None:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} has no mup_type, or is in a "
                "stack already: build the layers of unit-scaled modules or with uu.Parameter, and "
                "do not nest stacks"
            )
    for parameter in parameters.values():
        set_parameter_data(parameter, parameter.mup_type, depth)
