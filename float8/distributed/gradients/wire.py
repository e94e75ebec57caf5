"""What a byte of a gradient on the wire means; no communication happens here.

N ranks want the mean of their gradients g_1 .. g_N. A flat gradient is cut into N shards, one per
rank, and each shard into *tiles* of about a thousand elements. A tile has one scale, and all ranks
use the same one (`shared_scale`): it follows from the largest magnitude that any rank has there.
FP8-LM (arXiv 2310.18313, section 2.1) shares one scale per tensor, the minimum over ranks of
``max(format) / amax``; ours is its reciprocal, so the maximum of amaxes, and per tile. With it

1. every rank encodes ``c_i = cast(g_i / scale)``; nothing saturates, because the scale knows the
   largest element of all ranks;
2. the rank that owns the shard receives the c_i and adds them in float32. Codes of one scale can be
   added as they are: the owner needs no scale for it, which is what sharing one is for;
3. it encodes ``cast(mu / N * sum(c_i))`` (`recast`), still in units of the shared scale;
4. every rank gathers these codes and multiplies by ``scale / mu``.

**Where mu and 1/N are applied.** FP8-LM multiplies by them before the first cast, because its wire
adds in float8 and the sum has to fit. That costs the range that 1/N shifts away: ten of E4M3's
eighteen binades on 1024 ranks. Here the sum is float32, so a cast of ``mu / N * g_i`` with the
scale of ``mu / N * g_i`` has the same codes as g_i has with its own, and what is left of
pre-scaling is one multiplication, after the sum and before the cast whose range it uses. Only that
cast can saturate, and only if mu > 1; mu > 1 is of use because the mean of N independent gradients
is smaller than one of them, by sqrt(N), and would lose those binades.

A NaN or an infinity anywhere makes every scale NaN (`shared_scale`), so that the whole reduction
is NaN on every rank: gradient scalers and clipping see it wherever they look.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.formats import Format
from float8.granularity import WHOLE
from float8.kernels import reference
from float8.linear.scaling import constant

TILE = 1024  # elements: 4 bytes of scale beside them are 0.4 %
_ALIGNED = 16  # bytes: a tile starts where vectorised copies like it
_BY_TILE = (1, 1, WHOLE)


class Counts(NamedTuple):
    """What a reduction loses at the ends of the format's range; int32 scalars.

    ``saturated``: elements of the mean, in this rank's shard, that clamping moved further than
    rounding may. ``flushed``: nonzero elements of it that became zero. ``flushed_before``: nonzero
    elements of this rank's own gradient, in its shard, that became zero before the sum.
    ``nonfinite``: 1 if any rank had a NaN or an infinity.
    """

    saturated: Tensor
    flushed: Tensor
    flushed_before: Tensor
    nonfinite: Tensor


def extents(columns: int, tile: int = TILE) -> tuple[int, int]:
    """How many tiles a shard of ``columns`` elements has, and how long each is.

    Tiles are shortened rather than padded: the padding is less than 16 elements per tile, so small
    gradients do not grow on the wire. ``tile`` is rounded up to a multiple of 16.
    """
    tile = -(-tile // _ALIGNED) * _ALIGNED
    tiles = max(1, -(-columns // tile))
    longest = -(-columns // tiles)
    return tiles, max(_ALIGNED, -(-longest // _ALIGNED) * _ALIGNED)


def folded(x_NC: Tensor, tile: int = TILE) -> Tensor:
    """(N shards, C columns) as (N, tiles, elements), padded with zeros; a view where it fits."""
    tiles, extent = extents(x_NC.shape[1], tile)
    padding = tiles * extent - x_NC.shape[1]
    padded = F.pad(x_NC, (0, padding)) if padding else x_NC
    return padded.reshape(x_NC.shape[0], tiles, extent)


def amax(x_NTE: Tensor) -> Tensor:
    """(N, T, 1) float32: the largest magnitude of each tile."""
    return kernels.amax(x_NTE, _BY_TILE)


def shared_scale(amax_NT1: Tensor, fmt: Format) -> Tensor:
    """The dequantisation scales of all tiles, from amaxes that were reduced over ranks.

    Returns:
        (N, T, 1) float32; all of them NaN if one amax is not finite.
    """
    poison = amax_NT1.amax() * 0.0  # 0, or NaN if there is an infinity
    return kernels.scale_from_amax(amax_NT1, fmt.max) + poison


def encode(x_NTE: Tensor, scale_NT1: Tensor, fmt: Format) -> Tensor:
    """This rank's gradient as codes, (N, T, E) of the float8 dtype; nothing saturates."""
    return kernels.cast(x_NTE, scale_NT1, _BY_TILE, fmt.dtype, True)


def summed(codes_NTE: Tensor) -> Tensor:
    """The sum over N ranks of codes of one shard, (T, E), in float32: exact up to its rounding."""
    return reference.decode(codes_NTE).sum(0, dtype=torch.float32)


def prescaled(sum_TE: Tensor, mu: Tensor, world: int) -> Tensor:
    """``mu / N`` times a sum, in place: the mean, in units of the shared scale over mu."""
    return sum_TE.div_(world).mul_(mu)  # the division first: it is exact where all ranks agree


def recast(mean_TE: Tensor, fmt: Format) -> Tensor:
    """The mean as codes again, in units of the shared scale over mu; saturates."""
    rows = mean_TE.reshape(-1, mean_TE.shape[-1])
    codes = kernels.cast(rows, constant(1.0, rows), (WHOLE, WHOLE), fmt.dtype)
    return codes.reshape(mean_TE.shape)


def decode(codes_NTE: Tensor, scale_NT1: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * scale``, computed in float32 and rounded once to ``dtype``."""
    return kernels.dequantize(codes_NTE, scale_NT1, _BY_TILE, dtype)


def saturates_above(fmt: Format) -> float:
    """The magnitude above which clamping loses more than rounding may: half a step past the max.

    Rounding to nearest with an unlimited exponent would go past the largest value from here on.
    """
    step = math.ldexp(torch.finfo(fmt.dtype).eps, math.frexp(fmt.max)[1] - 1)
    return fmt.max + step / 2


def lost(x: Tensor, codes: Tensor) -> Tensor:
    """How many nonzero elements of x have a code that is zero; int32."""
    return (x.ne(0) & reference.decode(codes).eq(0)).sum(dtype=torch.int32)


def saturated(mean_TE: Tensor, fmt: Format) -> Tensor:
    """How many elements of a mean, in units of its scale, lose by clamping; int32."""
    return mean_TE.abs().gt(saturates_above(fmt)).sum(dtype=torch.int32)
