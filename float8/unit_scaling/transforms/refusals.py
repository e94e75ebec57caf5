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
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from float8.linear.switch import Float8Module

_WRAPS = "copies or synchronises its module: transform that module first, then wrap it"
_OUT_OF_REACH: dict[type, str] = {
    torch.jit.ScriptModule: "runs without Python: transform the module in Python",
    nn.DataParallel: _WRAPS,
    nn.parallel.DistributedDataParallel: _WRAPS,
    Float8Module: (
        "is converted to float8 already: convert_from_float8_training(model), then transform "
        "it, with float8.unit_scaling.transforms.float8 for its linear layers"
    ),
}
_REENTRANT = CheckpointFunction.forward.__code__


def check_reach(model: Any) -> None:
    """Refuses a model that a transform would not reach as a whole.

    Raises TypeError if ``model`` is not a module, and ValueError for the reasons above; the message
    names the module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a transform takes an nn.Module, got {type(model).__name__}")
    own = {id(p): name for name, p in model.named_parameters()}
    own |= {id(module): name or "the model itself" for name, module in model.named_modules()}
    for path, module in model.named_modules():
        if (reason := _unreachable(module, own, module is model)) is not None:
            raise ValueError(f"{path or 'the model'} ({type(module).__name__}) {reason}")


def _unreachable(module: nn.Module, own: dict[int, str], is_outermost: bool) -> str | None:
    """Why a transform would not reach a module; ``own`` names the model's parts by their ids."""
    if hasattr(module, "_orig_mod"):
        return "is compiled, where transforms see nothing: transform it first, then compile"
    for kind, reason in _OUT_OF_REACH.items():
        if isinstance(module, kind):
            return reason
    if isinstance(module, GraphModule):
        if any(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes):
            return "was exported to operators that transforms do not know: transform the module"
        if is_outermost:
            return "has a class for itself, generated: wrap it, nn.Sequential(model)"
    if is_outermost and "forward" in vars(module):
        return (
            "has a forward that was assigned to the instance, and would be called in place of a "
            "transformed one: define it in the class, or wrap the model, nn.Sequential(model)"
        )
    return _holds_parts(module, own)


def _holds_parts(module: nn.Module, own: dict[int, str]) -> str | None:
    for attribute, function in _functions_of(module):
        held = next((own[id(x)] for x in _enclosed_by(function, set()) if id(x) in own), None)
        if held is not None:
            return (
                f"has the function {function.__qualname__} as {attribute}, which holds {held}: a "
                "copy would call it with the original's weights. Make it a method or a module"
            )
    return None


def _functions_of(module: nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    for attribute, value in vars(module).items():
        hooks = attribute in ("_forward_hooks", "_forward_pre_hooks")
        for item in value.values() if hooks else (value,):
            if isinstance(item, types.FunctionType):
                yield (f"one of {attribute}" if hooks else attribute), item


def _enclosed_by(function: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    """The values of a function's enclosed variables, and of those of enclosed functions."""
    for cell in function.__closure__ or ():
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        with contextlib.suppress(ValueError):  # not assigned yet
            value = cell.cell_contents
            yield value
            if isinstance(value, types.FunctionType):
                yield from _enclosed_by(value, seen)


def refuse_computed_weights(model: nn.Module) -> None:
    """Refuses a model with a weight that a parametrization or a hook of torch's computes.

    Raises ValueError, which names the module.
    """
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if is_parametrized(module) or any(
            type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks
        ):
            raise ValueError(
                f"unit_scale: {name or 'the model'} computes its weight from other parameters: "
                "remove that first (torch.nn.utils.remove_weight_norm, remove_spectral_norm, "
                "prune.remove or parametrize.remove_parametrizations)"
            )


class RefusesCheckpointing(TorchFunctionMode):
    """Checks, at each call of an eager forward, whether a checkpoint has begun inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_enabled, self.hooks = torch.is_grad_enabled(), _saved_tensor_hooks()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_inside_checkpoint():
            raise RuntimeError(
                "activation checkpointing inside a transformed model would recompute without the "
                "transforms: put the checkpoint around the transformed model, transform the "
                "checkpointed blocks one by one, or build the model from float8.unit_scaling's "
                "modules and convert them (convert_to_float8_training)"
            )
        return func(*args, **(kwargs or {}))

    def _is_inside_checkpoint(self) -> bool:
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
