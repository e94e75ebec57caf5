"""Plain PyTorch: the ops of ``definition.py``, several times faster on a CPU, with the same bits.

`amax`, `cast_by_scale`, `dequantize` and `scaled_mm` have a form of their own here; tensors of
other devices, and DTensors, get the definition. ``plain.py`` makes ops of them, which torch.compile
does not look into and DTensors do not reach.

An op takes several passes over its operand. A large one is cut in parts (`_parts`), so that every
pass after the first finds its part in the processor's L2 cache: two to four times faster.

Values whose scale is a power of two are exact in bfloat16. A processor with AMX multiplies bfloat16
about 14 times faster than float32, so products of such operands run in bfloat16 there: the same
sums in float32, added in another order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import definition
from float8.kernels.definition import scale_from_amax
from float8.kernels.e8m0 import e8m0_scale_from_amax

_SMALL = 8192  # elements below which fewer calls beat faster passes
_PART = 1 << 18  # elements whose float32 values stay in an L2 cache of 2 MiB


@functools.cache
def _is_tiled(block: Block) -> bool:
    """Whether a block is neither one element nor all of some dimension."""
    return block.count(WHOLE) + block.count(1) < len(block)


def _parts(x_MK: Tensor, extent: int) -> list[tuple[int, int]]:
    """Begin and end of each part of the rows; ``extent`` rows stay together."""
    size = x_MK.shape[0]
    rows = max(1, _PART * size // x_MK.numel() // extent) * extent
    return [(begin, min(begin + rows, size)) for begin in range(0, size, rows)]


def _is_column_major(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1


def amax(x: Tensor, block: Block) -> Tensor:
    """`definition.amax`; whole tensors are read once."""
    block = tuple(block)
    if x.numel() == 0 or not x.is_cpu or hasattr(x, "device_mesh"):
        return definition.amax(x, block)
    if len(block) == 3 and block[0] == 1:
        return torch.stack([amax(matrix, block[1:]) for matrix in x])
    is_large = x.numel() > _PART // 4
    if WHOLE not in block or _is_tiled(block):
        if len(block) != 2 or WHOLE in block or x.shape[0] % block[0] or x.shape[1] % block[1]:
            return definition.amax(x, block)
        tiles = x.reshape(x.shape[0] // block[0], block[0], -1, block[1])
        return _largest(tiles, [1, 3], False) if is_large else tiles.abs().amax((1, 3)).float()
    if 1 in block or x.numel() < _SMALL:
        lines = [dim for dim, extent in enumerate(block) if extent == WHOLE]
        return _largest(x, lines, True) if is_large else x.abs().amax(lines, keepdim=True).float()
    # aminmax reads x once and writes two numbers; abs() would write all of |x|.
    # In storage order: aminmax is many times slower over columns.
    in_order = x.t() if x.dim() == 2 and x.stride(0) == 1 else x
    smallest, largest = torch.aminmax(in_order)
    return torch.maximum(largest, -smallest).float().reshape((1,) * len(block))


def _largest(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """``x.abs().amax(dims)`` in float32; of 16-bit numbers several times faster."""
    if x.element_size() != 2:
        return x.abs().amax(dims, keepdim).float()
    # Magnitudes are ordered as their bits, NaN above inf. In parts, unless a column is reduced.
    bits = x.detach().view(torch.int16)
    whole = x.numel() <= _PART or 0 in dims
    pieces = [bits] if whole else [bits[begin:end] for begin, end in _parts(x, 1)]
    found = [piece.bitwise_and(0x7FFF).amax(dims, keepdim) for piece in pieces]
    return torch.cat(found).view(x.dtype).float()


def _tiles(x: Tensor, block: Block) -> Tensor | None:
    """A matrix as (blocks down, rows, blocks across, columns); None if blocks do not divide it."""
    if len(block) != 2 or WHOLE in block or x.shape[0] % block[0] or x.shape[1] % block[1]:
        return None
    rows, cols = block
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def cast_by_scale(
    x: Tensor,
    scale: Tensor,
    block: Block,
    dtype: torch.dtype,
    fits: bool = False,
    out: Tensor | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """`definition.cast_by_scale`, with one float32 buffer.

    ``fits`` promises that ``scale`` is a float32 computed from this very ``x``. Then no finite
    value exceeds the format, an infinite one becomes NaN, and the clamp is not needed. ``out``
    receives the data. ``buffer`` is float32 memory for the values of x.
    """
    block = tuple(block)
    if not x.is_cpu or hasattr(x, "device_mesh"):
        data = definition.cast_by_scale(x, scale, block, dtype)
        return data if out is None else out.copy_(data)
    if buffer is None and x.numel() > _PART and x.dim() in (2, 3):
        out = torch.empty_like(x, dtype=dtype) if out is None else out
        _cast_parts(out, x, scale, block, fits, torch.empty(_PART, dtype=torch.float32))
        return out
    # Not `x32 is not x`: under a function mode `float` may return an alias of x.
    is_copy = x.dtype != torch.float32
    if buffer is None or buffer.numel() < x.numel():
        x32 = x.float()
    else:
        is_copy, x32 = True, buffer[: x.numel()].view(x.shape).copy_(x)
    if scale.dtype == torch.float32:
        factor = scale.reciprocal()
    else:  # E8M0: the exponents of the reciprocals; 255, a NaN, stays
        factor = (254 - scale.view(torch.uint8)).view(scale.dtype).float()
    if _is_tiled(block):
        y = _scaled(x32, factor, block)
    else:
        y = x32.mul_(factor) if fits and is_copy else x32 * factor
    if not fits:
        largest = torch.finfo(dtype).max
        # One pass instead of three: 0 * inf is NaN, and adding a zero of x's own sign changes
        # nothing.
        y = y.clamp_(-largest, largest).add_(x32, alpha=0)
    return y.to(dtype) if out is None else out.copy_(y)


# data, scale, data_t, scale_t, amax; None for what is not wanted
CastOutputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def cast_both(
    x: Tensor,
    scale: Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
    scale_format: str,
    swizzled: bool,
    row_major: bool,
    transposed: bool,
    finds_amax: bool,
) -> CastOutputs:
    """Cast x in one orientation or both: the op ``cast``, see `float8.kernels.casts.cast`."""
    block, largest = (1, *block)[-x.dim() :], torch.finfo(dtype).max
    is_given, is_whole, whole = scale is not None, block[-2:] == (WHOLE, WHOLE), None
    find_scale: Any = scale_from_amax  # without a call that dispatches, for small layers
    how: Any = scale_format
    if scale_format.startswith("e8m0"):
        find_scale, how = e8m0_scale_from_amax, scale_format == "e8m0"
    if is_whole and (finds_amax or not is_given):
        whole = amax(x, block)
        scale = scale if is_given else find_scale(whole, largest, how)
    outputs: list[Tensor | None] = []
    for wanted, source in ((row_major, x), (transposed, x.mT)):
        if not wanted:
            outputs += [None, None]
            continue
        own = find_scale(amax(source, block), largest, how) if scale is None else scale
        # By a float32 scale that was computed from x, finite values stay in the format's range.
        fits = not is_given and own.dtype == torch.float32
        outputs.append(cast_by_scale(source, own, block, dtype, fits))
        outputs.append(own if scale is None else None)
    if is_whole and not is_given:  # one scale for both orientations
        outputs[1] = scale
    found = whole.clone() if finds_amax else None  # type: ignore[union-attr]
    return *outputs, found  # type: ignore[return-value]


def _cast_parts(
    out: Tensor,
    x: Tensor,
    scale: Tensor,
    block: Block,
    fits: bool,
    buffer: Tensor,  # fresh memory for each part would cost more than the passes over it
) -> None:
    """`cast_by_scale` into ``out``, part by part in storage order."""
    if x.dim() == 3:
        for index, matrix in enumerate(x):
            its = scale[index if len(scale) > 1 else 0]
            _cast_parts(out[index], matrix, its, block[1:], fits, buffer)
        return
    if _is_column_major(x):
        _cast_parts(out.t(), x.t(), scale.t(), block[::-1], fits, buffer)
        return
    extent = max(1, block[0])
    for begin, end in _parts(x, extent):
        its = scale if len(scale) == 1 else scale[begin // extent : -(-end // extent)]
        cast_by_scale(x[begin:end], its, block, out.dtype, fits, out[begin:end], buffer)


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.dequantize`; by way of bfloat16 several times faster, but for small tensors."""
    block = tuple(block)
    if not data.is_cpu:
        return definition.dequantize(data, scale, block, dtype)
    scale32 = scale.float()
    if data.numel() > _PART // 4 and data.dim() == 2:
        is_exact = dtype == torch.bfloat16 and _are_powers_of_two(scale32)
        return _dequantize_parts(data, scale32.to(dtype) if is_exact else scale32, block, dtype)
    values = data if data.numel() <= 2 * _SMALL else to_bfloat16(data)
    return _scaled(values.float(), scale32, block).to(dtype)


