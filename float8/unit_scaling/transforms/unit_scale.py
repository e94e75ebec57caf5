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

Steps 2 and 3 look ahead, hence a plan (`plan`), made by running the model once on fake tensors when
inputs of a new kind (number, rank, dtype, not size) come in, in training or not. Under
``torch.compile`` it is made while tracing. A model whose path through its Python depends on the
values in tensors, or on chance, cannot be planned, and says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.scale import scale_bwd
from float8.unit_scaling.spellings import respelt
from float8.unit_scaling.transforms.decompositions import decomposition_of
from float8.unit_scaling.transforms.inputs import filled, kind_of, skeleton_of
from float8.unit_scaling.transforms.plan import Plan, Step, make_plan, results_of, rules_of
from float8.unit_scaling.transforms.recording import (
    Path,
    Recorder,
    Value,
    at,
    line_of_caller,
    line_of_error,
    name_of,
    on_fake_tensors,
    tensors_in,
    with_at,
)
from float8.unit_scaling.transforms.replace import made_visible
from float8.unit_scaling.transforms.transformed import (
    Mode,
    Transform,
    Transformed,
    model_of,
    transformed,
)
from float8.unit_scaling.transforms.unit_init import output_weights, unit_init

Function = Callable[..., Any]
M = TypeVar("M", bound=nn.Module)

