"""The mean of gradients over ranks, sent as float8.

N ranks need the mean of their gradients g_1 .. g_N. A flat gradient is cut into N shards, one per
rank, and each shard into *tiles* of about a thousand elements. A tile has one scale, which all
ranks share (`scale_by_tile`): it is computed from the largest magnitude of that tile on any rank.
FP8-LM (arXiv 2310.18313, section 2.1) shares one scale per tensor, the minimum over ranks of
``max(format) / amax``. The shared scale is the reciprocal of that, per tile. Then

1. every rank casts ``c_i = cast(g_i / scale)``; nothing saturates, because the scale is computed
   from the largest element of all ranks;
2. the rank that owns the shard receives the c_i and adds them in float32. They share one scale,
   which the sum leaves out;
3. it casts the mean ``sum(c_i) / N`` with a scale of its own per tile, computed from that mean;
4. every rank gathers this data and its scales.

Steps 1 and 2 are a reduce-scatter (`reduce_scatter`, FSDP2), all four an all-reduce
(`all_reduce_mean`, DDP).

**No pre-scaling.** FP8-LM adds in float8, so that it multiplies by 1/N and by a factor mu before
the first cast: the sum must not overflow. That costs range: 1/N uses up ten of E4M3's eighteen
binades on 1024 ranks. It tunes mu during the training. This file sums in float32, so the first cast
needs neither factor. The mean of N independent gradients is smaller than one of them by sqrt(N);
with a scale of its own it uses the format's range nevertheless. Neither cast can saturate.

A NaN or an infinity anywhere makes every scale NaN (`scale_by_tile`), so that the whole result is
NaN on every rank, and gradient scalers and clipping see it.

**Communication**: an all-reduce (MAX) of one float per tile, an all-to-all of one-byte shards, and
for `all_reduce_mean` an all-gather of one-byte shards with their scales. Data is sent as uint8,
because not every backend has float8 types. For n elements on N ranks, a rank sends ``n (N-1)/N``
bytes and receives as many in each half: half of bfloat16's. With scales it is 0.503 of bfloat16's
bytes for 65536 elements and 0.506 for 2048 on two ranks.

No function of this file waits for the device: the work is enqueued in the current stream. All ranks
get equal bits, in every run: one rank computes each sum, and all ranks dequantise the same data.

Dimensions: N ranks (shards), C columns of a shard, T tiles of a shard, E elements of a tile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.formats import Format
from float8.granularity import WHOLE
from float8.kernels import cpu
from float8.kernels.products import on_device
from float8.linear.casts import max_over_ranks

TILE_SIZE = 1024  # elements: 4 bytes of scale beside them are 0.4 %
_ALIGNED = 16  # bytes: the alignment of a tile that vectorised copies need
_BY_TILE = (1, 1, WHOLE)

# torch 2.13 has a new name for it, and warns about the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# --- arithmetic: no communication


def extents(columns: int, tile: int = TILE_SIZE) -> tuple[int, int]:
    """The number of tiles of a shard of ``columns`` elements, and the length of each.

    Tiles are shortened rather than padded: the padding is less than 16 elements per tile, so small
    gradients do not grow in transit. ``tile`` is rounded up to a multiple of 16.
    """
    tile = -(-tile // _ALIGNED) * _ALIGNED
    tiles = max(1, -(-columns // tile))
    longest = -(-columns // tiles)
    return tiles, max(_ALIGNED, -(-longest // _ALIGNED) * _ALIGNED)


def in_tiles(x_NC: Tensor, tile: int = TILE_SIZE) -> Tensor:
    """Reshape (N, C) to (N, T, E), padded with zeros; a view where no padding is needed."""
    tiles, extent = extents(x_NC.shape[1], tile)
    padding = tiles * extent - x_NC.shape[1]
    padded = F.pad(x_NC, (0, padding)) if padding else x_NC
    return padded.reshape(x_NC.shape[0], tiles, extent)


def amax_by_tile(x_NTE: Tensor) -> Tensor:
    """(N, T, 1) float32: the largest magnitude of each tile."""
    return kernels.amax(x_NTE, _BY_TILE)


def scale_by_tile(amax_NT1: Tensor, fmt: Format) -> Tensor:
    """The dequantisation scales (N, T, 1) of all tiles, from their amaxes.

    They are float32, and all of them are NaN if one amax is not finite.
    """
    zero_or_nan = amax_NT1.amax() * 0.0
    return kernels.scale_from_amax(amax_NT1, fmt.max) + zero_or_nan


def cast_by_tile(x_NTE: Tensor, scale_NT1: Tensor, fmt: Format) -> Tensor:
    """A gradient, or a mean, in float8, (N, T, E); nothing saturates."""
    return kernels.cast_by_scale(x_NTE, scale_NT1, _BY_TILE, fmt.dtype)


def summed(data_NTE: Tensor) -> Tensor:
    """The sum over N ranks of the data of one shard, (T, E) float32, in units of its scale."""
    return cpu.to_bfloat16(data_NTE).sum(0, dtype=torch.float32)


def cast_mean(mean_1TE: Tensor, scale_T1: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """A mean in units of shared scales (T, 1): its data, and its own scales (1, T, 1)."""
    fmt = on_device(fmt, mean_1TE.device)
    own_1T1 = scale_by_tile(amax_by_tile(mean_1TE), fmt)
    return cast_by_tile(mean_1TE, own_1T1, fmt), own_1T1 * scale_T1


def dequantize_by_tile(data_NTE: Tensor, scale_NT1: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 and rounded once to ``dtype``."""
    return kernels.dequantize(data_NTE, scale_NT1, _BY_TILE, dtype)