def _dequantize_parts(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`dequantize` of a matrix, part by part in storage order.

    Products have the dtype of the scale: float32; or bfloat16, which is exact where scales are
    powers of two.
    """
    if _is_column_major(data):
        return _dequantize_parts(data.t(), scale.t(), block[::-1], dtype).t()
    out = torch.empty_like(data, dtype=dtype)
    extent = max(1, block[0])
    parts = _parts(data, extent)
    buffer = None if dtype == scale.dtype else scale.new_empty(out[slice(*parts[0])].shape)
    for begin, end in parts:
        its = scale if len(scale) == 1 else scale[begin // extent : -(-end // extent)]
        decoded = to_bfloat16(data[begin:end])
        part = out[begin:end] if buffer is None else buffer[: end - begin]
        decoded = decoded if scale.dtype == torch.bfloat16 else part.copy_(decoded)
        if (tiles := _tiles(part, block)) is not None:
            values = decoded.reshape(tiles.shape)
            torch.mul(values, its.unsqueeze(1).unsqueeze(3), out=tiles)
        elif block.count(WHOLE) + block.count(1) == len(block):
            torch.mul(decoded, its, out=part)
        else:
            part.copy_(_scaled(decoded, its, block))
        if buffer is not None:
            out[begin:end] = part
    return out


def _scaled(x32: Tensor, factor: Tensor, block: Block) -> Tensor:
    """float32 ``x * factor``, each block by its own factor; factor has the shape of a scale.

    Both may be bfloat16 where the product is exact.
    """
    if not _is_tiled(block):
        return x32 * factor
    if len(block) > 1 and WHOLE not in block and max(block[:-2], default=1) == 1:
        (rows, cols), (down, across) = x32.shape[-2:], factor.shape[-2:]
        if rows == down * block[-2] and cols == across * block[-1]:
            tiles = x32.reshape(*x32.shape[:-2], down, block[-2], across, block[-1])
            return (tiles * factor.unsqueeze(-2).unsqueeze(-1)).reshape(x32.shape)
    return x32 * definition.per_element(factor, x32.shape, block)


# format -> how far its exponent field is from bfloat16's, the fields that its bits fill there, and
# the power of two between the exponent biases.
_AS_BFLOAT16 = {
    torch.float8_e4m3fn: (4, ~0x780F, 2.0**120),  # s eeee mmm -> s 0000eeee mmm0000
    torch.float8_e5m2: (5, ~0x701F, 2.0**112),  # s eeeee mm -> s 000eeeee mm00000
}
_LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}  # of the finite ones


def to_bfloat16(data: Tensor) -> Tensor:
    """Float8 data as bfloat16, exactly (without any scale).

    Both OCP formats are bit fields of a bfloat16, up to a shift and a power of two. Integer
    operations on whole tensors are several times faster than torch's elementwise conversion. A
    bfloat16 tensor is returned as it is.
    """
    if data.dtype not in _AS_BFLOAT16 or data.numel() < _SMALL or not data.is_cpu:
        return data.to(torch.bfloat16)
    is_transposed = data.dim() == 2 and data.stride(0) == 1 and data.stride(1) != 1
    in_order = data.t() if is_transposed else data
    # The largest codes with either sign: what is above them is infinite or NaN. Small codes are
    # subnormal bfloat16s for a moment; torch.set_flush_denormal makes them zero.
    largest = _LARGEST_CODE[data.dtype]
    positive, negative = in_order.view(torch.int8).max(), in_order.view(torch.uint8).max()
    is_finite = int(positive) <= largest and int(negative) <= largest + 0x80
    if not is_finite or not bool(torch.full((1,), 2.0**-130).mul_(2.0**10) != 0):
        return data.to(torch.bfloat16)
    shift, fields, power = _AS_BFLOAT16[data.dtype]
    out = torch.empty_like(data, dtype=torch.bfloat16)
    decoded = out.t() if is_transposed else out
    is_large = data.dim() == 2 and data.numel() > _PART
    for begin, end in _parts(in_order, 1) if is_large else [(0, len(in_order))]:
        part = decoded[begin:end]
        bits = part.view(torch.int16).copy_(in_order[begin:end].view(torch.int8))
        bits.bitwise_left_shift_(shift).bitwise_and_(fields)
        part.mul_(power)
    return out


def scaled_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`definition.scaled_mm`; operands and products of whole tensors have no float32 copy."""
    if torch.is_autocast_enabled(a_MK.device.type):
        # AOTAutograd traces a backward under the autocast of its forward, eager code runs without.
        with torch.autocast(a_MK.device.type, enabled=False):
            blocks = a_block, b_block
            return scaled_mm(a_MK, a_scale, b_NK, b_scale, *blocks, bias_N, out_dtype)
    a_block, b_block = tuple(a_block), tuple(b_block)
    by_row, is_bfloat16 = ((WHOLE, WHOLE), (1, WHOLE)), out_dtype == torch.bfloat16
    is_e8m0 = not a_scale.dtype == b_scale.dtype == torch.float32
    if a_block not in by_row or b_block not in by_row or is_e8m0:
        is_faster = is_bfloat16 and _has_matrix_units() and _fits_bfloat16(a_MK, a_scale, b_scale)
        dtype = torch.bfloat16 if is_faster else torch.float32
        scaled = (
            dequantize(a_MK, a_scale, a_block, dtype)
            @ dequantize(b_NK, b_scale, b_block, dtype).t()
        )
    else:
        # Operands have no names here: fresh memory costs more than a pass, so theirs is used again.
        if is_bfloat16:
            product = to_bfloat16(a_MK) @ to_bfloat16(b_NK).t()
        else:
            product = to_bfloat16(a_MK).float() @ to_bfloat16(b_NK).float().t()
        if a_block[0] == WHOLE and b_block[0] == WHOLE and bias_N is None:
            # A 0-dim factor scales in float32 without a float32 copy of the product. Not in place:
            # in bfloat16 torch is slower in place.
            scaled = product * (a_scale * b_scale).reshape(())
        elif is_bfloat16 and product.numel() > _PART and product.is_cpu:
            return _scale_parts(product, a_scale, b_scale, bias_N)
        else:
            scaled = product.float().mul_(a_scale).mul_(b_scale.t())
    if bias_N is not None:
        scaled = scaled + bias_N.to(torch.float32)
    return scaled.to(out_dtype)


def _fits_bfloat16(a_MK: Tensor, *scales: Tensor) -> bool:
    """Whether bfloat16 holds the dequantised operands, and AMX multiplies them correctly.

    AMX takes magnitudes below 2^-126 for zero, also those of nn.Linear in bfloat16.

    oneDNN's bfloat16 GEMM for AMX (torch 2.13) reads contractions that are no multiple of 4 beyond
    the end of a row, and multiplies what it finds there by 0: NaN if that is NaN. Multiples of 32,
    the bfloat16 numbers in a row of an AMX tile, leave nothing beyond a row.
    """
    contraction = a_MK.shape[1]
    if not (a_MK.is_cpu and contraction and contraction % 32 == 0):
        return False
    for scale in scales:
        if scale.dtype == torch.float32 and not _are_powers_of_two(scale):
            return False
    return True


def _are_powers_of_two(scale: Tensor) -> bool:
    """Whether no float32 has a bit in its mantissa; of a NaN, False."""
    return not bool(scale.view(torch.int32).bitwise_and(0x7FFFFF).any())


@functools.cache
def _has_matrix_units() -> bool:
    """Whether the processor has AMX and oneDNN may use it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    return torch.cpu._is_amx_tile_supported() and ("AMX" in limit or limit in ("ALL", "DEFAULT"))


def _scale_parts(
    product: Tensor, a_scale: Tensor, b_scale: Tensor, bias_N: Tensor | None
) -> Tensor:
    """``product * a_scale * b_scale.T + bias`` in the product's dtype, part by part."""
    out, b_scale_N = torch.empty_like(product), b_scale.t()
    bias32_N = None if bias_N is None else bias_N.to(torch.float32)
    buffer = torch.empty(max(_PART, product.shape[1]), dtype=torch.float32)
    for begin, end in _parts(product, 1):
        part = product[begin:end]
        part32 = buffer[: part.numel()].view(part.shape).copy_(part)
        part32.mul_(a_scale if len(a_scale) == 1 else a_scale[begin:end]).mul_(b_scale_N)
        if bias32_N is not None:
            part32.add_(bias32_N)
        out[begin:end].copy_(part32)
    return out
