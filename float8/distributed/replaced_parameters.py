"""Detect an optimizer that holds parameters which conversion has replaced.

Conversion may replace a Parameter by one of another type. An optimizer that was built before still
holds the old one, which gets no gradient any more: the weights would stay unchanged without an
error. So conversion marks the old Parameter, and the first step of an optimizer that holds a marked
one raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_MARK = "_float8_replaced_in"  # an attribute: weak references would forbid torch.utils.swap_tensors
_GATHERING = (
    "enable_fsdp_float8_all_gather=True has replaced a weight of {} that this optimizer holds: "
    "convert (and shard) the whole model first, then build the optimizer from its parameters"
)


def mark_replaced(old: Tensor, fqn: str, by: str = _GATHERING) -> None:
    """Mark a Parameter that the model no longer has.

    ``fqn`` is the layer's name. ``by`` is the message, with ``{}`` for the name: what replaced the
    Parameter, and the remedy.
    """
    setattr(old, _MARK, by.format(fqn or "the model"))
    install_hook(register_optimizer_step_pre_hook, _before_step)


def unmark(parameter: nn.Parameter) -> None:
    """Remove the mark from a Parameter that the model has again."""
    vars(parameter).pop(_MARK, None)


@functools.cache
def install_hook(register: Callable[..., Any], hook: Callable[..., Any]) -> None:
    """Register a hook of all optimizers, once.

    It is never removed, because torch iterates over its hooks while they run.
    """
    register(hook)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if hasattr(p, _MARK):
                raise RuntimeError(vars(p)[_MARK])
