"""Device functions of the Triton kernels: arithmetic, and tiles written in both orientations.

*Arithmetic* functions are equal to those of `float8.kernels.definition`; tests compare the bits. An
amax is passed as the int32 bits of a non-negative float32. Integers order these bits as floats are
ordered, with NaN above infinity. So an integer maximum propagates NaNs, and an atomic one is
deterministic.

*Tiles* whose float8 data is written in both orientations consist of 4 tiles, each of every fourth
row, so that a thread has 4 adjacent rows. It packs the 4 bytes of a column into one int32 in
registers. Shared memory and the transposed store then move 4 bytes at a time instead of single ones
(8 times fewer instructions in the machine code). ``m`` are the first rows of those groups of four;
``first_m4 * 4`` is the tile's first row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 2^-126, as a constexpr: definition.MIN_SCALE.
_MIN_SCALE = tl.constexpr(2.0**-126)

# Conversions are written in PTX, except for AMD GPUs and Triton's interpreter. Triton's own
# conversions leave results in 16-bit registers, and several stores then read parts of them. ptxas
# 12.8 and 12.9 compile that wrongly: one of the stores writes bits of the stack pointer
# (triton#11111). This PTX combines the results of two conversions in one 32-bit register at once,
# and all later instructions are integer arithmetic on it: no ptxas needs to be refused. It also
# rounds once; Triton on sm_89 rounds to float16 first.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

_CONVERT_4 = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
_E4M3 = tl.constexpr(_CONVERT_4.format("e4m3"))
_E5M2 = tl.constexpr(_CONVERT_4.format("e5m2"))

# $0 to $3 are the columns of the rows $4 to $7, a byte per element.
_TRANSPOSE_4X4 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
prmt.b32 c, $6, $7, 0x5140;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
}""")


@triton.constexpr_function
def _is_e4m3(FORMAT):
    if FORMAT not in (tl.float8e4nv, tl.float8e5):
        raise ValueError(f"an NVIDIA GPU converts to float8e4nv and float8e5, not to {FORMAT}")
    return tl.float8e4nv == FORMAT


@triton.jit
def magnitude_bits(x32):
    """The bits of |x|."""
    return x32.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """float32 amaxes -> dequantisation scales; NaN and inf do not change."""
    scale = tl.maximum(amax * (1.0 / FORMAT_MAX), _MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
    if POWER_OF_TWO:
        # Adding the largest mantissa carries into the exponent unless the mantissa is zero.
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, rounded, scale)
    return scale


@triton.jit
def reciprocal(scale, POWER_OF_TWO: tl.constexpr = False):
    """The reciprocal of a scale, correctly rounded, unlike Triton's own division.

    For a power of two it takes three integer operations. A division takes twenty operations, a call
    for rare operands, and more registers.
    """
    if not POWER_OF_TWO:
        return tl.div_rn(1.0, scale)
    bits = scale.to(tl.int32, bitcast=True)
    finite = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, finite, tl.where(bits == 0x7F800000, 0.0, scale))


@triton.jit
def scaled(x32, factor, FORMAT_MAX: tl.constexpr, FITS: tl.constexpr):
    """``x * factor``, clamped for `convert_to_codes`; an infinite x becomes NaN.

    FITS: the factor is computed from x's own amax. Then no finite value exceeds the format after
    rounding, so nothing is clamped. An infinite x makes the factor 0, and the product NaN.
    """
    if FITS:
        return x32 * factor
    return clamped_to_format(without_infinities(x32) * factor, FORMAT_MAX)


@triton.jit
def scaled_4(ys, factor, FORMAT_MAX: tl.constexpr, FITS: tl.constexpr):
    """`scaled` of 4 tiles."""
    return (
        scaled(ys[0], factor, FORMAT_MAX, FITS),
        scaled(ys[1], factor, FORMAT_MAX, FITS),
        scaled(ys[2], factor, FORMAT_MAX, FITS),
        scaled(ys[3], factor, FORMAT_MAX, FITS),
    )


