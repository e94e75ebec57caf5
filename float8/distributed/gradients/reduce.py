"""The collectives under float8 gradients: a reduce-scatter, and an all-reduce made of it.

Three of torch's own carry everything, on any backend: an all-reduce (MAX) of one float per tile,
an all-to-all of one-byte shards, and, for an all-reduce, an all-gather of one-byte shards. Bytes
travel as uint8, because not every backend knows float8. For n elements on N ranks a rank sends
``n (N-1)/N`` bytes and receives as many in each half: half of bfloat16's. Scales included it is
0.502 of bfloat16's bytes for 65536 elements and 0.506 for 2048, counted in the tests.

Nothing here waits for a device: calls are made in the current stream and return tensors that are
ready in it. All ranks get equal bits, run after run: the same codes are decoded everywhere, and the
sum over ranks is taken by one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from float8.distributed.gradients import wire
from float8.formats import HIGH_PRECISION_DTYPES, Format, on_device
from float8.linear.scaling import max_over_ranks

# torch 2.13 has a new name for it, and warns about the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Scattered(NamedTuple):
    """What a rank holds between the halves.

    ``sum_TE``: float32, the sum over ranks of its shard, in units of ``scale_NT1[rank]``;
    ``flushed``: nonzero elements of its own gradient, in its shard, that were zero in it;
    ``nonfinite``: 1 if a NaN or an infinity entered, on any rank.
    """

    sum_TE: Tensor
    scale_NT1: Tensor
    flushed: Tensor
    nonfinite: Tensor


def check_gradient(gradient: Tensor, what: str) -> None:
    """Refuse what cannot be sent as float8, naming it.

    Raises:
        TypeError: a dtype that no cast takes, such as float64.
    """
    if gradient.dtype not in HIGH_PRECISION_DTYPES or gradient.is_sparse:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        raise TypeError(
            f"float8_gradients: {what} holds {kind} gradients; dense ones of {known} can travel as "
            "float8. Convert the parameters, or leave the default reduction for this model"
        )


def scatter(x_NC: Tensor, group: dist.ProcessGroup, fmt: Format, tile: int) -> Scattered:
    """Each rank's shard of the sum over ranks.

    Args:
        x_NC: this rank's gradient, (N, C); row r is the shard of rank r.
        group: the N ranks.
        fmt: the float8 format.
        tile: see `wire.TILE`.
    """
    fmt, rank = on_device(fmt, x_NC.device), group.rank()
    x_NTE = wire.folded(x_NC, tile)
    scale = wire.shared_scale(max_over_ranks(wire.amax(x_NTE), group), fmt)
    codes = wire.encode(x_NTE, scale, fmt)
    received = torch.empty_like(codes)
    dist.all_to_all_single(received.view(torch.uint8), codes.view(torch.uint8), group=group)
    lost = wire.lost(x_NTE[rank], codes[rank])
    nonfinite = scale.isnan().any().to(torch.int32)
    return Scattered(wire.summed(received), scale, lost, nonfinite)


def reduce_scatter(
    output_C: Tensor,
    x_NC: Tensor,
    group: dist.ProcessGroup,
    fmt: Format,
    mean: bool,
    tile: int = wire.TILE,
) -> Tensor:
    """Write this rank's shard of the sum or mean over ranks; float8 travels, float32 adds.

    One cast, and none that saturates: there is nothing for a controller to do.

    Args:
        output_C: (C,), any dtype; rounded to it once.
        x_NC: (N, C), this rank's gradient.
        group, fmt, tile: see `scatter`.
        mean: divide by N.

    Returns:
        int32 (4,): `wire.Counts`; what this rank's own shard lost before the sum, and nothing else.
    """
    half = scatter(x_NC, group, fmt, tile)
    total = half.sum_TE.div_(group.size()) if mean else half.sum_TE
    shard = total.mul_(half.scale_NT1[group.rank()]).flatten()
    output_C.copy_(shard[: output_C.numel()])
    zero = torch.zeros_like(half.flushed)
    return torch.stack(wire.Counts(zero, zero, half.flushed, half.nonfinite))


def all_reduce_mean(
    gradient: Tensor,
    mu: Tensor,
    group: dist.ProcessGroup,
    fmt: Format,
    tile: int = wire.TILE,
) -> Tensor:
    """Replace a flat gradient by its mean over ranks; float8 travels in both halves.

    Args:
        gradient: (n,) float32, bfloat16 or float16; overwritten. n need not divide by N.
        mu: float32 (), equal on all ranks: the pre-scaling factor (`wire`).
        group, fmt, tile: see `scatter`.

    Returns:
        int32 (4,), equal on all ranks: `wire.Counts` over all ranks.
    """
    world, n = group.size(), gradient.numel()
    tiles, extent = wire.extents(-(-n // world), tile)
    padding = world * tiles * extent - n
    padded = F.pad(gradient, (0, padding)) if padding else gradient
    half = scatter(padded.view(world, -1), group, fmt, extent)
    codes, counts = _second_cast(half, mu, world, on_device(fmt, gradient.device))
    gathered, counts = _gather(codes, counts, group)
    scale = half.scale_NT1 / mu
    mean = wire.decode(gathered, scale, gradient.dtype)
    gradient.copy_(mean.flatten()[:n])
    return counts


def _second_cast(half: Scattered, mu: Tensor, world: int, fmt: Format) -> tuple[Tensor, Tensor]:
    """The codes of this rank's shard of the mean, and what was lost on the way; int32 (4,)."""
    mean_TE = wire.prescaled(half.sum_TE, mu, world)
    codes = wire.recast(mean_TE, fmt)
    counts = wire.Counts(
        saturated=wire.saturated(mean_TE, fmt),
        flushed=wire.lost(mean_TE, codes),
        flushed_before=half.flushed,
        nonfinite=half.nonfinite,
    )
    return codes, torch.stack(counts)


def _gather(codes_TE: Tensor, counts_4: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All shards, (N, T, E), and the counts of all ranks, which travel behind them."""
    bytes_of_codes = codes_TE.view(torch.uint8).flatten()
    sent = torch.cat([bytes_of_codes, counts_4.view(torch.uint8)])
    received = sent.new_empty(group.size() * sent.numel())  # flat: gloo insists
    _all_gather(received, sent, group=group)
    shards, counts = received.view(group.size(), -1).split(
        [bytes_of_codes.numel(), counts_4.numel() * 4], dim=1
    )
    codes_NTE = shards.view(codes_TE.dtype).unflatten(1, tuple(codes_TE.shape))
    total = counts.contiguous().view(torch.int32).sum(0, dtype=torch.int32)
    total[3].clamp_(max=1)  # every rank says the same
    return codes_NTE, total
