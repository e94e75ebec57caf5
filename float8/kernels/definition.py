"""The definition of every float8 op, in plain PyTorch. This file is not optimised for speed.

Legend: ``data`` float8; ``scale`` float32 or E8M0, ``value = data * scale``; ``block`` the extent
per dimension that shares a scale (-1: whole dimension); ``scale.shape == ceil(shape / block)``.

The casts are defined to the bit, and all backends agree on them, because each step is one correctly
rounded float32 operation that no compiler may rewrite:

1. ``amax = max(|x|)`` over a block, NaN if the block holds a NaN.
2. ``scale = max(amax * float32(1 / max(format)), 2^-126)``, on request rounded up to a power of
   two. A multiplication, not a division: compilers turn division by a constant into one anyway.
   2^-126 is the smallest scale whose reciprocal is finite and neither is subnormal. E8M0 scales
   start at 2^-127, see ``e8m0.py``.
3. ``data = round_to_nearest_even(clamp(float32(x) * float32(1 / scale)))``.

Special values: NaN stays NaN. An infinite x makes a dynamic scale infinite and every product with
the tensor NaN; under a given scale it becomes NaN itself. A cast makes nothing finite infinite or
NaN. Dequantising may: a scale that was rounded up to a power of two can be larger than
``amax / max(format)``, and ``data * scale`` round to the power of two above the largest number of
the dtype. float16's 65504 becomes 256 with scale 256, and 65536 is inf in float16.

Products are defined up to the order of accumulation. See `scaled_mm`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Block, ceil_div, scale_shape
from float8.kernels import e8m0

FLOAT32, E8M0 = ScaleFormat.FLOAT32.value, ScaleFormat.E8M0.value
E8M0_FLOOR = ScaleFormat.E8M0_FLOOR.value
MIN_SCALE = torch.finfo(torch.float32).tiny  # 2^-126


def amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, in float32; 0 for an empty block, NaN if it has one.

    ``block`` has one extent per dimension. The result has shape ``ceil(x.shape / block)``.
    """
    shape = scale_shape(x.shape, block)
    if x.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    blocks, inside = in_blocks(x, block)
    found = blocks.abs()
    for dim in reversed(inside):  # rows first: inductor finds their amaxes where it computes them
        found = found.amax(dim, keepdim=True)
    return found.to(torch.float32).reshape(shape)


def in_blocks(x: Tensor, block: Block) -> tuple[Tensor, list[int]]:
    """x, zero-padded, with each blocked dimension split in two: (blocks, extent).

    Returns the view, and which of its dimensions lie inside a block.
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


def scale_from_amax(amax: Tensor, format_max: float, scale_format: str = FLOAT32) -> Tensor:
    """The dequantisation scale that maps ``amax`` to the format's largest value.

    ``scale = amax / max(format)`` (arXiv 2209.05433, section 3.1, there as its reciprocal), at
    least 2^-126, so that it is positive for a block of zeros. The one function that computes
    scales; every other backend is tested against its bits.

    ``amax`` is float32 of any shape. ``scale_format``, a `ScaleFormat` or its value, says which
    numbers the scale may be. A float32 scale keeps NaN and inf as they are.
    """
    # Literals: torch.compile would guard on globals, and with dynamic shapes make an input of
    # MIN_SCALE.
    if scale_format in ("e8m0", "e8m0_floor"):
        return e8m0.e8m0_scale_from_amax(amax, format_max, scale_format == "e8m0")
    scale = (amax * (1.0 / format_max)).clamp(min=2.0**-126)
    if scale_format == "float32":
        return scale
    # Adding the largest mantissa carries into the exponent unless the mantissa is zero already.
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.maximum(bits.view(torch.float32), scale)  # a NaN overflowed to 0: bring it back


def scale_format_of(power_of_two: bool) -> str:
    """The format of float32 scales that are rounded up to powers of two, or not."""
    return ScaleFormat.POWER_OF_TWO.value if power_of_two else FLOAT32


def smoothing_factors_from_amax(amax: Tensor) -> Tensor:
    """The power of two that brings each amax into (0.5, 1] (arXiv 2409.12517, section 4.4).

    1 for an amax that is infinite, NaN or below 2^-60, which is too small to matter; 2^-60 for one
    above 2^60: products with a weight, or with its inverse, stay in the range of float32. ``amax``
    is float32 >= 0, of any shape.
    """
    bits = (amax.clamp(2.0**-60, 2.0**60).view(torch.int32) + 0x7FFFFF) & 0x7F800000
    factor = (0x7F000000 - bits).view(torch.float32)  # one over the power of two of these bits
    return torch.where((amax >= 2.0**-60) & amax.isfinite(), factor, 1.0)


def reciprocal(scale: Tensor) -> Tensor:
    """``1 / scale`` in float32, correctly rounded, compiled or not."""
    if scale.dtype != torch.float32:
        return e8m0.e8m0_reciprocal(scale)
    # Compilers may emit an approximate float32 division; a float64 one is exact enough that
    # rounding it to float32 gives the correctly rounded quotient.
    return scale.to(torch.float64).reciprocal().to(torch.float32)


def cast_by_scale(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Cast to float8 under given scales: nearest even, saturating, inf becomes NaN.

    ``x`` is float32, bfloat16 or float16, of any shape and strides; ``block`` has one extent per
    dimension. ``scale`` is float32 or E8M0, of shape ``ceil(x.shape / block)``.
    """
    x32, largest = x.to(torch.float32), torch.finfo(dtype).max
    y = (x32 * per_element(reciprocal(scale), x.shape, block)).clamp(-largest, largest)
    return y.masked_fill(x32.isinf(), torch.nan).to(dtype)


