"""Which function unit scaling calls in place of another, and with which options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

import torch.nn.functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.transforms.contractions import (
    CONTRACTIONS,
    OTHER_CONTRACTIONS,
    Function,
    Path,
    argument,
    may_contract_activations,
)
from float8.unit_scaling.transforms.history import Call, name_of

Replacements = Mapping[Function, Function]


def replacements_of(users: Replacements) -> dict[Function, Function]:
    """Function of a model -> what unit scaling calls in its place.

    The user's come first, then the registered ones, then those of `CONTRACTIONS`.
    """
    replacements = {f: c.unit_scaled for f, c in CONTRACTIONS.items() if c.unit_scaled is not None}
    for function, ours in registry.torch_map.items():
        if ours is not U.matmul:  # the table's knows about weights
            replacements[function] = registry.handler(function)
    for function, other in users.items():
        replacements[function] = other if other is function else replacements.get(other, other)
    return replacements


def keywords_of(function: Function) -> tuple[str, ...] | None:
    """The names of a function's arguments; None if it takes any, or they are not known."""
    known = _parameters(function)
    if known is None or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return None
    return tuple(known)


# torch.compile calls it while it traces and takes its result for a constant.
keywords_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unscaled(call: Call, replacements: Replacements) -> str | None:
    """The reason why a call cannot be unit-scaled, or None.

    It reads a trained parameter that does not belong to the model; or it contracts a weight and has
    no unit-scaled function: the weight has a standard deviation of 1, so the result would grow with
    its size.
    """
    contracts = call.function not in replacements and (
        name_of(call.function) in OTHER_CONTRACTIONS
        or (call.function in CONTRACTIONS and not hasattr(call.function, "implementation"))
    )
    for operand in call.inputs:
        if operand.value.is_trained and operand.value.parameter == "":
            return (
                "reads a trained parameter that is not a parameter of the model: make its module "
                "an attribute of one of the model's modules, or an item of an nn.ModuleList"
            )
        if operand.value.is_trained and contracts and operand.dims >= 2:
            return (
                f"multiplies by {operand.value.parameter} and has no unit-scaled function: "
                "register one (U.register), write it with linear layers or matmul, or pass "
                "replace={f: f} to leave it, and scale the weight"
            )
    return None


def options_of(call: Call, replacements: Replacements) -> tuple[str, ...]:
    """Which of the options ``weight`` and ``mix`` of the functions in `contractions` to set."""
    contraction = CONTRACTIONS.get(call.function)
    if (
        contraction is None
        or replacements[call.function] is not contraction.unit_scaled
        or not may_contract_activations(call.function)
    ):
        return ()
    right = call.operand(contraction.operands[1])
    added = None if contraction.added is None else call.operand(contraction.added)
    weight = ("weight",) if right and right.value.is_learned and right.dims == 2 else ()
    is_bias = added is None or (added.value.is_learned and added.dims <= 1)
    # What depends on no parameter is a mask.
    return weight if is_bias or not added.value.has_parameters else (*weight, "mix")


def has_free_gradients(call: Call, replacement: Function) -> bool:
    """Whether the gradients of a call's activations may take factors of their own.

    Not where two activations are multiplied: both gradients would need one. And not where the
    replacement has no ``constraint``, or a default other than "to_output_scale".
    """
    has_weight = any(operand.value.is_learned for operand in call.inputs)
    constraint = (_parameters(replacement) or {}).get("constraint")
    return (has_weight or not may_contract_activations(call.function)) and (
        constraint is not None and constraint.default == "to_output_scale"
    )


def is_weight(path: Path, function: Function, replacements: Replacements) -> bool:
    """Whether a parameter at a place in the arguments of a function is its weight or bias."""
    return function in replacements and path not in argument(0, "input")


def is_readout(call: Call, replacements: Replacements, output_weights: frozenset[str]) -> bool:
    """Whether a call is the linear layer of a weight of u-muP's type "output"."""
    weight = call.operand(argument(1, "weight")) if call.function is F.linear else None
    return (
        weight is not None
        and weight.value.parameter in output_weights
        and replacements[F.linear] is U.linear
    )


@functools.lru_cache(maxsize=256)
def _parameters(function: Function) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtin functions have no signature
        return None