OURS = "float8.unit_scaling.functional"  # what is unit-scaled already


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
            key of ``replace`` is not found where the module would look for it. While running: the
            forward cannot be planned, or takes another way than planned.
    """
    functions = dict(replace or {})
    for function in (*functions, *functions.values()):
        if not callable(function):
            raise TypeError(f"replace maps functions to functions, got {function!r}")
    new = transformed(module, UnitScale(tuple(functions.items())))
    _refuse_products_in_float8(new)
    unit_init(new)
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


class UnitScale(Transform):
    """Calls unit-scaled functions in place of a model's; see the module."""

    depth: ClassVar[int] = 1

    def __init__(self, replace: tuple[tuple[Function, Function], ...] = ()) -> None:
        self.replace = replace

    def mode(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Mode:
        """The mode that carries out the plan for these inputs."""
        arguments = (args, kwargs)
        tensors = [tensor for _, tensor in tensors_in(arguments)]
        plan = plan_for(id(model), skeleton_of(arguments), *tensors)
        return UnitScaleMode(plan, rules_of(dict(self.replace)))


class _Watch(Mode):
    """Sees the calls that `call` is to decide about, and enters what hides others."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, func = kwargs or {}, respelt(func)
        if getattr(func, "implementation", None) in self.handlers:
            func = func.implementation  # replaced by the name that it had before made_visible
        elif func not in self.handlers and (inside := _opened(func)) is not None:
            with self:
                return inside(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what is to be done for a call."""
        raise NotImplementedError


def _opened(func: Any) -> Function | None:
    """What to run, watching, in place of a function that hides calls; None if it hides none."""
    if hasattr(func, "implementation") and not func.__module__.startswith(OURS):
        return func.implementation
    return decomposition_of(func)


class _Record(_Watch):
    """Writes every call to a recorder."""

    def __init__(self, rules: Mapping[Function, Function], recorder: Recorder) -> None:
        super().__init__(rules)
        self.recorder = recorder

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.recorder.record(func, args, kwargs)


class UnitScaleMode(_Watch):
    """Carries out a plan: the n-th call that it concerns takes the n-th step."""

    def __init__(self, plan: Plan, rules: Mapping[Function, Function]) -> None:
        super().__init__(rules)
        self.plan, self.at = plan, 0
        self.read: dict[tuple[int, float], Tensor] = {}  # what residual branches begin with

    def finish(self) -> None:
        """Refuses a forward that stopped early: gradients were scaled for what did not follow."""
        if self.at < len(self.plan.steps):
            _refuse_detour(self.plan, self.at, "returns")

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Take the next step if it is a call that the plan concerns, else leave it."""
        name = name_of(func)
        if name not in self.plan.names:
            return func(*args, **kwargs)
        if self.at >= len(self.plan.steps) or self.plan.steps[self.at].name != name:
            _refuse_detour(self.plan, self.at, f"calls {name} at {line_of_caller()}")
        step = self.plan.steps[self.at]
        self.at += 1
        whole = args, kwargs
        for path, value, factor in step.edges:
            whole = self._branching(whole, path, value, factor)
        result = self._carry_out(step, func, *whole)
        if func is Tensor.add_ and result is not args[0]:
            return args[0].copy_(result)
        return result

    def _branching(self, whole: Any, path: Path, value: int, factor: float) -> Any:
        if (value, factor) not in self.read:
            self.read[value, factor] = scale_bwd(at(whole, path), factor)
        return with_at(whole, path, self.read[value, factor])

    def _carry_out(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.role == "keep":
            return func(*args, **kwargs)
        if step.role == "residual":
            pair = _addends(*args, **kwargs)
            return U.residual_add(pair[1 - step.skip], pair[step.skip], step.tau)
        if step.role == "readout":
            return U.linear_readout(*args, **kwargs)
        options: dict[str, Any] = {name: True for name in ("weight", "mix") if getattr(step, name)}
        if step.free:
            options["constraint"] = None
        if step.dropped:
            kwargs = {name: x for name, x in kwargs.items() if name not in step.dropped}
        rule = self.handlers[torch.add if func is Tensor.add_ else func]
        return rule(*args, **kwargs, **options)


def _addends(input: Tensor, other: Tensor, alpha: float = 1) -> tuple[Tensor, Tensor]:
    return input, other


def _refuse_detour(plan: Plan, at: int, what: str) -> None:
    expected = plan.steps[at].name if at < len(plan.steps) else "the end of the forward"
    raise RuntimeError(
        f"unit_scale: the model {what}, where its plan has {expected}: "
        "it takes another way than when it was planned for inputs of this kind. A model whose "
        "control flow depends on values, on chance or on state cannot be unit-scaled as it is; "
        "after a change of the model call unit_scale again"
    )


def plan_for(number: int, skeleton: Any, *tensors: Tensor) -> Plan:
    """The plan for a call of a model, made once for each kind of call.

    Args:
        number: the id of the transformed model.
        skeleton: its arguments without tensors (`inputs.skeleton_of`).
        tensors: those of its arguments, in order.
    """
    model = model_of(number)
    kinds = tuple((t.dtype, t.dim()) for t in tensors)
    training = tuple(m.training for m in model.modules())
    key = kind_of(skeleton), kinds, training, tuple(registry.torch_map.items())
    plans = _PLANS.setdefault(model, {})
    if key not in plans:
        plans[key] = _planned(model, skeleton, tensors)
    return plans[key]


# torch.compile runs it while tracing, with the example inputs, and takes its result for a constant.
plan_for._dynamo_marked_constant = True  # type: ignore[attr-defined]

_PLANS: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()


def _planned(model: nn.Module, skeleton: Any, tensors: tuple[Tensor, ...]) -> Plan:
    assert isinstance(model, Transformed)
    (transform,) = (t for t in model.transforms if isinstance(t, UnitScale))
    recorder, rules = Recorder(), rules_of(dict(transform.replace))
    results: list[Value] = []

    def run(twin: nn.Module, fakes: list[Any]) -> None:
        for name, parameter in twin.named_parameters():
            recorder.value(parameter, name)
        for module in twin.modules():
            if isinstance(module, Transformed):  # there are no values to watch or to round
                module.transforms = tuple(t for t in module.transforms if isinstance(t, UnitScale))
        args, kwargs = filled(skeleton, iter(fakes))
        forward = super(Transformed, twin).forward  # type: ignore[misc]
        with _Record(rules, recorder):
            returned = forward(*args, **kwargs)
        results.extend(results_of(recorder, returned))

    try:
        on_fake_tensors(model, list(tensors), run)
    except Exception as error:
        raise ValueError(
            f"unit_scale: {type(model).__mro__[2].__name__} cannot be planned; it stops at "
            f"{line_of_error(error)} with {type(error).__name__}: {_first_line(error)}. Its "
            "forward is run once on tensors that have shapes but no values: control flow that "
            "reads values (if tensor: ..., range(tensor.item())) is not covered"
        ) from error
    return make_plan(rules, recorder, results, output_weights(model))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
