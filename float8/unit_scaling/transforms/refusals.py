"""Checks for parts of a model that a transform would not reach; they are refused.

A transformed model is a copy (``copy.deepcopy``) whose own ``forward`` runs, in this thread, under
torch function modes. A part of the model that these modes do not reach would run without the
transform and without an error. Checked before anything is changed (`check_reach`):

* code that Python does not run: compiled, scripted and exported modules;
* other threads, or another module's forward around the model's: data-parallel wrappers;
* a ``forward`` that was assigned to the instance: Python calls it instead of the class's;
* functions with references to weights: a copy of ``self.f = lambda x: self.layer(x)`` is the same
  function, with the weights of the original.

Checked while the model runs (`RefusesCheckpointing`): activation checkpointing inside the model.
``torch.utils.checkpoint`` runs a part of a forward once more in the backward, after the forward and
its modes have ended. The part would be recomputed without transforms, and the gradients would be
wrong. A checkpoint *around* a transformed model or block recomputes its whole forward, modes
included, and is right. The two kinds of checkpoint differ in what can be detected inside: the
reentrant one runs its part without gradients, under a frame of torch's; the other one sets
saved-tensor hooks.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from float8.arguments import check_module
from float8.linear.module import Float8Module

_WRAPS = "copies or synchronises its module: transform that module first, then wrap it"
_OUT_OF_REACH: dict[type, str] = {
    torch.jit.ScriptModule: "runs without Python: transform the module in Python",
    nn.DataParallel: _WRAPS,
    nn.parallel.DistributedDataParallel: _WRAPS,
    Float8Module: "is converted: convert_from_float8_training(model), then transforms.float8",
}


def check_reach(model: Any) -> None:
    """Refuses a model that a transform would not reach as a whole.

    Raises TypeError if ``model`` is not a module, and ValueError for the reasons above; the message
    names the module.
    """
    check_module(model, "a transform")
    own = {id(part) for part in (*model.modules(), *model.parameters())}
    for path, module in model.named_modules():
        if (reason := _unreachable(module, own, module is model)) is not None:
            raise ValueError(f"{path or 'the model'} ({type(module).__name__}) {reason}")


def _unreachable(module: nn.Module, own: set[int], is_outermost: bool) -> str | None:
    """Why a transform would not reach a module; ``own`` are the ids of the model's parts."""
    if hasattr(module, "_orig_mod"):
        return "is compiled, where transforms see nothing: transform it first, then compile"
    for kind, reason in _OUT_OF_REACH.items():
        if isinstance(module, kind):
            return reason
    is_graph = isinstance(module, GraphModule)
    if is_graph and any(
        isinstance(node.target, torch._ops.OpOverload)
        for node in module.graph.nodes  # type: ignore[union-attr]
    ):
        return "was exported to operators that transforms do not know: transform the module"
    if is_outermost and (is_graph or "forward" in vars(module)):
        return "has a forward of its own, before its class's: wrap the model, nn.Sequential(model)"
    for name, value in vars(module).items():
        hooks = value.values() if name in ("_forward_hooks", "_forward_pre_hooks") else ()
        for function in (value, *hooks):
            if not own.isdisjoint(_enclosed_by(function)):
                return (
                    f"has {function.__qualname__} as {name}, which holds a part of the model and "
                    "would keep the original's weights: make it a method or a module"
                )
    return None


def _enclosed_by(function: Any) -> Iterator[int]:
    """The ids of the values of a function's enclosed variables."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield id(cell.cell_contents)


class RefusesCheckpointing(TorchFunctionMode):
    """Checks, at each call of an eager forward, whether a checkpoint has begun inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_enabled, self.hooks = torch.is_grad_enabled(), _saved_tensor_hooks()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        hooks = _saved_tensor_hooks()
        begins = hooks not in (None, self.hooks) and "_checkpoint_hook" in hooks[0].__qualname__
        if begins or (
            self.grad_enabled
            and not torch.is_grad_enabled()
            and any(f.f_code is _REENTRANT for f, _ in traceback.walk_stack(None))
        ):
            raise RuntimeError(
                "activation checkpointing inside a transformed model would recompute without the "
                "transforms: put the checkpoint around the transformed model"
            )
        return func(*args, **(kwargs or {}))


_REENTRANT = CheckpointFunction.forward.__code__


def _saved_tensor_hooks() -> Any:
    """The pair of hooks that is called, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
