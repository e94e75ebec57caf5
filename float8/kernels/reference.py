"""Every float8 op in plain PyTorch: the definition, and the path that runs without float8 hardware.

Legend: ``data`` float8 codes; ``scale`` float32, ``value = data * scale``; ``block`` the extent per
dimension that shares a scale (-1: the whole dimension); ``scale.shape == ceil(shape / block)``.

The casts are defined to the bit, and all backends agree on them, because each step is one correctly
rounded float32 operation that no compiler may rewrite:

1. ``amax = max(|x|)`` over a block, NaN if the block holds a NaN.
2. ``scale = max(amax * float32(1 / max(format)), 2^-126)``, on request rounded up to a power of
   two. A multiplication, not a division: compilers turn division by a constant into one anyway.
   2^-126 is the smallest scale whose reciprocal is finite and neither is subnormal.
3. ``data = round_to_nearest_even(clamp(float32(x) * float32(1 / scale)))``.

Special values: NaN stays NaN; an infinite x makes a dynamic scale infinite and every product with
the tensor NaN; under a given scale it becomes NaN itself. A cast makes nothing finite infinite or
NaN. Dequantising may: a scale that was rounded up to a power of two can be larger than
``amax / max(format)``, and ``data * scale`` round to the power of two above the largest number of
the dtype. float16's 65504 becomes code 256 with scale 256, and 65536 is inf in float16.

Products are defined up to the order of accumulation. See `scaled_mm`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block, ceil_div, scale_shape

MIN_SCALE = torch.finfo(torch.float32).tiny  # 2^-126
_SMALL = 8192  # elements below which, in eager mode, fewer calls beat faster passes


def amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, in float32; 0 for an empty block, NaN if it has one.

    Args:
        x: float tensor of any shape.
        block: one extent per dimension.

    Returns:
        float32 of shape ``ceil(x.shape / block)``.
    """
    if x.numel() == 0:
        return torch.zeros(scale_shape(x.shape, block), dtype=torch.float32, device=x.device)
    # In this order: a compiler would guard on the size.
    is_small = not torch.compiler.is_compiling() and x.numel() < _SMALL
    if block.count(WHOLE) == len(block) and not is_small:
        # aminmax reads x once and writes two numbers; in eager mode abs() would write all of |x|.
        # In storage order: it is many times slower over columns.
        in_order = x.t() if x.dim() == 2 and x.stride(0) == 1 else x
        smallest, largest = torch.aminmax(in_order)
        found = torch.maximum(largest, -smallest).to(torch.float32)
        return found.reshape((1,) * len(block))
    if block.count(WHOLE) + block.count(1) == len(block):
        lines = [dim for dim, extent in enumerate(block) if extent == WHOLE]
        return x.abs().amax(lines, keepdim=True).float()
    shape = scale_shape(x.shape, block)
    tiles, inside = _tiles(x, block)
    return tiles.abs().amax(inside).to(torch.float32).reshape(shape)


def record_amax(current: Tensor, amax: Tensor) -> None:
    """``current = max(current, amax)`` in place: a delayed cast's running maximum, NaN included."""
    torch.maximum(current, amax.reshape(()), out=current)


def _tiles(x: Tensor, block: Block) -> tuple[Tensor, list[int]]:
    """x, zero-padded, with each blocked dimension split in two, (blocks, extent).

    Returns:
        the view, and which of its dimensions lie inside a block.
    """
    padding: list[int] = []
    shape: list[int] = []
    inside: list[int] = []
    for size, extent in zip(x.shape, block, strict=True):
        is_split = extent not in (WHOLE, 1)
        padding.append(-size % extent if is_split else 0)
        shape += [ceil_div(size, extent), extent] if is_split else [size]
        if extent != 1:
            inside.append(len(shape) - 1)
    if any(padding):
        x = F.pad(x, [p for pad in reversed(padding) for p in (0, pad)])
    return x.reshape(shape), inside


def _times(x32: Tensor, factor: Tensor, block: Block, in_place: bool = False) -> Tensor:
    """float32 ``x * factor``, each block by a factor of its own; factor has the shape of a scale.

    ``in_place`` allows x32 to be overwritten: one buffer less in eager mode.
    """
    if block.count(WHOLE) + block.count(1) == len(block):
        return x32.mul_(factor) if in_place else x32 * factor
    if all(size % extent == 0 for size, extent in zip(x32.shape, block, strict=True)):
        shape: list[int] = []
        for blocks, extent in zip(factor.shape, block, strict=True):
            shape += [blocks] if extent in (WHOLE, 1) else [blocks, 1]
        return (_tiles(x32, block)[0] * factor.reshape(shape)).reshape(x32.shape)
    # Blocks that do not divide: look up each element's factor. Repeating or padding would be
    # simpler, but inductor on a CPU (2.13) makes size // extent whole blocks of a loop over
    # `i // extent` and never runs the rest (CppScheduling.try_loop_split), whatever the division is
    # spelt like; one in float64 is exact for these sizes, and inductor does not recognise it.
    index_dtype = torch.float64 if x32.device.type == "cpu" else torch.int64
    for dim, (size, extent) in enumerate(zip(x32.shape, block, strict=True)):
        if extent not in (WHOLE, 1):
            index = torch.arange(size, dtype=index_dtype, device=x32.device)
            index = torch.div(index, extent, rounding_mode="floor").to(torch.int64)
            factor = factor.index_select(dim, index)
    return x32 * factor


