"""`unit_scale`: any model, unit-scaled in one line.

    model = unit_scale(model)
    optimizer = uu.optim.AdamW(model, lr=2**-6)

Unit scaling (arXiv 2303.11257) gives every tensor of a training step, activations, weights and
gradients, a standard deviation near 1 at initialisation. A model written for it calls other
functions throughout. `unit_scale` replaces the functions while the model runs: a torch function
mode sees each call of the model's own forward, in any spelling, and calls the unit-scaled function
instead. In order:

1.  The functions in ``replace`` are replaced, then those of `registry.torch_map`, and every
    contraction (`contractions`). Other functions are called unchanged. A contraction by a trained
    weight without a unit-scaled version is refused, because no factor corrects the weight's scale.
2.  If a branch reads a tensor and its result is added to that tensor, the addition becomes a
    residual layer, weighted by u-muP's depth rule (arXiv 2407.17465, appendix G). Other sums become
    `U.add`, except those that are part of a formula (`history`).
3.  After the last residual layer, calls whose activations come over cut edges are unconstrained:
    their gradients have factors of their own (`gradient_factors`).
4.  Weights are scaled to standard deviation 1, biases are set to 0, and both are marked for the
    optimizers of u-muP (`unit_init`).

**Factors that are known late.** The mode records from which values each tensor was computed, as
numbers, without keeping tensors (`history`). An addition is then known to be a residual layer or
not (`decisions`). By that time the branch has read its input, and the gradient of that read has a
factor that depends on the addition. So each operand is read through an identity whose backward
looks its factor up, after the forward. The same holds for step 3. A model may therefore take
another path in every forward: skip a mask, route tokens, leave out layers.

``torch.compile`` needs these factors as constants: it traces a forward twice, and computes them in
the first trace (`decisions`). The forward must be one graph.

One number is needed before the forward: the depth rule divides by the number of residual layers.
They are counted in an additional run before the first forward, on copies of the model and its
arguments. The number is part of the model, as its weights are; deepcopy and pickle
keep it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from float8.unit_scaling import functional as U
from float8.unit_scaling.registry import Function
from float8.unit_scaling.scale import scale_bwd
from float8.unit_scaling.transforms.contractions import (
    Replacements,
    replacements_of,
    residual_sum,
    takes,
    tensors_in,
    with_tensors,
)
from float8.unit_scaling.transforms.decisions import ALIVE, Decision, Decisions, ask, start
from float8.unit_scaling.transforms.history import KEEP, READOUT, RESIDUAL, is_alias, is_in_place
from float8.unit_scaling.transforms.transformed import Mode, Transform, Transformed, transformed
from float8.unit_scaling.transforms.unit_init import unit_init

M = TypeVar("M", bound=nn.Module)

UNIT_SCALED = "float8.unit_scaling.functional"  # the package of functions that stay as they are
_REPLACEMENTS: dict[str, Function] = {RESIDUAL: residual_sum, READOUT: U.linear_readout}


def unit_scale(module: M, replace: Mapping[Function, Function] | None = None) -> M:
    """A unit-scaled copy of a model.

    Args:
        module: any module. It is not changed; the copy has parameters of its own. The first forward
            counts its residual layers in a run on copies: its arguments are ones that
            ``copy.deepcopy`` takes.
        replace: functions that the model calls -> the functions to call instead, before any other
            rule. A key is a function of torch, or a Python function that transforms see as one
            call. For that, decorate its definition with
            `float8.unit_scaling.registry.overridable`, or set ``module.f = overridable(module.f)``
            before the model's code looks it up. A value that is a function of torch with a
            unit-scaled version stands for that version (``{my_gelu: F.gelu}``); any other is called
            unchanged. A function mapped to itself (``{F.dropout: F.dropout}``) is not replaced.

    Returns:
        A module of a subclass of ``type(module)``, with the same names, methods and state dict.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: the module is unit-scaled or compiled already, or has meta parameters; or a
            key of ``replace`` is a function whose calls a transform cannot see. While running: a
            function without a unit-scaled version multiplies by a trained weight.
    """
    functions = dict(replace or {})
    for function, other in functions.items():
        place = getattr(function, "__module__", None) or "torch"
        is_seen = place.partition(".")[0] in ("torch", "_operator")
        if not (is_seen or hasattr(function, "implementation") or function is other):
            raise ValueError(
                f"replace: a transform does not see calls of {function.__qualname__}: decorate it "
                "with float8.unit_scaling.registry.overridable, before the model is built"
            )
    transform = UnitScale(tuple(functions.items()))
    new = transformed(module, transform)
    if any([getattr(p, "float8_products", None) for p in new.modules() if p is not new]):
        raise ValueError(
            "unit_scale: a part of the model has the transform float8, whose contractions an outer "
            "transform does not see: transform the whole model, float8(unit_scale(model))"
        )
    transform.outputs = unit_init(new)
    return new


class UnitScale(Transform):
    """Calls unit-scaled functions instead of a model's; see the module.

    ``outputs`` are the names of the output weights, and ``layers`` is the number of residual
    layers, None until they have been counted.
    """

    depth: ClassVar[int] = 1
    outputs: frozenset[str] = frozenset()
    layers: int | None = None

    def __new__(cls, *_: Any) -> UnitScale:
        """Registers the instance; copies and unpickled ones are created here too."""
        new = super().__new__(cls)
        ALIVE[id(new)] = new
        return new

    def __init__(self, replace: tuple[tuple[Function, Function], ...] = ()) -> None:
        self.replace = replace

    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode for one forward."""
        if torch.compiler.is_dynamo_compiling():
            return UnitScaleMode(start(id(self)), replacements_of(dict(self.replace)), model)
        if self.layers is None:
            self.layers = self._count(model, args, kwargs)
        decisions = self.decisions()
        return UnitScaleMode(decisions, decisions.replacements, model)

    def decisions(self, known: Any = None) -> Decisions:
        """The decisions for one forward; ``known`` as of `Decisions`."""
        return Decisions(replacements_of(dict(self.replace)), self.outputs, self.layers, known)

    def _count(self, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The number of residual layers, counted in one forward without side effects.

        Parameters are shared, buffers and arguments are copied. Objects that a forward reaches in
        another way, a global variable for example, are not copied.
        """
        decisions = self.decisions()
        with _traceless(model):
            twin, args, kwargs = _copied(model, args, kwargs)
            for module in twin.modules():
                if isinstance(module, Transformed):  # the others change no residual layer
                    only = [t for t in module.transforms if isinstance(t, UnitScale)]
                    module.transforms = tuple(only)
            with UnitScaleMode(decisions, decisions.replacements, twin) as mode:
                result = super(Transformed, twin).forward(*args, **kwargs)  # type: ignore[misc]
            mode.finish(result)
        return len(decisions.residuals)


def _copied(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Copies of a model, which shares its parameters, and of the arguments of a forward.

    The forward may differentiate its arguments, or change them in place: a copy requires gradients
    where its tensor does, and is a leaf where its tensor is one.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor):
            new = x.detach().clone().requires_grad_(x.requires_grad)
            memo[id(x)] = new if x.is_leaf else new.clone()
    return copy.deepcopy((model, args, kwargs), memo)


@contextlib.contextmanager
def _traceless(model: nn.Module) -> Iterator[None]:
    """Leaves no trace of a forward in random states, outer modes and saved-tensor hooks.

    Modes of outer transformed models would record the forward. Hooks, for example a checkpoint's,
    would save its tensors: the recomputation, which counts no more, saves fewer.
    """
    devices = {p.get_device() for p in model.parameters() if p.is_cuda}
    state = random.getstate()
    with contextlib.ExitStack() as stack:
        # The mode of torch.set_default_device is always the last one.
        while not isinstance(_get_current_function_mode(), DeviceContext | None):
            stack.enter_context(_pop_mode_temporarily())
        stack.callback(random.setstate, state)
        stack.enter_context(torch.random.fork_rng(devices))
        hooks = torch.autograd.graph.saved_tensors_hooks
        stack.enter_context(hooks(Tensor.detach, lambda x: x))  # as it is, x would never be freed
        yield


class UnitScaleMode(Mode):
    """Carries out decisions about the calls of one forward.

    ``decisions`` are `Decisions` or, while torch.compile traces, what `decisions.start` returned.
    """

    def __init__(
        self, decisions: Decisions | int, replacements: Replacements, model: nn.Module
    ) -> None:
        super().__init__(replacements)
        self.decisions = decisions
        self.numbers: Any = {} if isinstance(decisions, int) else WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            self._leaf(parameter, name)

    def finish(self, result: Any) -> None:
        """End the forward, which has returned ``result``."""
        ask(self.decisions, "finish", tuple([self._number(x) for x in floats_of(result)]))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(self.decisions, int) != torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "torch.compile breaks the graph inside a unit-scaled model: fullgraph=True names "
                "the place. Change it, or run the model in eager mode"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def inside(self, func: Any) -> Function | None:
        """What runs in the function's place; functions of this library stay as they are."""
        is_ours = hasattr(func, "implementation") and func.__module__.startswith(UNIT_SCALED)
        return None if is_ours else super().inside(func)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Decide about a call and carry it out."""
        with _unseen():
            tensors = tensors_in((args, kwargs))
            operands = [(path, x) for path, x in tensors if x.is_floating_point()]
            inputs = tuple([(path, self._number(x), x.dim()) for path, x in operands])
            is_plain = func in (torch.add, Tensor.add_) and _is_plain(*args, **kwargs)
        if inputs and inputs[0][0] == (0, 0) and is_alias(func):
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                self.numbers[result] = inputs[0][1]
            return result
        step = ask(self.decisions, "begin", func, inputs, len(operands) < len(tensors), is_plain)
        in_place = is_in_place(func) or kwargs.get("inplace") is True
        changed = operands[0][1] if in_place and operands and func is not Tensor.add_ else None
        factors = dict(step.gradient_factors) if torch.is_grad_enabled() else {}
        read = {  # in place of operands; they multiply gradients
            path: scale_bwd(x, factors[path])
            for path, x in operands
            if x is not changed and path in factors and x.requires_grad
        }
        result = self._carry_out(step, func, *with_tensors((args, kwargs), read))
        if func is Tensor.add_ and result is not args[0]:
            result = args[0].copy_(result)
        with _unseen():
            for path, x in operands:
                if path in read and result is read[path]:
                    result = x  # returned unchanged, as dropout does in evaluation
            effect = changed if result is None else None  # x[i] = y
            outputs = [
                x
                for _, x in tensors_in((result, effect))
                if x.is_floating_point() and (in_place or not any([x is y for _, y in operands]))
            ]
            numbers = ask(self.decisions, "end", len(outputs))
            for x, number in zip(outputs, numbers, strict=True):
                self.numbers[x] = number
        return result

    def _carry_out(self, step: Decision, func: Any, args: Any, kwargs: Any) -> Any:
        func = torch.add if func is Tensor.add_ else func  # `call` copies its result
        if step.role == KEEP:
            return func(*args, **kwargs)
        replacement = _REPLACEMENTS.get(step.role) or self.handlers.get(func, func)
        # Torch's Python functions pass all keywords on; the replacement need not have all.
        given = {
            name: x
            for name, x in kwargs.items()
            if takes(replacement, name) or not (x is None or x is False)
        }
        return replacement(*args, **{**dict(step.options), **given})

    def _number(self, x: Tensor) -> int:
        number: int | None = self.numbers.get(x)
        if number is None and torch.compiler.is_dynamo_compiling() and x._base is not None:
            number = self.numbers.get(x._base)  # of x.T, which a mode does not see there
        return self._leaf(x, None) if number is None else number

    def _leaf(self, x: Tensor, name: str | None) -> int:
        trained = isinstance(x, nn.Parameter) and x.requires_grad
        name = "" if trained and name is None else name
        number: int = ask(self.decisions, "leaf", name, trained)
        self.numbers[x] = number
        return number


def _is_plain(input: Any, other: Any, *, alpha: float = 1, out: Any = None) -> bool:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return False
    if alpha != 1 or out is not None:
        return False
    return True if input.shape == other.shape else False  # noqa: SIM210  a guard of dynamo's


def _unseen() -> Any:
    """A context in which modes see no call; dynamo does not trace it."""
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    return torch._C.DisableTorchFunction()


def floats_of(returned: Any) -> list[Tensor]:
    """The floating-point tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    elif hasattr(returned, "__dict__") and not isinstance(returned, nn.Module):
        returned = list(vars(returned).values())
    if isinstance(returned, list | tuple):
        return [x for item in returned for x in floats_of(item)]
    return []
