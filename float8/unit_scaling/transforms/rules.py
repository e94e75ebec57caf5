"""Which function unit scaling calls in place of another, and with which options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.transforms.products import ADDED, PRODUCTS, RIGHT, UNSCALED
from float8.unit_scaling.transforms.recording import (
    MATRIX_PRODUCTS,
    Call,
    History,
    Path,
    line_of_caller,
)

Function = Callable[..., Any]
Rules = Mapping[Function, Function]


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


def refuse_unscaled(
    call: Call, rules: Rules, history: History, shapes: Mapping[int, tuple[int, ...]]
) -> None:
    """Refuses a product whose weight nothing would make up for.

    Args:
        call: the call, before it is made.
        rules: `rules_of` the transform.
        history: the calls before.
        shapes: the shapes of the parameters, by the numbers of their values.

    Raises:
        ValueError: a trained parameter is none of the model's, or is read by a product that has
            no unit-scaled version.
    """
    for weight in (history.values[v.alias] for _, v in call.inputs):  # not its transpose
        if not weight.trained:
            continue
        if weight.parameter == "":
            raise ValueError(
                f"unit_scale: {call.name} at {line_of_caller()} reads a trained parameter of shape "
                f"{shapes[weight.number]} that is none of the model's: its scale is unknown. Make "
                "its module an attribute of one of the model's, or an item of an nn.ModuleList"
            )
        if call.name in UNSCALED and call.function not in rules and weight.dims >= 2:
            raise ValueError(
                f"unit_scale: {call.name} at {line_of_caller()} multiplies by {weight.parameter}, "
                "whose standard deviation is 1 now, and has no unit-scaled function: register one "
                f"(U.register), write the products out, or pass replace={{f: f}} for f = "
                f"{call.name} to have it as it is, and scale the weight"
            )


def options_of(call: Call) -> tuple[str, ...]:
    """Which options of `products` a call sets: ``weight``, ``mix``."""
    right = call.operand(*RIGHT[call.function]) if call.function in RIGHT else None
    added = call.operand(*ADDED[call.function]) if call.function in ADDED else None
    weight = ("weight",) if right is not None and right.learned and right.dims == 2 else ()
    mix = ("mix",) if added is not None and not (added.learned and added.dims <= 1) else ()
    return weight + mix


def may_be_free(call: Call, rule: Function) -> bool:
    """Whether the gradients of a call's activations may take factors of their own.

    Not where two activations are multiplied: both gradients would need one. And not where the rule
    has no ``constraint``, or one by default that says more of the output than what it is.
    """
    learned = any(v.learned for _, v in call.inputs)
    return (learned or call.function not in MATRIX_PRODUCTS) and _default_constraint(rule) == (
        "to_output_scale"
    )


def dropped_by(rule: Function, defaults: tuple[str, ...]) -> tuple[str, ...]:
    """The keywords among ``defaults`` that a rule does not have."""
    parameters = _parameters(rule)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(name for name in defaults if name not in parameters)


def is_weight(path: Path, function: Function, rules: Rules) -> bool:
    """Whether a parameter at a place in the arguments of a function is its weight or bias."""
    return function in rules and path not in ((0, 0), (1, "input"))


def is_readout(call: Call, rules: Rules, output_weights: frozenset[str]) -> bool:
    """Whether a call is the linear layer of a weight of u-muP's type "output"."""
    weight = call.operand(1, "weight") if call.function is F.linear else None
    return weight is not None and weight.parameter in output_weights and rules[F.linear] is U.linear


def _default_constraint(rule: Function) -> Any:
    parameters = _parameters(rule) or {}
    return parameters["constraint"].default if "constraint" in parameters else None


@functools.lru_cache(maxsize=256)
def _parameters(function: Function) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtin functions have no signature
        return None
