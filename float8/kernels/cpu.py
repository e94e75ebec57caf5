"""The ops of ``definition.py`` as they run in plain PyTorch: the same bits, faster on a CPU.

These run wherever no kernel does: on every device that is not CUDA, with ``emulate=True``, on
DTensors, and in code that torch.compile makes. `amax`, `cast`, `dequantize` and `scaled_mm` have a
form of their own here; all other names are the definition's.

An op in eager mode takes several passes over its operand. A large one is cut in parts (`_parts`),
so that every pass after the first finds its part in the processor's L2 cache: two to four times
faster.

Values whose scale is a power of two are exact in bfloat16. A processor with AMX multiplies bfloat16
about 14 times faster than float32, so products of such operands run in bfloat16 there: the same
sums in float32, added in another order.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import definition, e8m0
from float8.kernels.cublas import is_sharded
from float8.kernels.definition import (
    MIN_SCALE,
    in_blocks,
    layer_norm,
    reciprocal,
    record_amax,
    rms_norm,
    scale_from_amax,
    swiglu,
    swiglu_backward,
)

__all__ = [
    "MIN_SCALE",
    "amax",
    "cast",
    "cast_decoded",
    "compiles_for_cpu",
    "decode",
    "dequantize",
    "dequantized_mm",
    "layer_norm",
    "reciprocal",
    "record_amax",
    "rms_norm",
    "scale_from_amax",
    "scaled_mm",
    "swiglu",
    "swiglu_backward",
]

_SMALL = 8192  # elements below which, in eager mode, fewer calls beat faster passes
_PART = 1 << 18  # elements whose float32 values stay in an L2 cache of 2 MiB


def _is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor on a CPU, in eager mode."""
    is_eager = not torch.compiler.is_compiling()
    return is_eager and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def compiles_for_cpu(x: Tensor) -> bool:
    """Whether torch.compile traces an op of a CPU tensor, for which ``opaque.py`` has ops.

    Eager code asks ``torch.compiler.is_compiling()`` first, to save the call.
    """
    return torch.compiler.is_compiling() and x.device.type == "cpu" and not is_sharded(x)


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
    if x.numel() == 0:
        return definition.amax(x, block)
    if len(block) == 3 and block[0] == 1 and _is_plain(x):
        return torch.stack([amax(matrix, block[1:]) for matrix in x])
    is_large = not torch.compiler.is_compiling() and x.numel() > _PART // 4
    if WHOLE not in block or block.count(WHOLE) + block.count(1) < len(block):
        if (tiles := _tiles(x, block)) is None:
            return definition.amax(x, block)
        return _largest(tiles, [1, 3], False) if is_large else tiles.abs().amax((1, 3)).float()
    # In this order: a compiler would guard on the size.
    is_small = not torch.compiler.is_compiling() and x.numel() < _SMALL
    if 1 in block or is_small:
        lines = []
        for dim, extent in enumerate(block):
            if extent == WHOLE:
                lines.append(dim)
        return _largest(x, lines, True) if is_large else x.abs().amax(lines, keepdim=True).float()
    # aminmax reads x once and writes two numbers; in eager mode abs() would write all of |x|.
    # In storage order: aminmax is many times slower over columns.
    in_order = x.t() if x.dim() == 2 and x.stride(0) == 1 else x
    smallest, largest = torch.aminmax(in_order)
    return torch.maximum(largest, -smallest).float().reshape((1,) * len(block))