def scale_from_amax(amax: Tensor, format_max: float, power_of_two: bool = False) -> Tensor:
    """The dequantisation scale that maps ``amax`` to the format's largest value.

    ``scale = amax / max(format)`` (arXiv 2209.05433, section 3.1, there as its reciprocal), at
    least 2^-126, so that it is positive for a block of zeros. The one function that computes
    scales; every other backend is tested against its bits.

    Args:
        amax: float32, any shape.
        format_max: the largest finite value of the float8 format.
        power_of_two: round the scale up to a power of two, so that nothing saturates.

    Returns:
        float32 of amax's shape; NaN and inf stay what they are.
    """
    # MIN_SCALE as a literal: with dynamic shapes torch.compile would make an input of the global.
    scale = (amax * (1.0 / format_max)).clamp(min=2.0**-126)
    return _round_up_to_power_of_two(scale) if power_of_two else scale


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    # Adding the largest mantissa carries into the exponent unless the mantissa is zero already.
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.maximum(bits.view(torch.float32), scale)  # a NaN overflowed to 0: bring it back


def cast(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, fits: bool = False) -> Tensor:
    """Encode ``x`` in float8: nearest even, saturating.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        scale: float32 of shape ``ceil(x.shape / block)``.
        block: one extent per dimension.
        dtype: the float8 dtype.
        fits: promise that ``scale`` was computed from this very ``x``: then no finite value
            exceeds the format and the clamp is not needed.

    Returns:
        float8 of x's shape.
    """
    x32 = x.float()
    y = _times(x32, reciprocal(scale), block, in_place=fits and x.dtype != torch.float32)
    if not fits:
        largest = torch.finfo(dtype).max
        y = _nan_where_infinite(y.clamp_(-largest, largest), x32)
    return y.to(dtype)


def _nan_where_infinite(y: Tensor, x32: Tensor) -> Tensor:
    """y, which the clamp has made finite, with NaN where x is infinite."""
    if torch.compiler.is_compiling():
        return torch.where(x32.abs() == torch.inf, torch.nan, y)  # isinf() is not vectorised
    # In eager mode one pass instead of three: 0 * inf is NaN, and adding a zero of x's own sign
    # changes nothing else. Compilers fold the product to 0.
    return y.add_(x32, alpha=0)


def reciprocal(scale: Tensor) -> Tensor:
    """``1 / scale`` in float32, correctly rounded, compiled or not."""
    # Compilers may emit an approximate float32 division; a float64 one is exact enough that
    # rounding it to float32 gives the correctly rounded quotient, which is what eager computes.
    if torch.compiler.is_compiling():
        return scale.to(torch.float64).reciprocal().to(torch.float32)
    return scale.reciprocal()


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 and rounded once to ``dtype``."""
    return _times(data.to(torch.float32), scale, block).to(dtype)


# format -> how far its exponent field is from bfloat16's, the fields that a code has there, and the
# power of two between the exponent biases.
_AS_BFLOAT16 = {
    torch.float8_e4m3fn: (4, ~0x780F, 2.0**120),  # s eeee mmm -> s 0000eeee mmm0000
    torch.float8_e5m2: (5, ~0x701F, 2.0**112),  # s eeeee mm -> s 000eeeee mm00000
}
_LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}  # of the finite ones


def decode(data: Tensor) -> Tensor:
    """float8 codes as bfloat16, exactly (without any scale).

    Both OCP formats are bit fields of a bfloat16, up to a shift and a power of two, and integer
    operations on whole tensors are several times faster than torch's elementwise conversion in
    eager mode on a CPU. Compiled code converts in registers. What is bfloat16 already stays so.
    """
    if data.dtype == torch.bfloat16:
        return data
    is_eager = not torch.compiler.is_compiling()
    if is_eager and data.numel() < _SMALL:
        return data.to(torch.bfloat16)
    if data.dim() == 2 and data.stride(0) == 1 and data.stride(1) != 1:
        return decode(data.t()).t()  # in storage order, or a compiler would transpose for real
    if not (is_eager and _decodes_by_bits(data)):
        return data.to(torch.bfloat16)
    shift, fields, power = _AS_BFLOAT16[data.dtype]
    codes = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift)
    return codes.bitwise_and_(fields).view(torch.bfloat16).mul_(power)


def _decodes_by_bits(data: Tensor) -> bool:
    """Whether the bit fields of these codes can be moved: plain finite tensors on a CPU."""
    if type(data) is not Tensor or data.device.type != "cpu" or data.dtype not in _AS_BFLOAT16:
        return False
    # The largest codes with either sign: what is above them is infinite or NaN.
    largest = _LARGEST_CODE[data.dtype]
    positive, negative = data.view(torch.int8).max(), data.view(torch.uint8).max()
    return int(positive) <= largest and int(negative) <= largest + 0x80 and _keeps_subnormals()


def _keeps_subnormals() -> bool:
    # Small codes are subnormal bfloat16s for a moment; torch.set_flush_denormal makes them zero.
    return bool(torch.full((1,), 2.0**-130).mul_(2.0**10) != 0)


def rms_norm(x_MK: Tensor, weight_K: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``x * rstd * weight``, ``rstd = 1 / sqrt(mean(x^2) + eps)`` per row (arXiv 1910.07467, 4).

    Returns:
        (M, K) and rstd (M, 1), both float32.
    """
    x32 = x_MK.to(torch.float32)
    rstd = torch.rsqrt(x32.square().mean(1, keepdim=True) + eps)
    y32 = x32 * rstd
    return (y32 if weight_K is None else y32 * weight_K.to(torch.float32)), rstd


