"""What unit scaling does with each call of a forward, decided before the forward runs.

A plan is a list of steps (`Step`), one for each call that may be concerned: of a function that unit
scaling has a rule for, or that has a rule's name, or that reads a tensor where a residual branch
begins. It holds no sizes and no tensors, so that one plan serves all sizes, and compiled code sees
constants. Per call it says

    role     "scaled"    the function's unit-scaled version (`rules_of`)
             "residual"  `U.residual_add`, with ``tau`` (`residuals`)
             "keep"      the function as it is (`sums`)
             "readout"   `U.linear_readout`: the linear layer of the output weight
    free     whether its gradients need no constraint: no residual addition follows, its activations
             come over cut-edges (`cut_edges`), and if it is a product, one operand is a weight
    weight   whether the right operand of a product is a matrix of parameters
    mix      whether what a product adds is a signal, not a bias or a mask
    dropped  keywords that torch's Python functions hand on with their defaults (``inplace=False``)
             and that the function called in their place does not have
    edges    operands whose gradients are multiplied, being where a residual branch begins

`make_plan` runs the model on fake tensors (`recording`) and asks the other files of this room.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.transforms.cut_edges import calls_on_cut_edges
from float8.unit_scaling.transforms.products import ADDED, PRODUCTS, RIGHT, UNSCALED
from float8.unit_scaling.transforms.recording import Call, Path, Recorder, Value, name_of
from float8.unit_scaling.transforms.residuals import Conflict, Edge, Residual, edges, residuals
from float8.unit_scaling.transforms.sums import ADDITIONS, KEEP, SUM, Kind, kinds

Function = Callable[..., Any]
Rules = Mapping[Function, Function]

logger = logging.getLogger(__name__)

# Between two activations: both gradients would need factors of their own.
MATRIX_PRODUCTS = frozenset({torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.einsum})


class Step(NamedTuple):
    """What is done with one call; see the module."""

    name: str
    role: str = "scaled"
    free: bool = False
    weight: bool = False
    mix: bool = False
    skip: int = 0
    tau: float = 0.0
    dropped: tuple[str, ...] = ()
    edges: tuple[tuple[Path, int, float], ...] = ()


class Plan(NamedTuple):
    """The steps in the order of the calls, and the names of all functions that have steps."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]


def rules_of(replace: Rules) -> dict[Function, Function]:
    """Torch function -> what unit scaling makes of it: the user's, the registered, the products."""
    registered = {f: registry.handler(f) for f in registry.torch_map}
    if registry.torch_map.get(torch.matmul) is U.matmul:
        del registered[torch.matmul]
    rules: dict[Function, Function] = {**PRODUCTS, **registered}
    for function, stand_in in replace.items():
        known = stand_in is not function and stand_in in rules
        rules[function] = rules[stand_in] if known else stand_in
    return rules


def make_plan(
    rules: Rules,
    recorder: Recorder,
    results: list[Value],
    output_weights: frozenset[str],
) -> Plan:
    """The plan for a recorded forward.

    Args:
        rules: `rules_of` the transform.
        recorder: what the model called.
        results: what it returned.
        output_weights: names of the parameters of u-muP's type "output".

    Raises:
        ValueError: a trained parameter is none of the model's, or is read by a product that has
            no unit-scaled version.
    """
    calls, values = recorder.calls, recorder.values
    kind, found, read = _residual_layers(calls, values, rules)
    cut = calls_on_cut_edges(calls, results)
    before = {
        number for r in found for v in calls[r.call].outputs for number in v.origins | {v.number}
    }
    names = {name_of(f) for f in rules} | {name_of(f) for f in ADDITIONS}
    names |= {calls[edge.call].name for edge in read}
    taus = {r.call: r for r in found}
    marked: dict[int, list[Edge]] = {}
    for edge in read:
        marked.setdefault(edge.call, []).append(edge)
    steps = []
    for index, call in enumerate(calls):
        _refuse_unscaled(call, rules)
        if call.name not in names:
            continue
        after_all = not any(v.number in before for v in call.outputs)
        step = _step(call, rules, kind.get(index), taus.get(index), after_all and index in cut)
        step = _readout(step, call, rules, output_weights)
        steps.append(
            step._replace(edges=tuple((e.path, e.value, e.factor) for e in marked.get(index, ())))
        )
        _log(step, call, rules)
    return Plan(tuple(steps), tuple(sorted(names)))


