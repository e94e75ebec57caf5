"""Do the ranks that are about to share scales hold the same layers?

`float8.sync_float8_amax_and_scale_history` reduces the amaxes of all delayed casts in one
collective, by position. If one rank's model had another layer, or another config, amaxes of
different tensors would be mixed, or a rank would wait for a collective that never comes. Before the
first reduction every rank therefore tells what it has: first a digest of it, and only where digests
differ the names, so that every rank can say which layer is the first to differ. Nothing is kept and
nothing travels afterwards. A rank that never arrives is the group's timeout's affair.

Importing this file registers the check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from float8.cast import DelayedCast
from float8.config import CastConfig
from float8.linear import Float8Linear
from float8.sync import FIRST_SYNC_CHECKS

Facts = dict[str, str]


class Said(NamedTuple):
    """What one rank tells about a model."""

    rank: int
    digest: str
    trouble: str | None


# (layer) -> the ranks that must share its scales, or None: filled by files of this room.
SHARERS: list[Callable[[nn.Module], list[int] | None]] = []


def layers_of(model: nn.Module) -> list[tuple[str, Facts]]:
    """Name and facts of each float8 layer and each delayed cast, in the order of the model."""
    found: list[tuple[str, Facts]] = []
    for fqn, module in model.named_modules():
        if isinstance(module, Float8Linear):
            found.append((fqn, _layer_facts(module)))
        elif isinstance(module, DelayedCast):
            facts = {
                "cast": module.config.short_str.replace(" default", ""),
                "format": module.format.name,
            }
            found.append((fqn, facts | {"delayed_scaling": repr(module.delayed)}))
    return found


def _layer_facts(layer: Float8Linear) -> Facts:
    facts = {"in_features": str(layer.in_features), "out_features": str(layer.out_features)}
    for field in fields(layer.config):
        value = getattr(layer.config, field.name)
        if field.init:  # the others follow from these
            is_cast = isinstance(value, CastConfig)
            facts[field.name] = value.short_str.replace(" default", "") if is_cast else repr(value)
    return facts


def check_that_ranks_agree(model: nn.Module, groups: list[dist.ProcessGroup]) -> None:
    """Raise, on every rank, if the ranks of ``groups`` hold different float8 layers.

    Args:
        model: this rank's.
        groups: one process group, or those of a mesh, one for each of its dimensions.

    Raises:
        RuntimeError: naming the first layer that differs, or one whose ranks are not all there.
    """
    layers, rank = layers_of(model), dist.get_rank()
    digest = hashlib.sha256(repr(layers).encode()).hexdigest()
    said = _told_to_all(Said(rank, digest, None), groups)
    if len({each.digest for each in said}) > 1:
        raise RuntimeError(_difference(dict(_told_to_all((rank, layers), groups))))
    trouble = _ranks_that_are_missing(model, {each.rank for each in said})
    troubles = [each.trouble for each in _told_to_all(Said(rank, "", trouble), groups)]
    if any(troubles):
        raise RuntimeError(next(filter(None, troubles)))


def _told_to_all(mine: Any, groups: list[dist.ProcessGroup]) -> list[Any]:
    """What every rank of the groups says; over a mesh, dimension by dimension."""
    told = [mine]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, told, group)
        told = [each for part in gathered for each in part]
    return told


def _difference(by_rank: dict[int, list[tuple[str, Facts]]]) -> str:
    first_rank = min(by_rank)
    first = by_rank[first_rank]
    other_rank, index = min(
        (
            (rank, _first_difference(first, layers))
            for rank, layers in sorted(by_rank.items())
            if layers != first
        ),
        key=lambda found: found[1],
    )
    mine, other = _at(first, index), _at(by_rank[other_rank], index)
    if mine is not None and other is not None and mine[0] == other[0]:
        what = [
            f"{key} is {mine[1].get(key)} on rank {first_rank} and {other[1].get(key)} on rank "
            f"{other_rank}"
            for key in {**mine[1], **other[1]}
            if mine[1].get(key) != other[1].get(key)
        ]
        told = f"{mine[0] or 'the model itself'}: {'; '.join(what)}"
    else:
        names = [_name(mine), _name(other)]
        told = f"rank {first_rank} has {names[0]} where rank {other_rank} has {names[1]}"
    return (
        f"ranks {sorted(by_rank)} are to share float8 scales, and their layers differ. {told}. "
        "Convert the same model with the same config on each of them; where ranks hold different "
        "layers by design, as pipeline stages do, pass sync_float8_amax_and_scale_history(model, "
        "group=...) the process group or DeviceMesh of the ranks that hold the same layers"
    )


def _first_difference(a: list[Any], b: list[Any]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _at(layers: list[tuple[str, Facts]], index: int) -> tuple[str, Facts] | None:
    return layers[index] if index < len(layers) else None


def _name(layer: tuple[str, Facts] | None) -> str:
    return "no further layer" if layer is None else repr(layer[0] or "the model itself")


def _ranks_that_are_missing(model: nn.Module, present: set[int]) -> str | None:
    for fqn, module in model.named_modules():
        for sharers in SHARERS:
            ranks = sharers(module)
            if ranks is not None and not present.issuperset(ranks):
                return (
                    f"{fqn or 'the model itself'}: ranks {ranks} hold parts of it and send each "
                    f"other codes of one scale, and sync takes ranks {sorted(present)} only: its "
                    "group must hold the ranks of tensor parallelism and of FSDP2's shards too"
                )
    return None


FIRST_SYNC_CHECKS.append(check_that_ranks_agree)
