"""What a transform would not reach in a model, found before anything is changed.

A transformed model is a copy (``copy.deepcopy``) whose own ``forward`` runs, in this thread, under
torch function modes. That leaves out, and a transform that is not carried out makes no noise:

* code that is no Python any more: compiled, scripted and exported modules;
* other threads, or another module's forward around the model's: data-parallel wrappers;
* a ``forward`` that was assigned to the instance: Python calls it instead of the class's;
* weights that a function holds by itself: a copy of ``self.f = lambda x: self.layer(x)`` is the
  same function, with the weights of the original.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from float8.linear.switch import Float8Module
from float8.unit_scaling.transforms.computed import refuse_computed_attributes

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_reach(model: Any) -> None:
    """Refuses what a transform would not reach.

    Raises:
        TypeError: ``model`` is no module, or it or a submodule is compiled, scripted, exported or
            wrapped for data parallelism.
        ValueError: it has layers that were converted to float8, a ``forward`` of its instance,
            functions that hold its modules, or tensors that were computed; each is named.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a transform takes an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if (reason := _opaque(module, module is model)) is not None:
            raise TypeError(f"{name or 'the model'} ({type(module).__name__}) {reason}")
        if isinstance(module, Float8Module):
            raise ValueError(
                f"{name or 'the model'} is converted to float8 already, and calls no function that "
                "a transform could see: convert_from_float8_training(model), then transform it, "
                "with float8.unit_scaling.transforms.float8 for its products"
            )
    if "forward" in vars(model):
        raise ValueError(
            "the model's forward was assigned to the instance, and would be called in place of a "
            "transformed one: define it in the class, or wrap the model, nn.Sequential(model)"
        )
    _refuse_functions_that_hold(model)
    refuse_computed_attributes(model)


def _opaque(module: nn.Module, is_outermost: bool) -> str | None:
    if hasattr(module, "_orig_mod"):
        return (
            "is compiled, and a transform would not reach into it: transform it first, then compile"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "runs without Python, where transforms see nothing: transform the module in Python"
    if isinstance(module, _WRAPPERS):
        return "copies or synchronises its module: transform that module first, then wrap it"
    if isinstance(module, GraphModule):
        if any(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes):
            return "was exported to operators that transforms do not know: transform the module"
        if is_outermost:
            return "has a class for itself, generated: wrap it, nn.Sequential(model)"
    return None


def _refuse_functions_that_hold(model: nn.Module) -> None:
    own = {id(module): name or "the model itself" for name, module in model.named_modules()}
    own |= {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for attribute, value in _functions_of(module):
            held = next((own[id(x)] for x in _held_by(value, set()) if id(x) in own), None)
            if held is not None:
                raise ValueError(
                    f"{name or 'the model'} has the function {value.__qualname__} as {attribute}, "
                    f"which holds {held}: a copy of the model would call it with the original's "
                    "weights. Make it a method (self.f = self.method is one) or a module"
                )


def _functions_of(module: nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    for attribute, value in vars(module).items():
        hooks = attribute in ("_forward_hooks", "_forward_pre_hooks")
        for item in value.values() if hooks else (value,):
            if isinstance(item, types.FunctionType):
                yield (f"one of {attribute}" if hooks else attribute), item


def _held_by(function: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    """What a function's enclosed variables are, those of functions among them too."""
    for cell in function.__closure__ or ():
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield value
        if isinstance(value, types.FunctionType):
            yield from _held_by(value, seen)