def cast_dynamic(
    x: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str = FLOAT32,
) -> tuple[Tensor, Tensor]:
    """`cast_by_scale` under the scales that follow from x's own amaxes: the data and the scale."""
    scale = scale_from_amax(amax(x, block), torch.finfo(dtype).max, scale_format)
    return cast_by_scale(x, scale, block, dtype), scale


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 and rounded once to ``dtype``."""
    scale = e8m0.as_float32(scale)
    return (data.to(torch.float32) * per_element(scale, data.shape, block)).to(dtype)


def per_element(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Each block's scale repeated for its elements; broadcasts to ``shape``."""
    for dim, (size, extent) in enumerate(zip(shape, block, strict=True)):
        if extent not in (WHOLE, 1):
            scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, size)
    return scale


def norm(
    x_MK: Tensor, weight_K: Tensor | None, bias_K: Tensor | None, eps: float, is_centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(x - mean) * rstd * weight + bias`` per row (arXiv 1607.06450, equation 4).

    ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``. Without ``is_centred`` no mean is subtracted, as
    in an RMS norm (arXiv 1910.07467, 4).

    Returns:
        (M, K), mean (M, 1) or None, and rstd (M, 1), all float32.
    """
    x32, mean = x_MK.to(torch.float32), None
    if is_centred:
        mean = x32.mean(1, keepdim=True)
        x32 = x32 - mean
    rstd = torch.rsqrt(x32.square().mean(1, keepdim=True) + eps)
    y32 = x32 * rstd
    y32 = y32 if weight_K is None else y32 * weight_K.to(torch.float32)
    return (y32 if bias_K is None else y32 + bias_K.to(torch.float32)), mean, rstd


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32 (arXiv 2002.05202, equation 5)."""
    return F.silu(gate.to(torch.float32)) * up.to(torch.float32)


def swiglu_gradients(grad_MF: Tensor, gate_MF: Tensor, up_MF: Tensor) -> Tensor:
    """(M, 2 F): the gradients of gate and up, in gate's dtype."""
    grad, gate, up = [x.to(torch.float32) for x in (grad_MF, gate_MF, up_MF)]
    sigmoid = gate.sigmoid()
    grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat([grad_gate, grad * (gate * sigmoid)], dim=1).to(gate_MF.dtype)


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

    The operands are float8, or the same values in bfloat16, with the contraction K last; scales are
    float32 or E8M0. The bias is added in float32 before the result is rounded to ``out_dtype``:
    float32, bfloat16 or float16.

    Where each row of an operand has one scale, the data is multiplied and the scales are applied to
    the product. Float8 values are exact in bfloat16, so a bfloat16 result comes from a bfloat16
    GEMM (float32 accumulation); its product is then rounded once before and once after scaling,
    which float8 hardware does once: up to one bfloat16 ulp apart, nothing when scales are powers of
    two. Other results, and E8M0 scales and those that vary along the contraction, use a float32
    GEMM of dequantised operands. (`cpu.scaled_mm` multiplies these in bfloat16 where that
    holds them exactly and is faster: the same sum in another order.)
    """
    tensorwise, rowwise = (WHOLE, WHOLE), (1, WHOLE)
    is_e8m0 = not a_scale.dtype == b_scale.dtype == torch.float32
    if is_e8m0 or not {a_block, b_block} <= {tensorwise, rowwise}:
        a32 = dequantize(a_MK, a_scale, a_block, torch.float32)
        b32 = dequantize(b_NK, b_scale, b_block, torch.float32)
        out32 = a32 @ b32.t()
    else:
        exact = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
        product32 = (a_MK.to(exact) @ b_NK.to(exact).t()).to(torch.float32)
        if a_block == b_block == tensorwise and bias_N is None:
            out32 = product32 * (a_scale * b_scale)
        else:  # in turn: the product of two scales alone may leave float32's range
            out32 = product32 * a_scale * b_scale.t()
    if bias_N is not None:
        out32 = out32 + bias_N.to(torch.float32)
    return out32.to(out_dtype)
