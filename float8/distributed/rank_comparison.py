"""Ranks that exchange float8 values hold the same float8 layers, or raise the same error.

Values in float8 travel by position: amaxes of all layers in one all-reduce, weights and activations
as bytes. Ranks whose layers differ would mix them, or would wait for each other. So the ranks of a
process group compare, by ``all_gather_object``,

- all layers of a model, before its first ``sync`` and its first
  `precompute_float8_dynamic_scale_for_fsdp`,
- one layer, before the first gather of its weight in float8, and before the first eager forward of
  a tensor-parallel one.

Ranks that send no float8 values, as under DDP, are compared by ``sync`` only.

Groups that are the dimensions of one mesh pass on what they gathered, so each rank knows the layers
of the whole mesh, and all ranks raise the same error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import nn

from float8.config import CastConfig, Float8LinearConfig
from float8.convert.conversion import own_config
from float8.experts.modules import Float8Experts
from float8.kernels import is_sharded
from float8.linear.delayed import DelayedCast, modules_by_name
from float8.linear.layer import Float8Linear
from float8.linear.registration import FIRST_SYNC_CHECKS, stacked_weights, stored_by

LAYERS = (Float8Linear, Float8Experts)
Facts = dict[str, str]  # of one layer: name of a property -> its value
SAME_LAYERS = "Convert the same model with the same config on each of them"

# Model or layer -> the names of the groups that compared it.
_compared: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


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
    known = {rank: (own_error, facts)}
    for group in groups:
        if dist.get_backend(group) == "fake":  # its other ranks do not exist
            continue
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, known, group)
        known = {rank: found for part in parts for rank, found in part.items()}
    first, *others = sorted(known)
    for error, _ in known.values():
        if error:
            raise RuntimeError(error)
    for other in others:
        a, b = known[first][1], known[other][1]
        names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
        if not names:
            continue
        name = min(names)
        if name in a and name in b:
            differing = "; ".join(
                f"{key} is {mine} on rank {first} and {theirs} on rank {other}"
                for key in {**a[name], **b[name]}
                if (mine := a[name].get(key)) != (theirs := b[name].get(key))
            )
        else:
            has, has_not = (first, other) if name in a else (other, first)
            differing = f"rank {has} has it, and rank {has_not} does not"
        raise RuntimeError(
            f"ranks exchange float8 values, and their {subject} differ. "
            f"{name or 'the model itself'}: {differing}. {remedy}"
        )


# --- when the layers of a model are compared


def compare_model(model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare the float8 layers of a model, once for each mesh of process groups."""
    _compare_once(model, groups, lambda: facts_of(modules_by_name(model, LAYERS)))


def compare_layer(layer: Any, group: dist.ProcessGroup) -> None:
    """Compare a layer that is about to exchange float8 values, once for each group."""
    name = getattr(layer, "fqn", "") or getattr(layer, "float8_name", "")
    _compare_once(layer, [group], lambda: {"a layer": {"name": name} | _layer_facts(layer)})


def _compare_once(
    module: nn.Module, groups: Sequence[dist.ProcessGroup], facts: Callable[[], dict[str, Facts]]
) -> None:
    seen, key = _compared.setdefault(module, set()), " ".join(g.group_name for g in groups)
    if key not in seen:
        compare_ranks(groups, facts())
        seen.add(key)  # not after an error: the next call compares again


def _compare_before_sync(
    model: nn.Module, ranks: list[int], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Raise, on every rank, if the ranks that ``sync`` reduces over differ in layers."""
    remedy = SAME_LAYERS + (
        "; where ranks hold different layers by design, as pipeline stages do, pass "
        "sync_float8_amax_and_scale_history(model, group=...) the process group or DeviceMesh of "
        "the ranks that hold the same layers"
    )
    facts = facts_of(modules_by_name(model, (*LAYERS, DelayedCast)))
    compare_ranks(groups, facts, remedy, _error_of_missing_ranks(model, ranks))


def _error_of_missing_ranks(model: nn.Module, present: list[int]) -> str | None:
    """The first layer of which another rank casts a part, with a delayed scale of its own."""
    for fqn, layer in model.named_modules():
        if not isinstance(layer, Float8Linear) or not layer.config.uses_delayed_scaling:
            continue
        weight, layout = layer.weight, getattr(layer, "layout", None)
        if layout is not None:
            groups = [layout.mesh.get_group()]
        else:
            groups = sharding_groups(weight) if stored_by(weight) and is_sharded(weight) else []
        for group in groups:
            ranks = dist.get_process_group_ranks(group)
            if not set(present).issuperset(ranks):
                return (
                    f"{fqn or 'the model itself'}: ranks {ranks} hold parts of it and send each "
                    f"other float8 data of one scale, and sync takes ranks {sorted(present)} only: "
                    "its group must hold the ranks of tensor parallelism and of FSDP2's shards too"
                )
    return None


def sharding_groups(weight: Any) -> list[dist.ProcessGroup]:
    """The groups over which a DTensor is sharded."""
    dims = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    return [weight.device_mesh.get_group(dim) for dim in dims]


FIRST_SYNC_CHECKS.append(_compare_before_sync)


# --- the facts of layers


def facts_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Facts]:
    """The facts of each float8 layer and each delayed cast, by name."""
    found: dict[str, Facts] = {}
    for name, module in modules:
        if isinstance(module, LAYERS):
            found[name] = _layer_facts(module)
        elif isinstance(module, DelayedCast):
            found[name] = {
                "cast": _cast_fact(module.config),
                "format": module.format.name,
                "delayed_scaling": repr(module.delayed),
            }
    return found


def weights_of(layer: Any) -> dict[str, Any]:
    """The weights of a float8 layer, by name."""
    if not isinstance(layer, Float8Linear):
        return stacked_weights(layer)
    weight = layer._parameters.get("weight")  # a wrapper may have put a property in its place
    return {} if weight is None else {"weight": weight}


def _layer_facts(layer: Any) -> Facts:
    names = ("in_features", "out_features")
    facts = {name: str(getattr(layer, name)) for name in names if isinstance(layer, Float8Linear)}
    if not facts:
        facts = {name: str(tuple(w.shape)) for name, w in weights_of(layer).items()}
    config = own_config(layer)
    assert config is not None
    facts |= config_facts(config)
    if config.enable_fsdp_float8_all_gather:
        stored = any(stored_by(weight) for weight in weights_of(layer).values())
        facts["a weight that is gathered in float8"] = str(stored)
    return facts


def config_facts(config: Float8LinearConfig) -> Facts:
    """The fields of a config."""
    facts: Facts = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.init:  # the others follow from these
            facts[field.name] = _cast_fact(value) if isinstance(value, CastConfig) else repr(value)
    return facts


def _cast_fact(config: CastConfig) -> str:
    return config.summary.replace(" default", "")
