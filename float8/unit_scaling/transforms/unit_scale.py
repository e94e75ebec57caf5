"""`unit_scale`: any model, unit-scaled in one line.

    model = unit_scale(model)
    optimizer = uu.optim.AdamW(model, lr=2**-6)

Unit scaling (arXiv 2303.11257) gives every tensor of a training step, activations, weights and
gradients, a standard deviation near 1 at initialisation. Written by hand it replaces every function
of a model. `unit_scale` does that while the model runs: a torch function mode sees each call of the
model's own forward, however it is spelt, and calls the unit-scaled function in its place. In order:

1.  What is in ``replace`` is replaced, then everything that `registry.torch_map` knows, and every
    matrix product (`products`). Other functions are left as they are, but for products by a trained
    weight, which are refused (`products.UNSCALED`): nothing would make up for its scale.
2.  Additions of a tensor to what a branch made of it become residual layers, weighted by u-muP's
    depth rule (arXiv 2407.17465, appendix G; `residuals`); other sums become `U.add`, except
    those that are part of a formula (`sums`).
3.  After the last residual layer, what comes over a cut-edge is unconstrained: its gradients have
    factors of their own (`cut_edges`).
4.  Weights are brought to standard deviation 1, biases to 0, and marked for the optimizers of
    u-muP (`unit_init`).

**No forward is predicted.** The mode notes what each tensor was computed from, in numbers, without
keeping tensors (`recording`). When an addition comes, this says whether it is a residual layer. The
branch has read its input by then, and that read multiplies the gradient by a factor which depends
on the addition. So an operand is read through an identity whose backward asks for its factor when
it runs, after the forward (`decisions`); the same holds for step 3. A model may therefore take
another path in every forward: skip a mask, route tokens, leave out layers.

``torch.compile`` wants these factors as constants: it traces a forward twice, and finds them in the
first trace (`tracing`). The forward has to be one graph.

One number is needed before the forward: the depth rule divides by the number of residual layers.
It is counted in the first forward, which runs once more on copies for it (`copies`), and stays.
It belongs to the model, as its weights do, and deepcopy and pickle take it along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from float8.unit_scaling import functional as U
from float8.unit_scaling.scale import scale_bwd
from float8.unit_scaling.spellings import respelt
from float8.unit_scaling.transforms.copies import on_copies
from float8.unit_scaling.transforms.decisions import (
    Decisions,
    Factors,
    Step,
)
from float8.unit_scaling.transforms.decompositions import decomposition_of
from float8.unit_scaling.transforms.recording import (
    ALIASES,
    Path,
    is_in_place,
    name_of,
    tensors_in,
    with_tensors,
)
from float8.unit_scaling.transforms.replace import made_visible
from float8.unit_scaling.transforms.rules import Rules, is_weight, rules_of
from float8.unit_scaling.transforms.sums import ADDITIONS, KEEP, RESIDUAL
from float8.unit_scaling.transforms.tracing import Traceable, TracedDecisions
from float8.unit_scaling.transforms.transformed import (
    Mode,
    Transformed,
    transformed,
)
from float8.unit_scaling.transforms.unit_init import output_weights, unit_init

Function = Callable[..., Any]
M = TypeVar("M", bound=nn.Module)

OURS = "float8.unit_scaling.functional"  # what is unit-scaled already

# What concerns a tensor itself and its place in the graph, and does not read its values.
_OF_THE_GRAPH = frozenset(
    {
        *(torch.autograd.grad, torch.autograd.backward),
        *(Tensor.backward, Tensor.register_hook, Tensor.retain_grad),
    }
)


def unit_scale(module: M, replace: Mapping[Function, Function] | None = None) -> M:
    """A unit-scaled copy of a model.

    Args:
        module: any module. It stays as it is; the copy has parameters of its own.
        replace: functions of the model's -> what to call in their place, before any other rule. A
            key is a function of torch, or any Python function that the model finds by a name: a
            global of a module, a variable of an enclosing function, or an attribute of one of its
            modules. A value is called as it is given, except that a function of torch which has a
            unit-scaled version means that version (``{my_gelu: F.gelu}``); a function that is its
            own value (``{F.dropout: F.dropout}``) is left alone.

    Returns:
        A module of a subclass of ``type(module)``, with the same names, methods and state dict.

    Raises:
        TypeError: ``module`` is no module, or a compiled one; ``replace`` holds no functions.
        ValueError: the module is unit-scaled already, or has parameters on the meta device; or a
            key of ``replace`` is not found where the module would look for it. While running: a
            product has no unit-scaled version, or a trained parameter is none of the model's; or,
            the first time, the arguments cannot be copied.
    """
    functions = dict(replace or {})
    for function in (*functions, *functions.values()):
        if not callable(function):
            raise TypeError(f"replace maps functions to functions, got {function!r}")
    transform = UnitScale(tuple(functions.items()))
    new = transformed(module, transform)
    _refuse_products_in_float8(new)
    unit_init(new)
    transform.outputs = output_weights(new)
    made_visible(new, [f for f in functions if f not in functions.values()])
    return new


def _refuse_products_in_float8(model: nn.Module) -> None:
    for name, module in model.named_modules():
        inner = getattr(module, "transforms", ()) if module is not model else ()
        if isinstance(module, Transformed) and any(t.depth > 2 for t in inner):
            raise ValueError(
                f"unit_scale: {name} has the transform float8, whose products nothing around it "
                "sees: transform the whole model, float8(unit_scale(model)), with a filter"
            )


class UnitScale(Traceable):
    """Calls unit-scaled functions in place of a model's; see the module."""

    depth: ClassVar[int] = 1
    outputs: frozenset[str] = frozenset()  # the output weights, as `unit_init` has found them

    def __init__(self, replace: tuple[tuple[Function, Function], ...] = ()) -> None:
        self.replace = replace

    def mode(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Mode:
        """The mode for one forward."""
        rules = rules_of(dict(self.replace))
        if torch.compiler.is_dynamo_compiling():
            return UnitScaleMode(TracedDecisions(id(model)), rules, model, {})
        if self.layers is None:
            count = functools.partial(_count, rules, self.outputs)
            self.layers = on_copies(model, args, kwargs, count)
        decisions = Decisions(rules, output_weights(model, self.outputs), self.layers)
        return UnitScaleMode(decisions, rules, model, WeakIdKeyDictionary())

    def traced(self, model: nn.Module, known: Factors | None) -> Decisions:
        """The decisions for a forward that is traced."""
        rules = rules_of(dict(self.replace))
        outputs = output_weights(model, self.outputs)
        return Decisions(rules, outputs, self.layers, known, logs=known is None)


def _count(rules: Rules, outputs: frozenset[str], twin: nn.Module, args: Any, kwargs: Any) -> int:
    for module in twin.modules():
        if isinstance(module, Transformed):  # there are no values to watch or to round
            module.transforms = tuple(t for t in module.transforms if isinstance(t, UnitScale))
    decisions = Decisions(rules, output_weights(twin, outputs), logs=True)
    forward = super(Transformed, twin).forward  # type: ignore[misc]
    mode = UnitScaleMode(decisions, rules, twin, WeakIdKeyDictionary())
    with mode:
        result = forward(*args, **kwargs)
    mode.finish(result)
    return len(decisions.found)


class UnitScaleMode(Mode):
    """Carries out decisions about the calls of one forward."""

    def __init__(
        self, decisions: Decisions | TracedDecisions, rules: Rules, model: nn.Module, numbers: Any
    ) -> None:
        super().__init__(rules)
        self.decisions, self.numbers = decisions, numbers
        for name, parameter in model.named_parameters():
            self._outside(parameter, name)

    def finish(self, result: Any) -> None:
        """The forward has returned ``result``."""
        self.decisions.finish(tuple([self._number(x) for x in floats_of(result)]))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(self.decisions, TracedDecisions) != torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "torch.compile breaks the graph inside a unit-scaled model, whose parts cannot be "
                "compiled one by one: fullgraph=True names the place. Change it, or run the model "
                "in eager mode"
            )
        kwargs, func = kwargs or {}, respelt(func)
        if getattr(func, "implementation", None) in self.handlers:
            func = func.implementation  # replaced by the name that it had before made_visible
        elif func not in self.handlers and (inside := _opened(func)) is not None:
            with self:
                return inside(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _out_of_sight():
            tensors = tensors_in((args, kwargs))
            operands = [(path, x) for path, x in tensors if x.is_floating_point()]
            step = self.decisions.begin(
                func,
                tuple([(path, self._number(x)) for path, x in operands]),
                len(operands) < len(tensors),
                func in ADDITIONS and _is_plain(*args, **kwargs),
                tuple([name for name, x in kwargs.items() if x is None or x is False]),
            )
        in_place = is_in_place(func) or kwargs.get("inplace") is True
        changed = operands[0][1] if in_place and operands and func not in ADDITIONS else None
        read = self._reads(step, func, [(path, x) for path, x in operands if x is not changed])
        result = self._carry_out(step, func, *with_tensors((args, kwargs), read))
        if func is Tensor.add_ and result is not args[0]:
            result = args[0].copy_(result)
        with _out_of_sight():
            for path, x in operands:
                if path in read and result is read[path]:
                    result = x  # handed through, as dropout does in evaluation
            effect = changed if result is None else None  # x[i] = y
            outputs = [
                x
                for _, x in tensors_in((result, effect))
                if x.is_floating_point()
                and (in_place or not _is_any_of(x, [y for _, y in operands]))
            ]
            numbers = self.decisions.end(tuple([x.dim() for x in outputs]))
            for x, number in zip(outputs, numbers, strict=True):
                self.numbers[x] = number
        return result

    def _reads(
        self, step: Step, func: Any, operands: list[tuple[Path, Tensor]]
    ) -> dict[Path, Tensor]:
        """What a call reads in place of its operands: identities that multiply gradients."""
        if isinstance(self.decisions, TracedDecisions):
            factors = dict(step.reads)
            return {p: scale_bwd(x, factors[p]) for p, x in operands if p in factors}
        if not torch.is_grad_enabled() or func in _OF_THE_GRAPH:
            return {}
        ask = self.decisions.factor_of_read
        return {
            path: scale_bwd(x, functools.partial(ask, step.number, path))
            for path, x in operands
            if x.requires_grad
            and name_of(func) not in ALIASES
            # A transform that this one calls may ask which weight it is.
            and not (isinstance(x, nn.Parameter) and is_weight(path, func, self.handlers))
        }

    def _carry_out(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.role == KEEP:
            return func(*args, **kwargs)
        if step.role == RESIDUAL:
            pair = _addends(*args, **kwargs)
            return U.residual_add(pair[1 - step.skip], pair[step.skip], step.tau)
        if step.role == "readout":
            return U.linear_readout(*args, **kwargs)
        options: dict[str, Any] = {name: True for name in step.options}
        if step.free:
            options["constraint"] = None
        elif step.may_be_free and isinstance(self.decisions, Decisions):
            options["constraint"] = functools.partial(_undecided, self.decisions, step.number)
        if step.dropped:
            kwargs = {name: x for name, x in kwargs.items() if name not in step.dropped}
        rule = self.handlers[torch.add if func is Tensor.add_ else func]
        return rule(*args, **kwargs, **options)

    def _number(self, x: Tensor) -> int:
        number = self.numbers.get(x)
        if number is not None:
            return number
        if torch.compiler.is_dynamo_compiling():  # which shows no mode that x.T is a call
            base = x._base
            number = None if base is None else self.numbers.get(base)
            if number is not None:
                self.numbers[x] = self.decisions.view(number, x.dim())
                return self.numbers[x]
        return self._outside(x, None)

    def _outside(self, x: Tensor, name: str | None) -> int:
        is_parameter = isinstance(x, nn.Parameter)
        shape = tuple(x.shape) if is_parameter else ()
        trained = is_parameter and x.requires_grad
        if trained and name is None:
            name = ""
        number = self.decisions.outside(x.dim(), name, trained, shape)
        self.numbers[x] = number
        return number


def _undecided(decisions: Decisions, call: int, output: float, *grads: float) -> tuple[Any, ...]:
    """A constraint: that on the output's scale, or none, whichever it turns out to be."""

    def choose(grad: float) -> float:
        return grad if decisions.is_free(call) else output

    return (output, *[functools.partial(choose, grad) for grad in grads])


def _opened(func: Any) -> Function | None:
    """What to run, watching, in place of a function that hides calls; None if it hides none."""
    if hasattr(func, "implementation") and not func.__module__.startswith(OURS):
        return func.implementation
    return decomposition_of(func)


def _addends(input: Tensor, other: Tensor, alpha: float = 1) -> tuple[Tensor, Tensor]:
    return input, other


def _is_plain(input: Any, other: Any, *, alpha: float = 1, out: Any = None) -> bool:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return False
    if alpha != 1 or out is not None:
        return False
    return True if input.shape == other.shape else False  # noqa: SIM210  a guard of dynamo's


def _is_any_of(x: Tensor, others: list[Tensor]) -> bool:
    return any(x is y for y in others)


def _out_of_sight() -> Any:
    """Where looking at a tensor is no call that a mode sees; dynamo does not trace this context."""
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
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