def _largest(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """``x.abs().amax(dims)`` in float32; of 16-bit numbers several times faster."""
    if x.element_size() != 2 or not _is_plain(x):
        return x.abs().amax(dims, keepdim).float()
    # Magnitudes are ordered as their bits, NaN above inf. In parts, unless a column is reduced.
    bits = x.detach().view(torch.int16)
    whole = x.numel() <= _PART or 0 in dims
    pieces = [bits] if whole else [bits[begin:end] for begin, end in _parts(x, 1)]
    found = [piece.bitwise_and(0x7FFF).amax(dims, keepdim) for piece in pieces]
    return (
        torch.cat(found).view(x.dtype).float() if len(found) > 1 else found[0].view(x.dtype).float()
    )


def _tiles(x: Tensor, block: Block) -> Tensor | None:
    """A matrix as (blocks down, rows, blocks across, columns); None if blocks do not divide it."""
    if len(block) != 2 or WHOLE in block or x.shape[0] % block[0] or x.shape[1] % block[1]:
        return None
    rows, cols = block
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def cast(
    x: Tensor,
    scale: Tensor,
    block: Block,
    dtype: torch.dtype,
    fits: bool = False,
    out: Tensor | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """`definition.cast`, with one float32 buffer in eager mode.

    ``fits`` promises that ``scale`` is a float32 computed from this very ``x``. Then no finite
    value exceeds the format, an infinite one becomes NaN, and the clamp is not needed. ``out``
    receives the data, in ``dtype``; or in bfloat16, for a product that follows at once (`decode`).
    ``buffer`` holds x in float32 meanwhile; for `_cast_parts`.
    """
    is_eager = not torch.compiler.is_compiling()
    if is_eager and buffer is None and x.numel() > _PART and _is_plain(x) and x.dim() in (2, 3):
        out = torch.empty_like(x, dtype=dtype) if out is None else out
        _cast_parts(out, x, scale, block, dtype, fits, torch.empty(_PART, dtype=torch.float32))
        return out
    if not is_eager and out is None and _is_tiled(block) and compiles_for_cpu(x):
        return torch.ops.float8.cpu_cast.default(x, scale, block, dtype, fits, False)
    y = _in_range(x, scale, block, dtype, fits, buffer)
    if out is None:
        return y.to(dtype)
    return out.copy_(y) if out.dtype == dtype else decode(y.to(dtype), out)


def _in_range(
    x: Tensor,
    scale: Tensor,
    block: Block,
    dtype: torch.dtype,
    fits: bool,
    buffer: Tensor | None,
) -> Tensor:
    """``x / scale`` in float32, within the format's range; NaN for what is not finite."""
    is_eager = not torch.compiler.is_compiling()
    # Not `x32 is not x`: under a function mode `float` may return an alias of x.
    is_copy = x.dtype != torch.float32
    if buffer is None or buffer.numel() < x.numel():
        x32 = x.float()
    else:
        is_copy, x32 = True, buffer[: x.numel()].view(x.shape).copy_(x)
    factor = scale.reciprocal() if is_eager and scale.dtype == torch.float32 else reciprocal(scale)
    if block.count(WHOLE) + block.count(1) < len(block):
        y = _scaled(x32, factor, block)
    else:
        y = x32.mul_(factor) if fits and is_copy else x32 * factor
    if fits:
        return y
    largest = torch.finfo(dtype).max
    y = y.clamp_(-largest, largest)
    if is_eager:
        # In eager mode one pass instead of three: 0 * inf is NaN, and adding a zero of x's own
        # sign changes nothing else. Compilers fold the product to 0.
        return y.add_(x32, alpha=0)
    return torch.where(x32.abs() == torch.inf, torch.nan, y)  # isinf() is not vectorised


def cast_decoded(
    x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, fits: bool = False
) -> Tensor:
    """``decode(cast(...))``; compiled, without float8, so that the loop is vectorised."""
    if _is_tiled(block) and compiles_for_cpu(x):
        return torch.ops.float8.cpu_cast.default(x, scale, block, dtype, fits, True)
    # Inductor (2.13) warns of a loop with float16 and bfloat16.
    if (
        not compiles_for_cpu(x)
        or x.dtype == torch.float16
        or dtype not in (torch.float8_e4m3fn, torch.float8_e5m2)
    ):
        out = torch.empty_like(x, dtype=torch.bfloat16) if _is_plain(x) else None
        return decode(cast(x, scale, block, dtype, fits, out))
    return _rounded(_in_range(x, scale, block, dtype, fits, None), dtype).to(torch.bfloat16)


def _rounded(y32: Tensor, dtype: torch.dtype) -> Tensor:
    """``y32.to(dtype).float()`` of numbers in the format's range, by float32 arithmetic alone.

    The split of Veltkamp and Dekker (Numer. Math. 18, 1971) rounds to the nearest number of p bits,
    and what is halfway to even. Subnormal numbers are multiples of the smallest one: adding and
    subtracting a number whose last bit is that large rounds to them. A test holds both for every
    significand. A compiler must not contract products and sums; inductor does not.
    """
    bits, smallest_normal, smallest = 3, 2.0**-14, 2.0**-16  # of E5M2
    if dtype == torch.float8_e4m3fn:
        bits, smallest_normal, smallest = 4, 2.0**-6, 2.0**-9
    high = y32 * (2.0 ** (24 - bits) + 1)
    normal = high + (y32 - high)
    multiples = 1.5 * 2**23 * smallest
    subnormal = ((y32 + multiples) - multiples).copysign(y32)
    return torch.where(y32.abs() < smallest_normal, subnormal, normal)


def _cast_parts(
    out: Tensor,
    x: Tensor,
    scale: Tensor,
    block: Block,
    dtype: torch.dtype,
    fits: bool,
    buffer: Tensor,  # fresh memory for each part would cost more than the passes over it
) -> None:
    """`cast` into ``out``, part by part in storage order."""
    if x.dim() == 3:
        for index, matrix in enumerate(x):
            its = scale[index if len(scale) > 1 else 0]
            _cast_parts(out[index], matrix, its, block[1:], dtype, fits, buffer)
        return
    if _is_column_major(x):
        _cast_parts(out.t(), x.t(), scale.t(), block[::-1], dtype, fits, buffer)
        return
    extent = max(1, block[0])
    for begin, end in _parts(x, extent):
        its = scale if len(scale) == 1 else scale[begin // extent : -(-end // extent)]
        cast(x[begin:end], its, block, dtype, fits, out[begin:end], buffer)


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.dequantize`; right under torch.compile for every block."""
    # A plain tensor by way of bfloat16, which holds float8 exactly: three times faster.
    is_large = not torch.compiler.is_compiling() and data.numel() > _PART // 4
    scale32 = e8m0.as_float32(scale)
    if torch.compiler.is_compiling() and compiles_for_cpu(data) and dtype != torch.float16:
        data = decode(data)
    elif is_large and data.dtype in (*_AS_BFLOAT16, torch.bfloat16) and _is_plain(data):
        is_exact = dtype == torch.bfloat16 and _are_powers_of_two(scale32)
        if data.dim() == 2:
            return _dequantize_parts(data, scale32.to(dtype) if is_exact else scale32, block, dtype)
        data = decode(data)
    return _scaled(data.float(), scale32, block).to(dtype)


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
        decoded = decode(data[begin:end])
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
    if block.count(WHOLE) + block.count(1) == len(block):
        return x32 * factor
    if (tiles := _tiles(x32, block)) is not None:
        return (tiles * factor.unsqueeze(1).unsqueeze(3)).reshape(x32.shape)
    if all(size % extent == 0 for size, extent in zip(x32.shape, block, strict=True)):
        shape: list[int] = []
        for blocks, extent in zip(factor.shape, block, strict=True):
            shape += [blocks] if extent in (WHOLE, 1) else [blocks, 1]
        return (in_blocks(x32, block)[0] * factor.reshape(shape)).reshape(x32.shape)
    # Blocks that do not divide the size: look up each element's factor. Repeating or padding would
    # be simpler, but inductor on a CPU (2.13) splits a loop over `i // extent` into size // extent
    # whole blocks and never runs the remainder (CppScheduling.try_loop_split). A division in
    # float64 is exact for these sizes, and inductor does not recognise it.
    index_dtype = torch.float64 if x32.device.type == "cpu" else torch.int64
    for dim, (size, extent) in enumerate(zip(x32.shape, block, strict=True)):
        if extent not in (WHOLE, 1):
            index = torch.arange(size, dtype=index_dtype, device=x32.device)
            index = torch.div(index, extent, rounding_mode="floor").to(torch.int64)
            factor = factor.index_select(dim, index)
    return x32 * factor


# format -> how far its exponent field is from bfloat16's, the fields that its bits fill there, and
# the power of two between the exponent biases.
_AS_BFLOAT16 = {
    torch.float8_e4m3fn: (4, ~0x780F, 2.0**120),  # s eeee mmm -> s 0000eeee mmm0000
    torch.float8_e5m2: (5, ~0x701F, 2.0**112),  # s eeeee mm -> s 000eeeee mm00000
}
_LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}  # of the finite ones


def decode(data: Tensor, out: Tensor | None = None) -> Tensor:
    """Float8 data as bfloat16, exactly (without any scale).

    Both OCP formats are bit fields of a bfloat16, up to a shift and a power of two. In eager mode
    on a CPU, integer operations on whole tensors are several times faster than torch's elementwise
    conversion. Compiled code converts in registers. A bfloat16 tensor is returned as it is.

    ``out`` receives the result, if it is given.
    """
    if data.dtype == torch.bfloat16:
        return data
    is_eager = not torch.compiler.is_compiling()
    if is_eager and data.numel() < _SMALL:
        return data.to(torch.bfloat16) if out is None else out.copy_(data)
    # In storage order: a compiler would transpose for real.
    is_transposed = data.dim() == 2 and data.stride(0) == 1 and data.stride(1) != 1
    in_order = data.t() if is_transposed else data
    if out is None and not is_eager and compiles_for_cpu(data):
        return torch.ops.float8.cpu_decode.default(in_order, is_transposed)
    if not (is_eager and _can_move_bits(in_order)):
        decoded = in_order.to(torch.bfloat16)
        decoded = decoded.t() if is_transposed else decoded
        return decoded if out is None else out.copy_(decoded)
    shift, fields, power = _AS_BFLOAT16[data.dtype]
    out = torch.empty_like(data, dtype=torch.bfloat16) if out is None else out
    decoded = out.t() if is_transposed else out
    is_large = data.dim() == 2 and data.numel() > _PART
    for begin, end in _parts(in_order, 1) if is_large else [(0, len(in_order))]:
        part = decoded[begin:end]
        bits = part.view(torch.int16).copy_(in_order[begin:end].view(torch.int8))
        bits.bitwise_left_shift_(shift).bitwise_and_(fields)
        part.mul_(power)
    return out


def _can_move_bits(data: Tensor) -> bool:
    """Whether this is a plain finite tensor on a CPU that keeps subnormal numbers."""
    if type(data) is not Tensor or data.device.type != "cpu" or data.dtype not in _AS_BFLOAT16:
        return False
    # The largest codes with either sign: what is above them is infinite or NaN.
    largest = _LARGEST_CODE[data.dtype]
    positive, negative = data.view(torch.int8).max(), data.view(torch.uint8).max()
    if int(positive) > largest or int(negative) > largest + 0x80:
        return False
    # Small codes are subnormal bfloat16s for a moment; torch.set_flush_denormal makes them zero.
    return bool(torch.full((1,), 2.0**-130).mul_(2.0**10) != 0)


def scaled_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """`definition.scaled_mm`; a bfloat16 product of whole tensors has no float32 copy.

    ``out`` receives the result, if it is given.
    """
    by_row = ((WHOLE, WHOLE), (1, WHOLE))
    is_e8m0 = not a_scale.dtype == b_scale.dtype == torch.float32
    if a_block not in by_row or b_block not in by_row or is_e8m0:
        parts = (a_MK, a_scale, b_NK, b_scale, a_block, b_block, bias_N, out_dtype)
        if out is None and compiles_for_cpu(a_MK):
            return torch.ops.float8.cpu_dequantized_mm.default(*parts)
        product = dequantized_mm(*parts)
        return product if out is None else out.copy_(product)
    is_whole = a_block[0] == WHOLE and b_block[0] == WHOLE and bias_N is None
    if out_dtype == torch.bfloat16:
        if out is not None and is_whole:
            product = torch.mm(decode(a_MK), decode(b_NK).t(), out=out)
            return product.mul_((a_scale * b_scale).reshape(()))
        product = decode(a_MK, None) @ decode(b_NK, None).t()
    else:
        product = _float32_mm(_as_float32(a_MK), _as_float32(b_NK).t())
    if is_whole:
        # A 0-dim factor scales in float32 without a float32 copy of the product. Not in place:
        # selective activation checkpointing may have kept the product, and in bfloat16 torch is
        # slower in place. Compiled, in float32 by name: inductor (2.13) rounds the factor to the
        # product's dtype under `emulate_precision_casts`.
        product = product.to(torch.float32) if torch.compiler.is_compiling() else product
        scaled = product * (a_scale * b_scale).reshape(())
    elif out is None and product.dtype != torch.float32 and _is_large(product):
        return _scale_parts(product, a_scale, b_scale, bias_N)
    else:
        product32 = product.to(torch.float32)
        is_own = product.dtype != torch.float32 or out is not None
        scaled = product32.mul_(a_scale) if is_own else product32 * a_scale
        scaled = scaled.mul_(b_scale.t())
        scaled = scaled if bias_N is None else scaled + bias_N.to(torch.float32)
    if out is not None:
        return out.copy_(scaled)
    return scaled if scaled.dtype == out_dtype else scaled.to(out_dtype)


def dequantized_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`scaled_mm` of operands that are dequantised first.

    In bfloat16 the product is rounded before the bias is added, as in `scaled_mm` of rows.
    """
    if out_dtype == torch.bfloat16 and _multiplies_in_bfloat16(a_MK, a_scale, b_scale):
        a = _in_bfloat16(a_MK, a_scale, a_block)
        b = _in_bfloat16(b_NK, b_scale, b_block)
        product = a @ b.t()
        return product if bias_N is None else (product + bias_N).to(out_dtype)
    a = dequantize(a_MK, a_scale, a_block, torch.float32)
    b = dequantize(b_NK, b_scale, b_block, torch.float32)
    product = _float32_mm(a, b.t())
    product = product if bias_N is None else product + bias_N.to(torch.float32)
    return product.to(out_dtype)


def _float32_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, in float32 under autocast too: see ``opaque.py``."""
    if torch.compiler.is_compiling() and not is_sharded(a):
        return torch.ops.float8.float32_mm.default(a, b)
    return a @ b


def _multiplies_in_bfloat16(a_MK: Tensor, *scales: Tensor) -> bool:
    """Whether bfloat16 holds the dequantised operands, and the processor multiplies it faster.

    AMX takes magnitudes below 2^-126 for zero, also those of nn.Linear in bfloat16.

    oneDNN's bfloat16 GEMM for AMX (torch 2.13) reads contractions that are no multiple of 4 beyond
    the end of a row, and multiplies what it finds there by 0: NaN if that is NaN. Multiples of 32,
    the bfloat16 numbers in a row of an AMX tile, leave nothing beyond a row.
    """
    contraction = a_MK.shape[1]
    if not (_is_plain(a_MK) and contraction and contraction % 32 == 0 and _has_matrix_units()):
        return False
    return all([s.dtype != torch.float32 or _are_powers_of_two(s) for s in scales])


def _are_powers_of_two(scale: Tensor) -> bool:
    """Whether no float32 has a bit in its mantissa; of a NaN, False."""
    return not bool(scale.view(torch.int32).bitwise_and(0x7FFFFF).any())


def _in_bfloat16(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """`dequantize` to bfloat16 by powers of two, which is exact."""
    scale = scale if scale.dtype == torch.float32 else e8m0.as_float32(scale)
    factor = scale.to(torch.bfloat16)
    if data.numel() > _PART // 4:
        return _dequantize_parts(data, factor, block, torch.bfloat16)
    return _scaled(decode(data), factor, block)


@functools.cache
def _has_matrix_units() -> bool:
    """Whether the processor has AMX and oneDNN may use it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    return torch.cpu._is_amx_tile_supported() and ("AMX" in limit or limit in ("ALL", "DEFAULT"))


def _as_float32(data: Tensor) -> Tensor:
    """Float8 data in float32, by way of bfloat16: several times faster."""
    return decode(data).to(torch.float32)


def _is_large(product: Tensor) -> bool:
    return not torch.compiler.is_compiling() and product.numel() > _PART and _is_plain(product)


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
