"""Whether ranks that share scales hold the same layers.

Amaxes of many casts are reduced in one collective, weights of many layers are gathered in one, and
gradients are averaged over ranks. If one rank's model had another layer, or another config, values
of different tensors would be mixed in silence, or a rank would wait for a collective that never
comes. So before the first of them every rank says what it has (`rank_comparison`), and if they
differ every rank raises an error that names the first layer that differs. Nothing travels
afterwards. This file says what is compared, and compares before the first ``sync``; `first_use`
compares before everything else.

Importing this file registers the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial

from torch import nn

from float8.config import CastConfig
from float8.distributed.rank_comparison import Facts, Statement, compare_ranks, said
from float8.linear.delayed import DelayedCast, modules_by_name
from float8.linear.layer import Float8Linear
from float8.linear.registration import FIRST_SYNC_CHECKS, WEIGHT_RULES

# (layer) -> the ranks that must share its scales, or None: filled by files of this package.
SHARERS: list[Callable[[nn.Module], list[int] | None]] = []

PLACE = "place among the layers of "  # begins the facts that tell an order
_ORDER = (
    ", with its layers registered in the same order (a Python set of names has another order in "
    "each process)"
)


def facts_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Facts]:
    """Facts of each float8 layer and each delayed cast, by name."""
    found: dict[str, Facts] = {}
    for name, module in modules:
        if isinstance(module, Float8Linear):
            found[name] = _layer_facts(module)
        elif isinstance(module, DelayedCast):
            cast = module.config.short_str.replace(" default", "")
            found[name] = {"cast": cast, "format": module.format.name}
            found[name]["delayed_scaling"] = repr(module.delayed)
    return found


def _layer_facts(layer: Float8Linear) -> Facts:
    facts = {"in_features": str(layer.in_features), "out_features": str(layer.out_features)}
    for field in fields(layer.config):
        value = getattr(layer.config, field.name)
        if field.init:  # the others follow from these
            is_cast = isinstance(value, CastConfig)
            facts[field.name] = value.short_str.replace(" default", "") if is_cast else repr(value)
    if layer.config.enable_fsdp_float8_all_gather:
        facts["a weight that is gathered in float8"] = str(is_gathered_in_float8(layer))
    return facts


def is_gathered_in_float8(layer: Float8Linear) -> bool:
    """Whether conversion stored the layer's weight so that FSDP2 gathers it in float8."""
    weight = layer._parameters.get("weight")  # a wrapper may have put a property in its place
    return weight is not None and any(rule.is_stored(weight) for rule in WEIGHT_RULES)


def check_before_sync(model: nn.Module, ranks: list[int]) -> None:
    """Raise, on every rank, if ``ranks`` hold different float8 layers.

    Args:
        model: this rank's.
        ranks: those that ``sync`` reduces over.

    Raises:
        RuntimeError: naming the first layer that differs, or one whose ranks are not all there.
    """
    advice = (
        "; where ranks hold different layers by design, as pipeline stages do, pass "
        "sync_float8_amax_and_scale_history(model, group=...) the process group or DeviceMesh of "
        "the ranks that hold the same layers"
    )
    entry = "calls sync_float8_amax_and_scale_history"
    trouble = _ranks_that_are_missing(model, ranks)
    explain = partial(difference, ranks, advice)
    modules = modules_by_name(model, (Float8Linear, DelayedCast))
    compare_ranks(ranks, entry, facts_of(modules), explain, trouble)


def difference(ranks: list[int], advice: str, a: Statement, b: Statement) -> str | None:
    """How the statements of two ranks differ, or None.

    Args:
        ranks: all that are compared, for the message.
        advice: for its end.
        a, b: the statements.
    """
    if a.rank > b.rank:
        a, b = b, a
    if a.entry != b.entry:
        return (
            f"rank {a.rank} {a.entry} where rank {b.rank} {b.entry}: all of {said(ranks)} must "
            "call the same functions at the same point of a step"
        )
    name = _first_difference(a.layers, b.layers)
    if name is None:
        return None
    if name in a.layers and name in b.layers:
        mine, other = a.layers[name], b.layers[name]
        told = "; ".join(
            f"{key} is {mine.get(key)} on rank {a.rank} and {other.get(key)} on rank {b.rank}"
            for key in {**mine, **other}
            if mine.get(key) != other.get(key)
        )
    else:
        has, has_not = (a, b) if name in a.layers else (b, a)
        told = f"rank {has.rank} has such a float8 layer, and rank {has_not.rank} has none"
    return (
        f"{said(ranks)} share float8 scales or gradients, and their layers differ. "
        f"{name or 'the model itself'}: {told}. Convert the same model with the same config "
        f"on each of them{_ORDER if PLACE in told else ''}{advice}"
    )


def _first_difference(a: dict[str, Facts], b: dict[str, Facts]) -> str | None:
    # Places last: where a layer is missing, the places of those behind it differ too.
    for left, right in ((_without_places(a), _without_places(b)), (a, b)):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                return name
    return None


def _without_places(layers: dict[str, Facts]) -> dict[str, Facts]:
    return {
        name: {key: fact for key, fact in facts.items() if not key.startswith(PLACE)}
        for name, facts in layers.items()
    }


def _ranks_that_are_missing(model: nn.Module, present: list[int]) -> str | None:
    for fqn, module in model.named_modules():
        for sharers in SHARERS:
            ranks = sharers(module)
            if ranks is not None and not set(present).issuperset(ranks):
                return (
                    f"{fqn or 'the model itself'}: ranks {ranks} hold parts of it and send each "
                    f"other codes of one scale, and sync takes ranks {sorted(present)} only: its "
                    "group must hold the ranks of tensor parallelism and of FSDP2's shards too"
                )
    return None


FIRST_SYNC_CHECKS.append(check_before_sync)
