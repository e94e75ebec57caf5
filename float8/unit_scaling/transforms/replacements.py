"""Which function unit scaling calls in place of another, and with which options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.transforms.contractions import (
    CONTRACTIONS,
    OTHER_CONTRACTIONS,
    Argument,
    Function,
    Path,
)
from float8.unit_scaling.transforms.history import (
    Call,
    History,
    line_of_caller,
    may_contract_activations,
)

Replacements = Mapping[Function, Function]


def replacements_of(users: Replacements) -> dict[Function, Function]:
    """Function of a model -> what unit scaling calls in its place.

    The user's come first, then the registered ones, then those of `CONTRACTIONS`.
    """
    registered = {f: registry.handler(f) for f in registry.torch_map}
    if registry.torch_map.get(torch.matmul) is U.matmul:
        del registered[torch.matmul]  # the table's knows about weights
    contractions = {f: c.unit_scaled for f, c in CONTRACTIONS.items() if c.unit_scaled is not None}
    replacements: dict[Function, Function] = {**contractions, **registered}
    for function, other in users.items():
        known = other is not function and other in replacements
        replacements[function] = replacements[other] if known else other
    return replacements


def refuse_unscaled(call: Call, replacements: Replacements, history: History) -> None:
    """Refuses a contraction of a weight that has no unit-scaled function.

    The weight has a standard deviation of 1, so the result would grow with its size. ``call`` is
    not made yet, and ``history`` has those before it. Raises ValueError for such a contraction, and
    if the call reads a trained parameter that does not belong to the model.
    """
    contracts = call.function not in replacements and (
        call.name in OTHER_CONTRACTIONS
        or (call.function in CONTRACTIONS and not hasattr(call.function, "implementation"))
    )
    for weight in (history.values[v.alias] for _, v in call.inputs):  # not its transpose
        if not weight.is_trained:
            continue
        if weight.parameter == "":
            raise ValueError(
                f"unit_scale: {call.name} at {line_of_caller()} reads a trained parameter of shape "
                f"{weight.shape} that is not a parameter of the model: make its module an "
                "attribute of one of the model's modules, or an item of an nn.ModuleList"
            )
        if contracts and weight.dims >= 2:
            raise ValueError(
                f"unit_scale: {call.name} at {line_of_caller()} multiplies by {weight.parameter} "
                "and has no unit-scaled function: register one (U.register), write it with linear "
                "layers or matmul, or pass replace={f: f} to leave it, and scale the weight"
            )


def options_of(call: Call, replacement: Function, history: History) -> tuple[str, ...]:
    """Which of the options ``weight`` and ``mix`` of the functions in `contractions` to set."""
    contraction = CONTRACTIONS.get(call.function)
    if contraction is None or replacement is not contraction.unit_scaled:
        return ()
    if not may_contract_activations(call.function):
        return ()
    right = call.operand(contraction.operands[1])
    added = None if contraction.added is None else call.operand(contraction.added)
    weight = ("weight",) if right is not None and right.is_learned and right.dims == 2 else ()
    is_bias = added is None or (added.is_learned and added.dims <= 1)
    # What depends on no parameter is a mask.
    is_mask = added is not None and not history.depends_on_parameters(added)
    return weight if is_bias or is_mask else (*weight, "mix")


def may_be_unconstrained(call: Call, replacement: Function) -> bool:
    """Whether the gradients of a call's activations may take factors of their own.

    Not where two activations are multiplied: both gradients would need one. And not where the
    replacement has no ``constraint``, or a default other than "to_output_scale".
    """
    has_weight = any(v.is_learned for _, v in call.inputs)
    parameters = _parameters(replacement) or {}
    default = parameters["constraint"].default if "constraint" in parameters else None
    return (has_weight or not may_contract_activations(call.function)) and (
        default == "to_output_scale"
    )


def dropped_by(replacement: Function, defaults: tuple[str, ...]) -> tuple[str, ...]:
    """The keywords among ``defaults`` that a replacement does not have."""
    parameters = _parameters(replacement)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(name for name in defaults if name not in parameters)


def is_weight(path: Path, function: Function, replacements: Replacements) -> bool:
    """Whether a parameter at a place in the arguments of a function is its weight or bias."""
    return function in replacements and path not in Argument(0, "input").paths


def is_readout(call: Call, replacements: Replacements, output_weights: frozenset[str]) -> bool:
    """Whether a call is the linear layer of a weight of u-muP's type "output"."""
    weight = call.operand(CONTRACTIONS[F.linear].operands[1]) if call.function is F.linear else None
    return (
        weight is not None
        and weight.parameter in output_weights
        and replacements[F.linear] is U.linear
    )


@functools.lru_cache(maxsize=256)
def _parameters(function: Function) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtin functions have no signature
        return None