@triton.jit
def clamped_to_format(y, FORMAT_MAX: tl.constexpr):
    """y, in the range of a format where `convert_to_codes` does not saturate."""
    if not PTX:
        y = tl.clamp(y, -FORMAT_MAX, FORMAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def without_infinities(x32):
    """x, where NaN replaces the infinities, in one instruction; signs of zeros are kept."""
    return tl.fma(x32, 0.0, x32)


@triton.jit
def convert_to_codes(y, FORMAT: tl.constexpr):
    """float32 -> float8 codes as uint8: nearest even; an NVIDIA GPU saturates."""
    if PTX:
        # Four adjacent elements at a time: their codes fill one register.
        return tl.inline_asm_elementwise(
            asm=_E4M3 if _is_e4m3(FORMAT) else _E5M2, constraints="=r,f,f,f,f",
            args=[y], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return y.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def _convert_each(ys, FORMAT: tl.constexpr):
    return (
        convert_to_codes(ys[0], FORMAT),
        convert_to_codes(ys[1], FORMAT),
        convert_to_codes(ys[2], FORMAT),
        convert_to_codes(ys[3], FORMAT),
    )


@triton.jit
def convert_4(ys, FORMAT: tl.constexpr):
    """`pack_4` of the codes of 4 float32 tiles."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm=_E4M3 if _is_e4m3(FORMAT) else _E5M2, constraints="=r,f,f,f,f",
            args=[ys[0], ys[1], ys[2], ys[3]], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return pack_4(_convert_each(ys, FORMAT))


@triton.jit
def pack_4(codes):
    """4 uint8 tiles -> int32, the first in the low byte."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm=_TRANSPOSE_4X4, constraints="=r,=r,=r,=r,r,r,r,r",
            args=[codes[0], codes[1], codes[2], codes[3]], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    low = codes[0].to(tl.int32) | (codes[1].to(tl.int32) << 8)
    return low | (codes[2].to(tl.int32) << 16) | (codes[3].to(tl.int32) << 24)


@triton.jit
def unpack_4(packed):
    """The four uint8 tiles of `pack_4`."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm=_TRANSPOSE_4X4, constraints="=r,=r,=r,=r,r,r,r,r",
            args=[packed], dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    return (
        packed.to(tl.uint8),
        (packed >> 8).to(tl.uint8),
        (packed >> 16).to(tl.uint8),
        (packed >> 24).to(tl.uint8),
    )


# --- tiles


@triton.jit
def tile_of_program():
    """The number of a program's tile, and of its matrix in a stack (int64): the last ones first.

    The pass that found the amaxes, or the op that wrote the matrix, ended there. So a cast begins
    with what the L2 cache still holds; from the front it would evict that before it gets there.
    """
    matrix = tl.num_programs(1) - 1 - tl.program_id(1)
    return tl.num_programs(0) - 1 - tl.program_id(0), matrix.to(tl.int64)


@triton.jit
def place_of_tile(pid, K, ROWS_BY_4: tl.constexpr, COLS: tl.constexpr):
    """first_m4, m and k (int64) of tile number pid, counted along the rows of a matrix (M, K)."""
    tiles_k = tl.cdiv(K, COLS)
    first_m4 = (pid // tiles_k).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    return first_m4, m, k


@triton.jit
def to_float32(xs):
    """4 tiles in float32."""
    return xs[0].to(tl.float32), xs[1].to(tl.float32), xs[2].to(tl.float32), xs[3].to(tl.float32)


@triton.jit
def load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k, AGAIN: tl.constexpr = False):
    """Rows m, m + 1, m + 2, m + 3 of x, columns k, each as a tile; 0 outside (M, K).

    All at once, because no load overtakes a store: the pointers might be the same. What is read
    AGAIN leaves the L2 cache first, so that codes do not evict what has not been read again.
    """
    return (
        _load_row(x_ptr, m, k, M, K, stride_m, stride_k, AGAIN),
        _load_row(x_ptr, m + 1, k, M, K, stride_m, stride_k, AGAIN),
        _load_row(x_ptr, m + 2, k, M, K, stride_m, stride_k, AGAIN),
        _load_row(x_ptr, m + 3, k, M, K, stride_m, stride_k, AGAIN),
    )


@triton.jit
def _load_row(x_ptr, m, k, M, K, stride_m, stride_k, AGAIN: tl.constexpr):
    offsets = m[:, None] * stride_m + k[None, :] * stride_k
    inside = (m < M)[:, None] & (k < K)[None, :]
    return tl.load(x_ptr + offsets, inside, 0, eviction_policy="evict_first" if AGAIN else "")


@triton.jit
def transposed_stride(data_t_ptr, P):
    """From row to row of transposed data, in elements: in this form whole words of 16 bytes."""
    if data_t_ptr.dtype.element_ty == tl.int32:
        return (P // 16) * 4
    return P


@triton.jit
def store_packed(out_ptr, packed, first_m4, k, size, group_col, K, P):
    """Store the transpose of a tile of codes, four rows packed into each int32.

    ``out_ptr`` is int32 (K, P / 4), the bytes of (K, P). The tile belongs to ``size`` rows of K
    columns, which become the columns from ``group_col`` on; all three are multiples of 16.
    ``packed`` is int32 (rows / 4, columns), ``first_m4`` a quarter of the tile's first row, and
    ``k``, int64, the tile's columns.
    """
    m4 = first_m4 + tl.arange(0, packed.shape[0])
    inside = (k < K)[:, None] & (m4 < (size // 16) * 4)[None, :]
    row = out_ptr + k[:, None] * transposed_stride(out_ptr, P) + (group_col // 16) * 4
    tl.store(row + m4[None, :], tl.trans(packed), inside)


@triton.jit
def store_4_rows(out_ptr, codes, m, k, M, K, stride):
    """Store 4 tiles of codes row-major, those of rows m, m + 1, m + 2, m + 3 of (M, K)."""
    for i in tl.static_range(4):
        inside = (m + i < M)[:, None] & (k < K)[None, :]
        tl.store(out_ptr + (m + i)[:, None] * stride + k[None, :], codes[i], inside)


@triton.jit
def group_of_tile(
    tile, offs_ptr, E, T, P, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):
    """The group that a tile of rows belongs to; see `cast_groups` for the layout.

    The tiles of a group start at its first row, and tile j of group g has the number ``group_row //
    ROWS + g + j``. So T // ROWS + E numbers are enough for groups of any sizes, and each program
    finds its group without a table. Group g has at least the tile j = 0; a number whose tile starts
    at or beyond the group's end has no rows.

    Args:
        tile: the number.
        offs_ptr: int32 (E,), the ends of the groups. What does not ascend from 0 to T gives wrong
            groups, but no access outside x and the outputs.
        P: the columns of the transposed operand.
        ROWS: rows of a tile.
        ALIGN: starts of groups in the transposed operand are multiples of it.
        GROUPS: E, rounded up to a power of two.

    Returns:
        the group; its first row in x, its rows, and its first column in the transposed operand; the
        tile's first row, counted from the group's. All int64.
    """
    index = tl.arange(0, GROUPS)
    ends = _clamp(tl.load(offs_ptr + index, index < E, 0), T)
    begins = _clamp(tl.load(offs_ptr + index - 1, (index > 0) & (index < E), 0), T)
    is_before = (begins // ROWS + index <= tile) & (index < E)
    group = tl.sum(is_before.to(tl.int32)) - 1
    group_row = tl.max(tl.where(is_before, begins, 0))
    end = _clamp(tl.load(offs_ptr + group), T)
    aligned = (tl.maximum(ends - begins, 0) + (ALIGN - 1)) // ALIGN * ALIGN
    group_col = tl.minimum(tl.sum(tl.where(index < group, aligned, 0)), P)
    size = tl.minimum(tl.maximum(end - group_row, 0), P - group_col)
    tile_row = (tile - group_row // ROWS - group) * ROWS
    return (
        group.to(tl.int64),
        group_row.to(tl.int64),
        size.to(tl.int64),
        group_col.to(tl.int64),
        tile_row.to(tl.int64),
    )


@triton.jit
def _clamp(offset, T):
    return tl.minimum(tl.maximum(offset, 0), T)


@triton.jit
def rows_of_tile(
    tile, matrix, offs_ptr, E, M, P, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):
    """`group_of_tile`; without ``offs_ptr`` the same of a matrix of a stack.

    Where ALIGN is more than ROWS, a group has the tiles that cover the multiple of ALIGN.
    """
    if offs_ptr is None:
        group, group_row, size, group_col, tile_row = matrix, 0, M, 0, tile.to(tl.int64) * ROWS
    else:
        SPLIT: tl.constexpr = max(1, ALIGN // ROWS)
        group, group_row, size, group_col, tile_row = group_of_tile(
            tile // SPLIT, offs_ptr, E, M, P, SPLIT * ROWS, ALIGN, GROUPS
        )
        tile_row += tile % SPLIT * ROWS
    return group, group_row, size, group_col, tile_row


@triton.jit
def amax_bits_of(ys):
    """The bits of the largest magnitude of 4 float32 tiles, element by element."""
    first = tl.maximum(magnitude_bits(ys[0]), magnitude_bits(ys[1]))
    return tl.maximum(first, tl.maximum(magnitude_bits(ys[2]), magnitude_bits(ys[3])))


@triton.jit
def scale_of_tensor(
    given_ptr,  # the scale; None: it follows from partials
    scale_ptr,  # written, or None
    partials_ptr,  # amax bits (PARTIALS,)
    record_ptr,  # int32 bits of a running maximum, or None; written where the scale is computed
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """A scale that is given, or follows from partial amaxes; tile 0 writes it, and the amax."""
    tile, _ = tile_of_program()
    if given_ptr is None:
        amax_bits = tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)))
        scale = scale_from_amax(amax_bits.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
        if record_ptr is not None:
            tl.atomic_max(record_ptr, amax_bits, tile == 0, sem="relaxed")
    else:
        scale = tl.load(given_ptr)
    if scale_ptr is not None:
        tl.store(scale_ptr, scale, tile == 0)
    return scale


@triton.jit
def write_codes(
    ys,  # 4 float32 tiles, `scaled`: of rows m, m + 1, m + 2, m + 3
    data_ptr,  # uint8 (size, K), or None
    data_t_ptr,  # uint8 (K, P), or int32 (K, P / 4), or None
    first_m4,
    k,
    size,
    padded,  # rows that are written to data_t: size, rounded up
    group_col,
    K,
    P,
    FORMAT: tl.constexpr,
    STRIDE_IS_2K: tl.constexpr = False,  # of the rows of data
):
    """Write a tile of codes, row-major and transposed; see `store_packed`.

    Whole words are written transposed if ``data_t_ptr`` is int32; then padded, group_col and P are
    multiples of 16.
    """
    m = (first_m4 + tl.arange(0, ys[0].shape[0])) * 4
    if data_t_ptr is None:
        codes = _convert_each(ys, FORMAT)
    elif data_t_ptr.dtype.element_ty == tl.int32:
        packed = convert_4(ys, FORMAT)
        store_packed(data_t_ptr, packed, first_m4, k.to(tl.int64), padded, group_col, K, P)
        codes = unpack_4(packed)
    else:
        codes = _convert_each(ys, FORMAT)
        for i in tl.static_range(4):
            inside = (m + i < size)[:, None] & (k < K)[None, :]
            tl.store(data_t_ptr + k.to(tl.int64)[None, :] * P + (m + i)[:, None], codes[i], inside)
    if data_ptr is not None:
        store_4_rows(data_ptr, codes, m, k, size, K, 2 * K if STRIDE_IS_2K else K)
