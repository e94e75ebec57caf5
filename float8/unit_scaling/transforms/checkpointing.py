"""Refuses activation checkpointing inside a transformed model, which would go around it.

``torch.utils.checkpoint`` runs a part of a forward once more in the backward, where that forward,
and with it every mode that a transform entered, is over: the part would be recomputed as it is
without transforms, and the gradients would be those of neither model. A checkpoint *around* a
transformed model or block recomputes its whole forward, modes included, and is right.

The two kinds of checkpoints are told by what they leave to be seen inside: the reentrant one runs
its part without gradients, under a frame of torch's; the other one by its saved-tensor hooks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

_REENTRANT = CheckpointFunction.forward.__code__


class RefusesCheckpointing(TorchFunctionMode):
    """Looks, at each call of an eager forward, whether a checkpoint has begun inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_enabled, self.hooks = torch.is_grad_enabled(), _saved_tensor_hooks()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recomputes():
            raise RuntimeError(
                "activation checkpointing inside a transformed model would recompute without the "
                "transforms: put the checkpoint around the transformed model, transform the "
                "checkpointed blocks one by one, or build the model from float8.unit_scaling's "
                "modules and convert them (convert_to_float8_training)"
            )
        return func(*args, **(kwargs or {}))

    def _recomputes(self) -> bool:
        hooks = _saved_tensor_hooks()
        if hooks is not None and (self.hooks is None or hooks[0] is not self.hooks[0]):
            return "_checkpoint_hook" in hooks[0].__qualname__
        return self.grad_enabled and not torch.is_grad_enabled() and _is_under(_REENTRANT)


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_under(code: Any) -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
