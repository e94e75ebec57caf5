"""The cast of a shard before FSDP2 gathers it, and the gathered result, `GatheredWeight`.

The bits are those of a single process: a shard is rounded to the compute dtype and cast with the
scale of the whole weight. A static or delayed scale is known without communication. For a dynamic
scale, the ranks reduce the largest magnitude of the weight: one MAX all-reduce of one number. The
weights of experts (E, N, K) have a number per expert, or per block of one. A rank fills in those of
its own experts, so uneven and empty shards are no special case.

The amax is kept until the weight is written to, as `KnownAmax`. Writes are found in three ways:

- Every operation on a `ShardedWeight` passes its ``__torch_dispatch__``, under DTensor too. The
  operations that write (an optimizer's step, a load, an initialisation) call `KnownAmax.forget`.
- Some writes bypass the dispatch: those of compiled code, and writes to the tensor that a
  checkpoint shares with the weight. They increase the version counter of the stored tensor. That
  counter alone does not suffice: an optimizer's step under FSDP2 leaves it unchanged.
- An optimizer's step that inductor compiled increases only the version counter of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast
from float8.convert.conversion import own_config
from float8.distributed.rank_comparison import compare_layer
from float8.formats import on_device
from float8.granularity import Block, scale_shape
from float8.linear.float8_weight import version_of
from float8.linear.layer import Float8Linear
from float8.linear.plan import EXPERTS
from float8.linear.registration import weights_of
from float8.linear.scaling import DelayedState, Pair, bind_and_cast, known_scale, max_over_ranks
from float8.tensor import Float8Tensor

aten = torch.ops.aten


class GatheredWeight(Float8Tensor):
    """A whole weight in float8, in memory that FSDP2 fills before a layer runs and frees after it.

    The operations by which torch makes a parameter of it keep the type. Any other operation is that
    of `Float8Tensor`.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep the type in the operations that make a parameter of it."""
        x = args[0]
        if func is aten.zeros_like.default:  # the gradient of a parameter that had none
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            return GatheredWeight(result.float8_data, x.scale, x.block, x.dtype)
        return result

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["float8_data"], inner["scale"], *meta)


class KnownAmax:
    """The largest magnitudes of a whole weight, shared by all views of one rank's shard of it.

    They are float32, one per block, and not rounded to a compute dtype: rounding is monotonic and
    may come later.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard the amax, because the weight was written to."""
        self.source: Tensor | None = None
        self.amax: Tensor | None = None
        self.versions: list[int] = []

    def remember(self, amax: Tensor, source: Tensor, owners: Iterable[Tensor]) -> None:
        """Keep the amax until the stored tensor ``source`` or a parameter in ``owners`` changes."""
        self.amax, self.source = amax, source
        self.versions = [version_of(source), *map(version_of, owners)]

    def of(self, owners: Iterable[Tensor]) -> Tensor | None:
        """The amax if neither the stored tensor nor one of ``owners`` has changed; or None."""
        if self.source is None:
            return None
        versions = [version_of(self.source), *map(version_of, owners)]
        return self.amax if self.versions == versions else None


def weight_cast(layer: Any) -> tuple[OperandCast, DelayedState | None]:
    """The cast of a layer's gathered weights for its output, and the state of a delayed one."""
    cast = own_config(layer).plan.output.b  # type: ignore[union-attr]
    assert cast is not None
    return cast, layer.casts[1].state if isinstance(layer, Float8Linear) else None


def block_of(cast: OperandCast, weight: Tensor) -> Block:
    """The block of a weight (N, K) or (E, N, K); experts share no scale."""
    return cast.block if weight.dim() == 2 else (1, *cast.block)


def cast_shard(
    shard: Tensor, known: KnownAmax, layer: Any, size: torch.Size, dtype: torch.dtype, group: Any
) -> Pair:
    """Cast a shard of a layer's weight to float8, with the scale of the whole weight.

    The shard is in high precision and may be empty. ``known`` has the amax of the whole weight,
    which is computed and kept if it is unknown. ``size`` is that of the whole weight, ``dtype`` the
    compute dtype, and ``group`` the ranks of the shards. In training a delayed cast records the
    shard's amax; `sync` reduces the amaxes over ranks.
    """
    compare_layer(layer, group)
    (cast, state), is_stack = weight_cast(layer), shard.dim() == 3
    rounded = shard.to(dtype)  # first, as autocast, DDP and one process do
    scale, block = known_scale(cast, state, rounded), block_of(cast, shard)
    if scale is None:
        fmt, owners = on_device(cast.format, shard.device), weights_of(layer).values()
        if (amax := known.of(owners)) is None:
            amax = max_over_ranks(amax_of_shard(shard, cast, size, group), group)
            known.remember(amax, shard, owners)
        amax = amax.to(dtype).float()
        scale = kernels.scale_from_amax(amax, fmt.max, cast.scale_format.value)
    elif is_stack:  # static: one per expert, all equal
        scale = scale.expand(scale_shape(size, block))
    if state is not None and layer.training:
        kernels.record_amax(state.current_amax, kernels.amax(rounded, block))
    data, _ = bind_and_cast(
        rounded,
        cast,
        scale=scale[experts_here(shard, size, group)] if is_stack else scale,
        emulate=own_config(layer).emulate,  # type: ignore[union-attr]
        groups=EXPERTS if is_stack else "",
    )
    # A delayed scale is a view of its buffer, which the next `sync` writes to.
    return data, scale if state is None else scale.clone()


def amax_of_shard(shard: Tensor, cast: OperandCast, size: torch.Size, group: Any) -> Tensor:
    """This rank's part of the amax of a whole weight; 0 for the experts of other ranks."""
    amax = kernels.amax(shard, block_of(cast, shard))
    if shard.dim() == 2:
        return amax
    whole = amax.new_zeros(scale_shape(size, block_of(cast, shard)))
    whole[experts_here(shard, size, group)] = amax
    return whole


def experts_here(shard: Tensor, size: torch.Size, group: Any) -> slice:
    """The experts that a rank's shard has, of all; all of them if another dimension is sharded."""
    if shard.shape[0] == size[0]:
        return slice(None)
    start = min(group.rank() * -(-size[0] // group.size()), size[0])
    return slice(start, start + shard.shape[0])
