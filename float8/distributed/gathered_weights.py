"""FSDP2 with ``enable_fsdp_float8_all_gather``: weights are gathered in float8, a byte per element.

::

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())   # after both
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)  # optional: one all-reduce for all weights

Conversion replaces the weight of each layer by a Parameter of type `ShardedWeight` that shares the
data. The bits are those of a single process.

Weights whose two GEMMs read the same data are gathered in float8: those of the recipes
``tensorwise``, ``delayed``, ``unit``, ``blockwise`` and ``mxfp8_2d``, and those of experts
(E, N, K) too. Shards may cut blocks of one scale: see `float8.distributed.float8_gather`. All
others are gathered in high precision, as without the option, and the conversion's report gives the
reason:

- ``rowwise``, ``rowwise_with_gw_hp`` and ``mxfp8`` cast a weight twice, along K for the output and
  along N for grad_input. The two results have as many bytes as bfloat16, and recomputation reads
  both.
- A weight that another module reads too, such as a tied embedding, cannot be float8.

torch cannot reshard weights gathered in float8 to a smaller mesh. With an integer
``reshard_after_forward`` it fails after the first forward ("only Tensors of floating point dtype
can require gradients"): use True or False. Backward's gather does not see autocast: give the
compute dtype to ``fully_shard`` as ``MixedPrecisionPolicy(param_dtype=...)``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_module
from float8.distributed.float8_gather import GatheredWeight, amax_of_shard, weight_cast
from float8.distributed.rank_comparison import (
    LAYERS,
    compare_once,
    facts_of,
    is_compared,
    sharding_groups,
)
from float8.distributed.replaced_parameters import mark_replaced, unmark
from float8.distributed.sharded_weight import ShardedWeight
from float8.kernels import is_sharded
from float8.linear.casts import known_scale, max_over_ranks
from float8.linear.module import modules_by_name, own_config, weights_of
from float8.linear.resident import as_parameter, is_gatherable


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers in float8, with one all-reduce.

    Call it after ``optimizer.step()``, on all ranks. Without it, the first gather of each weight
    after the step does its own all-reduce; the bits are the same. The result is discarded when the
    weight is written to again, so a stale scale is never used, and a missing call costs only time.

    Left out are weights that are unsharded at the moment (``unshard()``) or offloaded to a CPU, and
    weights with static scales or with a delayed scale; before their first gather also weights with
    uneven shards. The all-reduce is by position, in the
    alphabetical order of the layers' names: the order of registration does not matter.

    Args:
        model: converted with ``enable_fsdp_float8_all_gather=True`` and sharded by ``fully_shard``;
            for any other model nothing happens. Weights on different meshes take one all-reduce
            per mesh.

    Raises:
        RuntimeError: on every rank, at the first call, if the layers of the ranks differ; the
            message names the first layer.
    """
    check_module(model, "precompute_float8_dynamic_scale_for_fsdp")
    layers = [layer for _, layer in modules_by_name(model, LAYERS)]
    weights: list[Any] = [weight for layer in layers for weight in weights_of(layer).values()]
    for mesh in dict.fromkeys(w.device_mesh for w in weights if hasattr(w, "device_mesh")):
        compare_once(model, mesh.get_all_groups(), lambda: facts_of(model))
    found: dict[Any, list[tuple[Any, Tensor, Any]]] = defaultdict(list)
    for layer in layers:
        own: Any = weights_of(layer).values()
        for weight in own:
            shard = getattr(weight, "_local_tensor", None)
            if not isinstance(shard, ShardedWeight):
                continue
            cast, state = weight_cast(layer, shard)
            is_here = shard.device.type == weight.device_mesh.device_type
            if is_here and known_scale(cast, state, shard.plain) is None:
                (group,) = sharding_groups(weight)
                # Before the first gather FSDP2 replaces shards that it pads, on some ranks alone.
                # These would lose the amaxes, and wait in an all-reduce for the others.
                sizes = (weight.shape[p.dim] for p in weight.placements if p.is_shard())
                if any(size % group.size() for size in sizes) and not is_compared(layer):
                    continue
                amax = amax_of_shard(shard.plain, cast, weight.shape, group)
                found[group].append((shard, amax, own))
    for group, entries in found.items():
        parts = [amax for _, amax, _ in entries]
        of_all = max_over_ranks(torch.cat([part.flatten() for part in parts]), group)
        amaxes = of_all.split([part.numel() for part in parts])
        for (shard, part, own), amax in zip(entries, amaxes, strict=True):
            shard.known.remember(amax.view(part.shape), shard.plain, own)


# --- conversion


def wrap_weights(root: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Replace the weights of ``layers``; return name -> reason for those that are not replaced."""
    places = _places(root)
    plain: dict[str, str] = {}
    for fqn, layer in layers.items():
        for weight in weights_of(layer).values():
            if isinstance(weight, ShardedWeight):
                continue  # tied, and replaced with the first of its layers
            reason = _stays_plain(layer, weight, places[weight])
            if reason is not None:
                plain[fqn] = reason
                continue
            mark_replaced(weight, fqn)
            _replace(weight, ShardedWeight(weight.detach()), places[weight])
    return plain


def _stays_plain(
    layer: nn.Module, weight: Tensor, places: list[tuple[nn.Module, str]]
) -> str | None:
    gemms = own_config(layer).gemms  # type: ignore[union-attr]
    if is_sharded(weight):
        return "it is a DTensor already, as expert parallelism makes it"
    if gemms.output.b is None or gemms.grad_input.b is None:
        return "a product with it runs in high precision"
    if gemms.output.b.transposed() != gemms.grad_input.b:
        return "its two GEMMs need casts along different dimensions, so they cannot share data"
    others = [type(module).__name__ for module, _ in places if not isinstance(module, LAYERS)]
    return f"it is tied to a {others[0]}, which does not read float8" if others else None


def unwrap_weights(root: nn.Module) -> None:
    """Give the layers plain Parameters again."""
    found = _places(root).items()
    for parameter, ((module, name), *_) in found:
        is_shard = is_gatherable(parameter) and is_sharded(parameter)
        if is_shard or isinstance(parameter, GatheredWeight):
            raise RuntimeError(
                f"fully_shard has sharded {type(module).__name__}.{name}, which is gathered in "
                "float8: load get_model_state_dict(model) into a plain model instead"
            )
    for parameter, places in found:
        if isinstance(parameter, ShardedWeight):
            mark_replaced(parameter, type(places[0][0]).__name__)
            unmark(_replace(parameter, parameter.plain, places))


def _places(root: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """The modules and names under which each Parameter of a model is registered."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, name))
    return places


def _replace(old: Tensor, data: Tensor, places: list[tuple[nn.Module, str]]) -> nn.Parameter:
    """Put a Parameter of other data, with the gradient and the attributes of ``old``, in places."""
    new = as_parameter(old, data, old.requires_grad)
    new.grad = old.grad
    for module, name in places:
        module.register_parameter(name, new)
    return new