# --- collectives


def scatter(
    x_NC: Tensor, group: dist.ProcessGroup, fmt: Format, tile: int
) -> tuple[Tensor, Tensor]:
    """Reduce-scatter a gradient: this rank's shard of the sum over ranks, and all scales.

    Row r of ``x_NC``, this rank's gradient, is the shard of rank r of the N ranks of ``group``. For
    ``tile`` see `TILE_SIZE`.

    Returns the sum, (T, E) float32, in units of the scales (N, T, 1) at this rank.
    """
    fmt, x_NTE = on_device(fmt, x_NC.device), in_tiles(x_NC, tile)
    scale = scale_by_tile(max_over_ranks(amax_by_tile(x_NTE), group), fmt)
    data = cast_by_tile(x_NTE, scale, fmt)
    received = torch.empty_like(data)
    dist.all_to_all_single(received.view(torch.uint8), data.view(torch.uint8), group=group)
    return summed(received), scale


def reduce_scatter(
    output_C: Tensor,
    x_NC: Tensor,
    group: dist.ProcessGroup,
    fmt: Format,
    mean: bool,
    tile: int = TILE_SIZE,
) -> None:
    """Write this rank's shard of the sum or mean over ranks: sent in float8, added in float32.

    ``output_C`` is written in its own dtype, rounded to it once. ``mean`` divides by N; for the
    others see `scatter`.
    """
    sum_TE, scale_NT1 = scatter(x_NC, group, fmt, tile)
    total = sum_TE.div_(group.size()) if mean else sum_TE
    shard = total.mul_(scale_NT1[group.rank()]).flatten()
    output_C.copy_(shard[: output_C.numel()])


def all_reduce_mean(
    gradient: Tensor, group: dist.ProcessGroup, fmt: Format, tile: int = TILE_SIZE
) -> None:
    """Replace a flat gradient by its mean over ranks, sent in float8 in both halves.

    ``gradient`` (n,) is overwritten; n need not be a multiple of the number of ranks.
    """
    world, n = group.size(), gradient.numel()
    tiles, extent = extents(-(-n // world), tile)
    padding = world * tiles * extent - n
    padded = F.pad(gradient, (0, padding)) if padding else gradient
    sum_TE, scale_NT1 = scatter(padded.view(world, -1), group, fmt, extent)
    mean_1TE = sum_TE.div_(world).unsqueeze(0)
    own = cast_mean(mean_1TE, scale_NT1[group.rank()], fmt)
    data_NTE, scale_NT1 = _gather(own, group)
    mean_NTE = dequantize_by_tile(data_NTE, scale_NT1, gradient.dtype)
    gradient.copy_(mean_NTE.flatten()[:n])


def _gather(parts: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Tensors (1, ...) of all ranks, each as one (N, ...); they are sent together."""
    as_bytes = [part.contiguous().flatten().view(torch.uint8) for part in parts]
    sent = torch.cat(as_bytes)
    received = sent.new_empty(group.size() * sent.numel())  # flat: gloo requires it
    _all_gather(received, sent, group=group)
    pieces = received.view(group.size(), -1).split([x.numel() for x in as_bytes], dim=1)
    return [
        piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
        for piece, part in zip(pieces, parts, strict=True)
    ]
