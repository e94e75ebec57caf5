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

*Tensorwise* weights whose two GEMMs read the same data are gathered in float8: those of the recipes
``tensorwise``, ``delayed`` and ``unit``. All others are gathered in high precision, as without the
option, and the conversion's report gives the reason:

- ``rowwise`` and ``rowwise_with_gw_hp`` cast a weight twice, along K for the output and along N for
  grad_input. The two results have as many bytes as bfloat16, and the scales along N need the rows
  of all shards.
- ``blockwise`` has one scale per 128 rows, and shards may split such a block.
- A weight that another module reads too, such as a tied embedding, cannot be float8.

The weights of experts (E, N, K) are sharded between experts, so no shard splits a block of one
scale: they are gathered in float8 under ``blockwise`` too. Their scales need a number per expert or
block in the all-reduce. The two orientations that ``rowwise`` and ``mxfp8`` cast have as many bytes
as bfloat16; each phase could gather its own, but recomputation reads both, so these are gathered
in high precision.

torch cannot reshard weights gathered in float8 to a smaller mesh. With an integer
``reshard_after_forward`` it fails after the first forward ("only Tensors of floating point dtype
can require gradients"): use True or False. Backward's gather does not see autocast: give the
compute dtype to ``fully_shard`` as ``MixedPrecisionPolicy(param_dtype=...)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import check_module
from float8.config import Float8LinearConfig, ScalingType
from float8.convert.conversion import own_config
from float8.distributed.float8_gather import (
    GatheredWeight,
    amax_of_shard,
    needs_amax,
    weight_cast,
)
from float8.distributed.rank_comparison import (
    LAYERS,
    RANKS_OF_ONE_SCALE,
    compare_model,
    weights_of,
)
from float8.distributed.replaced_parameters import mark_replaced, unmark
from float8.distributed.sharded_weight import ShardedWeight
from float8.kernels import is_sharded
from float8.linear.delayed import modules_by_name
from float8.linear.float8_weight import TENSORWISE, version_of
from float8.linear.layer import Float8Linear
from float8.linear.registration import WeightRule, register_weight_rule
from float8.linear.scaling import max_over_ranks


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers in float8, with one all-reduce.

    Call it after ``optimizer.step()``, on all ranks. Without it, the first gather of each weight
    after the step does its own all-reduce; the bits are the same. The result is discarded when the
    weight is written to again, so a stale scale is never used, and a missing call costs only time.

    Left out are weights that are unsharded at the moment (``unshard()``), and weights with static
    scales or with a delayed scale. The all-reduce is by position, in the
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
    layers = modules_by_name(model, LAYERS)
    weights = [weight for _, layer in layers for weight in weights_of(layer).values()]
    for mesh in dict.fromkeys(w.device_mesh for w in weights if hasattr(w, "device_mesh")):
        compare_model(model, mesh.get_all_groups())
    by_ranks: dict[tuple[Any, str], list[Any]] = defaultdict(list)
    seen: set[int] = set()
    for _, layer in layers:
        cast, state = weight_cast(layer)
        if cast is None or not needs_amax(cast, state):
            continue
        for weight in weights_of(layer).values():
            local = getattr(weight, "_local_tensor", None)
            if id(weight) not in seen and isinstance(local, ShardedWeight):
                seen.add(id(weight))
                by_ranks[_ranks_of(weight)].append((weight, layer, cast))
    for (group, device_type), weights in by_ranks.items():
        _agree(weights, group, device_type)


def _ranks_of(weight: Any) -> tuple[Any, str]:
    """The group over which a DTensor is sharded, and its device type for collectives."""
    dims = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    assert len(dims) == 1, weight.placements
    return weight.device_mesh.get_group(dims[0]), weight.device_mesh.device_type


def _ranks_of_one_scale(layer: nn.Module) -> list[int] | None:
    """The ranks that must have equal delayed scales for this layer, because each casts a shard."""
    if not isinstance(layer, Float8Linear):
        return None
    cast, weight = layer.config.plan.output.b, layer.weight
    if cast is None or cast.scaling_type is not ScalingType.DELAYED:
        return None
    if not isinstance(getattr(weight, "_local_tensor", None), ShardedWeight):
        return None
    return dist.get_process_group_ranks(_ranks_of(weight)[0])


@torch.no_grad()
def _agree(weights: list[Any], group: Any, device_type: str) -> None:
    # Weights may be on the CPU (CPUOffloadPolicy), where NCCL cannot reach them.
    own = _amaxes_of_shards(weights, group)
    local = torch.cat([amax.flatten() for amax in own]).to(device_type)
    all_found = max_over_ranks(local, group).split([amax.numel() for amax in own])
    for (weight, layer, _), amax, found in zip(weights, own, all_found, strict=True):
        version = sum(map(version_of, weights_of(layer).values()))
        weight._local_tensor.remember(found.view(amax.shape).to(weight.device), version)


def _amaxes_of_shards(weights: list[Any], group: Any) -> list[Tensor]:
    """This rank's part of the amax of each weight; those of layers take one pass together."""
    of_layers = [weight._local_tensor.plain for weight, _, _ in weights if weight.dim() == 2]
    found = iter(kernels.amaxes(of_layers).view(-1, 1, 1) if of_layers else ())
    return [
        next(found)
        if weight.dim() == 2
        else amax_of_shard(weight._local_tensor.plain, cast, weight.shape, group)
        for weight, _, cast in weights
    ]


def _refuses(layer: nn.Module, config: Float8LinearConfig) -> str | None:
    if is_sharded(layer.weight):  # type: ignore[arg-type]
        return (
            "its weight is a DTensor already, and enable_fsdp_float8_all_gather=True replaces "
            "plain weights: convert before fully_shard; with tensor parallelism leave the option "
            "off"
        )
    return None


def _wrap(root: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Replace the weights of ``layers``; return name -> reason for those that are not replaced."""
    places = _places(root)
    plain: dict[str, str] = {}
    swapped: dict[int, nn.Parameter] = {}
    for fqn, layer in layers.items():
        for weight in weights_of(layer).values():
            if isinstance(weight, ShardedWeight):
                continue  # tied, and replaced with the first of its layers
            reason = _stays_plain(layer, weight, places[id(weight)])
            if reason is not None:
                plain[fqn] = reason
                continue
            swapped[id(weight)] = new = _of_type(weight, ShardedWeight(weight.detach()))
            mark_replaced(weight, fqn)
            for module, name in places[id(weight)]:
                module.register_parameter(name, new)
    return plain


def _stays_plain(
    layer: nn.Module, weight: Tensor, places: list[tuple[nn.Module, str]]
) -> str | None:
    config = own_config(layer)
    assert config is not None
    plan, cast = config.plan, config.plan.output.b
    if is_sharded(weight):
        return "it is a DTensor already, as expert parallelism makes it"
    if cast is None or plan.grad_input.b is None:
        return "a product with it runs in high precision"
    if not plan.reuses_weight:
        return "its two GEMMs need casts along different dimensions, so they cannot share data"
    if cast.block != TENSORWISE and weight.dim() == 2:
        return f"shards may split its blocks of one scale, {cast.block}"
    for module, _ in places:
        if not isinstance(module, LAYERS):
            return f"it is tied to a {type(module).__name__}, which does not read float8"
    return None


def _unwrap(root: nn.Module) -> None:
    """Give the layers plain Parameters again."""
    found = [place for places in _places(root).values() for place in places]
    for module, name in found:
        parameter: Any = module._parameters[name]
        local = getattr(parameter, "_local_tensor", None)
        if isinstance(local, ShardedWeight) or isinstance(parameter, GatheredWeight):
            raise RuntimeError(
                f"{type(module).__name__}.{name} is sharded by fully_shard and gathered in float8, "
                "which cannot be undone: make a plain model and load get_model_state_dict(model) "
                "into it"
            )
    plain: dict[int, nn.Parameter] = {}
    for module, name in found:
        weight: Any = module._parameters[name]
        if not isinstance(weight, ShardedWeight):
            continue
        if id(weight) not in plain:
            plain[id(weight)] = new = _of_type(weight, weight.plain)
            mark_replaced(weight, type(module).__name__)
            unmark(new)
        module.register_parameter(name, plain[id(weight)])


def _places(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules and names under which each Parameter of a model is registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    return places


def _of_type(old: Tensor, data: Tensor) -> nn.Parameter:
    """A Parameter of other data with the gradient and the attributes of ``old``."""
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.grad = old.grad
    for key, value in _attributes(old):
        setattr(new, key, value)
    return new


def _attributes(x: Tensor) -> Iterator[tuple[str, Any]]:
    # Left out: attributes of ShardedWeight itself, and methods bound to the old Parameter.
    for key, value in vars(x).items():
        if key not in ("_tensor", "_known", "_is_param") and not callable(value):
            yield key, value


def _as_plain(x: Tensor) -> Tensor:
    """A weight as a checkpoint stores it: an ordinary tensor, or a DTensor of ordinary ones."""
    if isinstance(x, ShardedWeight):
        return x.plain.detach()
    local = getattr(x, "_local_tensor", None)
    # detach() shares the version counter, so that in-place writes to the checkpoint are detected
    return _with_local(x, local.plain.detach()) if isinstance(local, ShardedWeight) else x


def _as_stored(x: Tensor) -> Tensor:
    """The inverse of `_as_plain`, of a plain weight."""
    local = getattr(x, "_local_tensor", None)
    if local is not None:
        return _with_local(x, ShardedWeight(local))
    return ShardedWeight(x.detach())


def _is_stored(x: Tensor) -> bool:
    return isinstance(getattr(x, "_local_tensor", x), ShardedWeight)


@torch.no_grad()
def _with_local(x: Any, local: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.size(), stride=x.stride()
    )


RANKS_OF_ONE_SCALE.append(_ranks_of_one_scale)
register_weight_rule(
    WeightRule(_refuses, _wrap, _unwrap, _is_stored, to_plain=_as_plain, from_plain=_as_stored)
)
