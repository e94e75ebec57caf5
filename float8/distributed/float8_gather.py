"""The cast of a shard before FSDP2 gathers it, and the gathered result, `GatheredWeight`.

The bits are those of a single process: a shard is rounded to the compute dtype and cast with the
scales of the whole weight. A static or delayed scale is known without communication. For dynamic
scales, the ranks reduce the largest magnitudes of the weight, one float32 number per block: one MAX
all-reduce. A rank fills in the numbers of the blocks that its shard has elements of (`Part`), and
leaves the others 0. So a block may lie on several ranks, and uneven or empty shards are no special
case. Scales are not gathered beside the data: torch's ``FSDPParam.all_gather_inputs`` refuses
tensors of a second size where a shard is padded.

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
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast
from float8.distributed.rank_comparison import compare_layer
from float8.granularity import WHOLE, Block, ceil_div, scale_shape
from float8.linear.casts import DelayedState, cast_alone, known_scale, max_over_ranks, record
from float8.linear.float8_weight import version_of
from float8.linear.module import own_config, weights_of
from float8.linear.plan import cast_on
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


def weight_cast(layer: Any, weight: Tensor) -> tuple[OperandCast, DelayedState | None]:
    """The cast of a layer's gathered weight for its output, and a delayed one's state."""
    cast = own_config(layer).gemms.output.b  # type: ignore[union-attr]
    assert cast is not None
    cast = cast_on(cast, kernels.family_of(weight.device))
    if weight.dim() == 3:  # experts share no scale
        return replace(cast, block=(1, *cast.block)), None
    return cast, layer.states[1]


class Part(NamedTuple):
    """The blocks of a whole weight that a rank's shard has elements of, along dimension ``dim``.

    Args:
        dim: the dimension that is sharded.
        first, blocks: the first of them, and their number.
        before: the elements of the first block that precede the shard.
        is_cut: whether a block may have elements in two shards.
    """

    dim: int
    first: int = 0
    blocks: int = 1
    before: int = 0
    is_cut: bool = False

    def of(self, scales: Tensor) -> Tensor:
        """The scales, or amaxes, of these blocks: a view of those of the whole weight."""
        return scales.narrow(self.dim, self.first, self.blocks)

    def aligned(self, shard: Tensor) -> Tensor:
        """The shard after as many zeros as make it begin with a block."""
        zeros = (0, 0) * (shard.dim() - 1 - self.dim) + (self.before, 0)
        return F.pad(shard, zeros) if self.before else shard


def part_of(shard: Tensor, size: torch.Size, block: Block, group: Any) -> Part:
    """The place of this rank's shard in a weight of this size; shards are as FSDP2 makes them."""
    dim = next((d for d, extent in enumerate(shard.shape) if extent != size[d]), 0)
    length, extent = ceil_div(size[dim], group.size()), block[dim]
    if extent == WHOLE:
        return Part(dim)
    first, before = divmod(min(group.rank() * length, size[dim]), extent)
    blocks = ceil_div(before + shard.shape[dim], extent)
    return Part(dim, first, blocks, before, length % extent > 0)


def cast_shard(
    shard: Tensor, known: KnownAmax, layer: Any, size: torch.Size, dtype: torch.dtype, group: Any
) -> tuple[Tensor, Tensor]:
    """Cast a shard of a layer's weight to float8, with the scales of the whole weight.

    The shard is in high precision and may be empty. ``known`` has the amax of the whole weight,
    which is computed and kept if it is unknown. ``size`` is that of the whole weight, ``dtype`` the
    compute dtype, and ``group`` the ranks of the shards. In training a delayed cast records the
    shard's amax; `sync` reduces the amaxes over ranks.

    Returns the data of the shard and the scales of the whole weight.
    """
    compare_layer(layer, group)
    cast, state = weight_cast(layer, shard)
    rounded = shard.to(dtype)  # first, as autocast, DDP and one process do
    scale = known_scale(cast, state, rounded)
    if scale is None:
        owners = weights_of(layer).values()
        if (amax := known.of(owners)) is None:
            amax = max_over_ranks(amax_of_shard(shard, cast, size, group), group)
            known.remember(amax, shard, owners)
        amax = amax.to(dtype).float()
        scale = kernels.scale_from_amax(amax, cast.largest, cast.scales)
    scale = scale.expand(scale_shape(size, cast.block))  # static: one per expert, all equal
    if state is not None and layer.training:
        record(state, kernels.amax(rounded, cast.block))
    part = part_of(shard, size, cast.block, group)
    data, _, _ = cast_alone(
        part.aligned(rounded),
        cast,
        scale=part.of(scale),
        # Kernels compute the scales of blocks again, from the elements of this rank alone.
        emulate=own_config(layer).emulate or part.is_cut,  # type: ignore[union-attr]
    )
    data = data.narrow(part.dim, part.before, shard.shape[part.dim]).contiguous()
    # A delayed scale is a view of its buffer, which the next `sync` writes to.
    return data, scale if state is None else scale.clone()


def amax_of_shard(shard: Tensor, cast: OperandCast, size: torch.Size, group: Any) -> Tensor:
    """This rank's part of the amaxes of a whole weight; 0 for blocks of other ranks alone."""
    part = part_of(shard, size, cast.block, group)
    whole = shard.new_zeros(scale_shape(size, cast.block), dtype=torch.float32)
    part.of(whole).copy_(kernels.amax(part.aligned(shard), cast.block))
    return whole
