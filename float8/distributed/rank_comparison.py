"""Ranks that exchange float8 values hold the same float8 layers, or raise the same error.

Values in float8 travel by position: amaxes of all layers in one all-reduce, weights and activations
as bytes. Ranks whose layers differ would mix them, or would wait for each other. So the ranks of a
process group compare, by ``all_gather_object``,

- all layers of a model, before its first ``sync`` and its first
  `precompute_float8_dynamic_scale_for_fsdp`,
- one layer, before the first gather of its weight in float8, and before the first eager forward of
  a tensor-parallel one.

Ranks that send no float8 values, as under DDP, are compared by ``sync`` only. Other packages
compare what they exchange in the same way: arguments, experts, checkpoints.

Groups that are the dimensions of one mesh pass on what they gathered, so each rank knows the layers
of the whole mesh, and all ranks raise the same error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import nn

from float8.config import CastConfig, Float8LinearConfig
from float8.experts.modules import Float8Experts
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.module import modules_by_name, own_config, stacked_weights, weights_of
from float8.linear.resident import is_gatherable

LAYERS = (Float8Linear, Float8Experts)
Facts = dict[str, str]  # of one layer: name of a property -> its value
SAME_LAYERS = "Convert the same model with the same config on each of them"

# Model, layer or other owner of facts -> the names of the groups that compared it.
_compared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def compare_ranks(
    groups: Sequence[dist.ProcessGroup],
    facts: dict[str, Facts],
    remedy: str = SAME_LAYERS,
    own_error: str | None = None,
    subject: str = "layers",
) -> None:
    """Raise the same error on every rank if their facts differ.

    Args:
        groups: this rank's process groups, as the dimensions of a mesh; all their ranks call this.
        facts: of this rank, by the name of a layer.
        remedy: ends the message about facts that differ.
        own_error: an error that this rank has found by itself, for all ranks to raise.
        subject: what the facts are about, for the message.

    Raises:
        RuntimeError: names the first difference.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    flat = {
        f"{name or 'the model itself'}: {key}": value
        for name, own in facts.items()
        for key, value in own.items()
    }
    known = {rank: (own_error, flat)}
    for group in groups:
        if dist.get_backend(group) == "fake":  # its other ranks do not exist
            continue
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, known, group)
        known = {rank: found for part in parts for rank, found in part.items()}
    (first, (_, a)), *others = sorted(known.items())
    errors = [error for error, _ in known.values() if error]
    for other, (_, b) in others:
        differing = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        for key in differing[:1]:
            mine, theirs = (of.get(key, "missing") for of in (a, b))
            errors.append(
                f"ranks exchange float8 values, and their {subject} differ. {key} is {mine} on "
                f"rank {first} and {theirs} on rank {other}. {remedy}"
            )
    if errors:
        raise RuntimeError(errors[0])


def compare_once(
    owner: Any,
    groups: Sequence[dist.ProcessGroup],
    facts: Callable[[], dict[str, Facts]],
    remedy: str = SAME_LAYERS,
    subject: str = "layers",
) -> None:
    """`compare_ranks` about an object, once for each list of groups."""
    seen, key = _compared.setdefault(owner, set()), " ".join(g.group_name for g in groups)
    if key not in seen:
        compare_ranks(groups, facts(), remedy, subject=subject)
        seen.add(key)  # not after an error: the next call compares again


def is_compared(layer: Any) -> bool:
    """Whether a layer has exchanged float8 values: on all ranks, or on none."""
    return bool(_compared.get(layer))


def compare_layer(layer: Any, group: dist.ProcessGroup) -> None:
    """Compare a layer that is about to exchange float8 values, once for each group."""
    name = getattr(layer, "fqn", "") or getattr(layer, "float8_name", "")
    compare_once(layer, [group], lambda: {"a layer": {"name": name} | _facts(layer)})


def compare_before_sync(
    model: nn.Module, ranks: list[int], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Raise, on every rank, if the ranks that ``sync`` reduces over differ in layers."""
    remedy = SAME_LAYERS + (
        "; or pass sync_float8_amax_and_scale_history(model, group=...) the process group or "
        "DeviceMesh of the ranks that hold the same layers, as those of a pipeline stage"
    )
    facts = facts_of(model, (*LAYERS, DelayedCast))
    compare_ranks(groups, facts, remedy, _error_of_missing_ranks(model, set(ranks)))


def _error_of_missing_ranks(model: nn.Module, present: set[int]) -> str | None:
    """The first layer of which another rank casts a part, with a delayed scale of its own."""
    for fqn, layer in model.named_modules():
        if not isinstance(layer, Float8Linear) or not layer.config.uses_delayed_scaling:
            continue
        if (layout := getattr(layer, "layout", None)) is not None:
            groups = [layout.mesh.get_group()]
        else:
            groups = sharding_groups(layer.weight) if is_gatherable(layer.weight) else []
        for ranks in map(dist.get_process_group_ranks, groups):
            if not present.issuperset(ranks):
                return (
                    f"{fqn or 'the model itself'}: ranks {ranks} hold parts of it, with one scale: "
                    f"the group of sync must hold all of them, and holds ranks {sorted(present)}"
                )
    return None


def sharding_groups(weight: Any) -> list[dist.ProcessGroup]:
    """The groups over which a weight is sharded; none if it is no DTensor."""
    placements = enumerate(getattr(weight, "placements", ()))
    return [weight.device_mesh.get_group(dim) for dim, p in placements if not p.is_replicate()]


# --- the facts of layers


def facts_of(model: nn.Module, kinds: Any = LAYERS) -> dict[str, Facts]:
    """The facts of a model's float8 layers, or of modules of other kinds, by name."""
    return {name: _facts(module) for name, module in modules_by_name(model, kinds)}


def _facts(module: Any) -> Facts:
    if isinstance(module, DelayedCast):
        return {"cast": module.extra_repr(), "delayed_scaling": repr(module.delayed)}
    config = own_config(module)
    assert config is not None
    names = [name for name in ("in_features", "out_features") if hasattr(module, name)]
    return {
        **config_facts(config),
        **{name: str(getattr(module, name)) for name in names},
        **{name: str(tuple(w.shape)) for name, w in stacked_weights(module).items()},
        "gathered in float8": str(any(map(is_gatherable, weights_of(module).values()))),
    }


def config_facts(config: Float8LinearConfig) -> Facts:
    """The fields of a config."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return {
        name: value.summary.replace(" default", "") if isinstance(value, CastConfig) else str(value)
        for name, value in values.items()
    }