def _residual_layers(
    calls: list[Call], values: list[Value], rules: Rules
) -> tuple[dict[int, Kind], list[Residual], list[Edge]]:
    demoted: set[int] = set()
    while True:
        kind = kinds(calls, values, rules.__contains__, demoted)
        found = residuals(kind)
        try:
            return kind, found, edges(calls, values, found)
        except Conflict as conflict:
            logger.info("a plain sum, not a residual layer: %s", calls[conflict.call].line)
            demoted.add(conflict.call)


def _step(
    call: Call, rules: Rules, kind: Kind | None, residual: Residual | None, cut: bool
) -> Step:
    if residual is not None:
        return Step(call.name, "residual", skip=residual.skip, tau=residual.tau)
    if kind is not None:
        replaced = kind.name == SUM and torch.add in rules
        return Step(call.name, "scaled" if replaced else KEEP, free=cut)
    if call.function not in rules:
        return Step(call.name, KEEP)
    weight = _is_matrix(call, RIGHT.get(call.function))
    added = call.operand(*ADDED[call.function]) if call.function in ADDED else None
    mix = added is not None and not (added.learned and len(added.shape) <= 1)
    learned = any(v.learned for _, v in call.inputs)
    free = cut and (learned or call.function not in MATRIX_PRODUCTS)
    free = free and _takes(rules[call.function], "constraint", by_name=True)
    dropped = tuple(
        name
        for name, value in call.arguments[1].items()
        if (value is None or value is False) and not _takes(rules[call.function], name)
    )
    return Step(call.name, free=free, weight=weight, mix=mix, dropped=dropped)


def _refuse_unscaled(call: Call, rules: Rules) -> None:
    for weight in (v for _, v in call.inputs if v.trained):
        if weight.parameter is None:
            raise ValueError(
                f"unit_scale: {call.name} at {call.line} reads a trained parameter of shape "
                f"{weight.shape} that is none of the model's: its scale is unknown. Make its "
                "module an attribute of one of the model's, or an item of an nn.ModuleList"
            )
        if call.name in UNSCALED and call.function not in rules and len(weight.shape) >= 2:
            raise ValueError(
                f"unit_scale: {call.name} at {call.line} multiplies by {weight.parameter}, whose "
                "standard deviation is 1 now, and has no unit-scaled function: register one "
                f"(U.register), write the products out, or pass replace={{f: f}} for f = "
                f"{call.name} to have it as it is, and scale the weight"
            )


def _is_matrix(call: Call, place: tuple[int, str] | None) -> bool:
    value = None if place is None else call.operand(*place)
    return value is not None and value.learned and len(value.shape) == 2


def _readout(step: Step, call: Call, rules: Rules, output_weights: frozenset[str]) -> Step:
    weight = call.operand(1, "weight") if call.function is F.linear else None
    if weight is None or weight.parameter not in output_weights or rules[F.linear] is not U.linear:
        return step
    return step._replace(role="readout")


def _takes(function: Function, argument: str, by_name: bool = False) -> bool:
    """Whether a function has an argument; any, unless ``by_name``, if it has ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtin functions have no signature
        return not by_name
    collects = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return argument in parameters or (collects and not by_name)


def _log(step: Step, call: Call, rules: Rules) -> None:
    what = f"residual-add, tau={step.tau:.4g}" if step.role == "residual" else step.role
    if step.role != KEEP:
        logger.info("unit scaling function: %s (%s), %s", call.name, what, call.line)
    if step.free:
        logger.info("unconstraining node: %s, %s", call.name, call.line)


def results_of(recorder: Recorder, returned: Any) -> list[Value]:
    """The values that a forward returned, in nested lists, tuples, dicts and dataclasses."""
    if isinstance(returned, Tensor):
        return [recorder.value(returned)] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    elif hasattr(returned, "__dict__") and not isinstance(returned, nn.Module):
        returned = list(vars(returned).values())
    if isinstance(returned, list | tuple):
        return [value for item in returned for value in results_of(recorder, item)]
    return []