def layer_norm(
    x_MK: Tensor, weight_K: Tensor | None, bias_K: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) * rstd * weight + bias`` per row (arXiv 1607.06450, equation 4).

    ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``.

    Returns:
        (M, K), mean (M, 1) and rstd (M, 1), all float32.
    """
    x32 = x_MK.to(torch.float32)
    mean = x32.mean(1, keepdim=True)
    centred = x32 - mean
    rstd = torch.rsqrt(centred.square().mean(1, keepdim=True) + eps)
    y32 = centred * rstd
    y32 = y32 if weight_K is None else y32 * weight_K.to(torch.float32)
    return (y32 if bias_K is None else y32 + bias_K.to(torch.float32)), mean, rstd


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32 (arXiv 2002.05202, equation 5)."""
    return F.silu(gate.to(torch.float32)) * up.to(torch.float32)


def swiglu_backward(grad_MF: Tensor, gate_MF: Tensor, up_MF: Tensor) -> Tensor:
    """(M, 2 F): the gradients of gate and up, in gate's dtype."""
    grad32, gate32 = grad_MF.to(torch.float32), gate_MF.to(torch.float32)
    sigmoid = gate32.sigmoid()
    grad_gate = grad32 * up_MF.to(torch.float32) * (sigmoid * (1 + gate32 * (1 - sigmoid)))
    return torch.cat([grad_gate, grad32 * (gate32 * sigmoid)], dim=1).to(gate_MF.dtype)


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
    """``(a * a_scale) @ (b * b_scale).T + bias``, accumulated in float32.

    Where each row of an operand has one scale, the codes are multiplied and the scales applied to
    the product. Codes are exact in bfloat16, so a bfloat16 result comes from a bfloat16 GEMM
    (float32 accumulation); its product is then rounded once before and once after scaling, which
    float8 hardware does once: up to one bfloat16 ulp apart, nothing when scales are powers of two.
    Other results, and scales that vary along the contraction, use a float32 GEMM.

    Args:
        a_MK, b_NK: float8, or the codes in bfloat16 (`decode`); the contraction K last.
        a_scale, b_scale: float32, shapes as a_block and b_block say.
        bias_N: added in float32 before the result is rounded, or None.
        out_dtype: float32, bfloat16 or float16.
    """
    by_row = ((WHOLE, WHOLE), (1, WHOLE))
    if a_block not in by_row or b_block not in by_row:
        a = dequantize(a_MK, a_scale, a_block, torch.float32)
        b = dequantize(b_NK, b_scale, b_block, torch.float32)
        return _add_bias(a @ b.t(), bias_N).to(out_dtype)
    if out_dtype == torch.bfloat16:
        product = decode(a_MK) @ decode(b_NK).t()
    else:
        product = a_MK.to(torch.float32) @ b_NK.to(torch.float32).t()
    if a_block[0] == WHOLE and b_block[0] == WHOLE and bias_N is None:
        # A 0-dim factor scales in float32 without a float32 copy of the product. Not in place:
        # selective activation checkpointing may have kept the product.
        scaled = product * (a_scale * b_scale).reshape(())
        return scaled if scaled.dtype == out_dtype else scaled.to(out_dtype)
    # The factors in turn: the product of two scales alone may leave float32's range.
    scaled = product.to(torch.float32) * a_scale
    return _add_bias(scaled.mul_(b_scale.t()), bias_N).to(out_dtype)


def _add_bias(out_MN: Tensor, bias_N: Tensor | None) -> Tensor:
    return out_MN if bias_N is None else out_MN + bias_N.to(torch.float32)
