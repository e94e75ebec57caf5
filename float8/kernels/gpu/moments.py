"""Device functions for optimizer states: `float8.kernels.moments` and `.stochastic` in Triton.

A tile is (GROUPS, GROUP): a row is a group, in the registers of a few adjacent threads, so that the
range of a group takes a few shuffles. Lanes outside the matrix contain zeros, which do not affect a
range and stay zeros under every rule.

Linear codes, float32 arithmetic and random bits are the reference's to the bit. Expanded codes are
equal up to the last bits of ``log2`` and ``exp2``, which differ on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from float8.kernels import moments
from float8.kernels.gpu.jit import (
    clamped_to_format,
    convert_to_codes,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
    without_infinities,
)

_INFINITE = tl.constexpr(0x7F800000)  # bits of inf: those of NaN are larger
_E4M3_MAX = tl.constexpr(moments.E4M3_MAX)
_SMALLEST_CODE = tl.constexpr(moments.SMALLEST_CODE)
_LOG2_RANGE = tl.constexpr(moments.LOG2_RANGE)
_MIN_EXPONENT = tl.constexpr(moments.MIN_EXPONENT)
_MAX_EXPONENT = tl.constexpr(moments.MAX_EXPONENT)
_FLOAT16_MAX = tl.constexpr(65504.0)
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _log2(x):
    """In one instruction where the accurate one takes twenty; subnormals are 0.

    The error is at most 2^-22: absolute for x in (0.5, 2), else relative (PTX ISA, ``lg2.approx``).
    Of codes and ratios it makes less than 2^-15, relatively: a code's logarithm, at least -18, is
    multiplied by an exponent of at most 4, and a ratio's by at most 64, where it is above -0.3.
    Codes are at least 2^-4 apart.
    """
    if _IS_INTERPRETED:  # the interpreter has no device library
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def copysign(magnitude, x32):
    """``magnitude`` >= 0 with the sign of x."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x32.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _times_at_most_1(x, y):
    """The smaller of x * y >= 0 and 1, in one instruction; not a NaN."""
    if _IS_INTERPRETED:
        return tl.minimum(x * y, 1.0)
    return tl.inline_asm_elementwise(
        "mul.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def values(codes):
    """Codes as float32; uint8 is E4M3."""
    if codes.dtype == tl.uint8:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32)


@triton.jit
def decode_expanded_tile(codes, scale, exponent):
    """``sign * (|codes| / 448)^exponent * scale``; scale and exponent (GROUPS, 1)."""
    code = values(codes)
    log2_ratio = _log2(tl.abs(code) * (1.0 / _E4M3_MAX))
    return copysign(tl.exp2(log2_ratio * exponent) * scale, code)


@triton.jit
def largest_of(x):
    """float32 (GROUPS,): the largest finite magnitude of each row; 0 if there is none."""
    finite = tl.fma(x, 0.0, tl.abs(x))  # NaN in place of what is not finite
    return tl.maximum(tl.max(finite, 1), 0.0)  # both ignore NaN


@triton.jit
def _smallest_of(bits):
    """float32 (GROUPS,): the smallest nonzero magnitude of each row of bits; inf if all are 0."""
    below = tl.min(bits.to(tl.uint32, bitcast=True) - 1, 1)  # that of a zero is the largest
    return (tl.minimum(below, _INFINITE - 1) + 1).to(tl.float32, bitcast=True)


@triton.jit
def _unfinished_hash(h, between):
    """`_hash` without its last line."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ between
    return (h ^ (h >> 15)) * 0x846CA68B


@triton.jit
def _hash(h, between):
    """`float8.kernels.stochastic._hash` of uint32."""
    h = _unfinished_hash(h, between)
    return h ^ (h >> 16)


@triton.jit
def key_of_seed(number):
    """The hash of an integer, uint32."""
    return _hash(number.to(tl.uint32) + 0x1E3779B9, tl.zeros_like(number).to(tl.uint32))


@triton.jit
def _unfinished_bits(index, seed, offset, GROUP: tl.constexpr):
    """uint32 (GROUPS, GROUP): h of (seed, offset, index); h ^ (h >> 16) are the random bits.

    ``index``, int32 (GROUPS,), is that of the first element of each group. The key is added to it,
    and not to the index of every element.
    """
    keyed = index.to(tl.uint32) + key_of_seed(seed)
    keyed = keyed[:, None] + tl.arange(0, GROUP).to(tl.uint32)[None, :]
    return _unfinished_hash(keyed, key_of_seed(offset))


@triton.jit
def chances_of_tile(index, seed, offset, NUMBER: tl.constexpr, GROUP: tl.constexpr):
    """Uniform in [0, 1), for the state of this number: 23 random bits; see `_unfinished_bits`."""
    h = _unfinished_bits(index, seed + ((NUMBER + 2) << 28), offset, GROUP)
    # The last step of the hash and the exponent of 1.0, in two instructions.
    return ((h & 0x7FFFFF) ^ ((h >> 16) + 0x3F800000)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def encode_linear(
    x, TO_FLOAT16: tl.constexpr, index, seed, offset, NUMBER: tl.constexpr, RANDOM: tl.constexpr
):
    """Codes (GROUPS, GROUP), float16 or uint8, scales (GROUPS,); RANDOM: see `chances_of_tile`."""
    LARGEST: tl.constexpr = _FLOAT16_MAX if TO_FLOAT16 else _E4M3_MAX
    scale = scale_from_amax(largest_of(x), LARGEST, False)
    factor = reciprocal(scale)[:, None]
    if RANDOM:
        j, t, spacing = _split(tl.minimum(tl.abs(x) * factor, LARGEST), TO_FLOAT16)
        is_up = t > chances_of_tile(index, seed, offset, NUMBER, x.shape[1])
        y = tl.fma(j, spacing, tl.where(is_up, spacing, 0.0))
        y = tl.where(x < 0, y * -1.0, y)  # -y of Triton 3.6 is 0 - y: a zero loses its sign
        y = tl.where(magnitude_bits(x) < _INFINITE, y, float("nan"))
    elif TO_FLOAT16:
        y = x * factor
        y = tl.clamp(y, -_FLOAT16_MAX, _FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
        y = tl.where(tl.abs(x) == float("inf"), float("nan"), y)
    if TO_FLOAT16:
        # What would be 0 becomes the smallest subnormal, 2^-24.
        is_lost = (tl.abs(y) <= 2.0**-25) & (x != 0)
        codes = tl.where(is_lost, tl.where(x < 0, -(2.0**-24), 2.0**-24), y).to(tl.float16)
    elif RANDOM:
        codes = convert_to_codes(y, tl.float8e4nv)
    else:
        y = clamped_to_format(without_infinities(x) * factor, _E4M3_MAX)
        codes = convert_to_codes(y, tl.float8e4nv)
    return codes, scale


@triton.jit
def _split(y, TO_FLOAT16: tl.constexpr):
    """`float8.kernels.stochastic._split`."""
    TINY: tl.constexpr = 2.0**-14 if TO_FLOAT16 else 2.0**-6
    BITS: tl.constexpr = 10 if TO_FLOAT16 else 3
    power = tl.maximum(
        (y.to(tl.int32, bitcast=True) & _INFINITE).to(tl.float32, bitcast=True), TINY
    )
    # 2^BITS / power, by the exponents; as uint32, which has no overflow.
    inverse = ((0x7F000000 + (BITS << 23)) - power.to(tl.uint32, bitcast=True)).to(tl.uint32)
    scaled = y * inverse.to(tl.float32, bitcast=True)
    whole = tl.floor(scaled)
    return whole, scaled - whole, power * 2.0**-BITS


@triton.jit
def _on_expanded_grid(y, chance, a):
    """`float8.kernels.stochastic.on_expanded_grid`; a (GROUPS, 1)."""
    j, t, spacing = _split(y, False)
    n1j = j * ((a + 7) * 0.1)
    d1j = j * ((3 - a) * 0.4)
    n2 = (a + 1) * (a + 2) * (1 / 60)
    d2 = (3 - a) * (2 - a) * 0.05
    jj = j * j
    f_t = t * tl.fma(t, tl.fma(t, n2, n1j), jj) * (jj + d1j + d2)
    f_1 = (jj + n1j + n2) * tl.fma(t, tl.fma(t, d2, d1j), jj)
    return tl.fma(j, spacing, tl.where(f_t > chance * f_1, spacing, 0.0))


@triton.jit
def expanded(x, index, seed, offset, NUMBER: tl.constexpr, RANDOM: tl.constexpr):
    """The float32 values that `encode_expanded_tile` rounds, and scales and exponents (GROUPS,)."""
    bits = magnitude_bits(x)
    scale = tl.maximum(largest_of(x), 2.0**-126)
    log2_range = tl.log2(scale) - tl.log2(_smallest_of(bits))
    exponent = log2_range * (1.0 / _LOG2_RANGE)
    exponent = tl.minimum(tl.maximum(exponent, _MIN_EXPONENT), _MAX_EXPONENT)
    factor = reciprocal(scale)
    if RANDOM:
        factor *= 1 + 2.0**-22  # the largest must not come out just below 448
        ratio = _times_at_most_1(tl.abs(x), factor[:, None])
    else:
        ratio = tl.abs(x) * factor[:, None]
    y = tl.exp2(_log2(ratio) * reciprocal(exponent)[:, None]) * _E4M3_MAX
    y = tl.maximum(y, _SMALLEST_CODE)
    if RANDOM:
        chance = chances_of_tile(index, seed, offset, NUMBER, x.shape[1])
        y = _on_expanded_grid(y, chance, exponent[:, None])
    else:
        y = tl.minimum(y, _E4M3_MAX)
    y = tl.fma(x, 0.0, copysign(y, x))  # NaN where x is not finite
    return tl.where(bits == 0, 0.0, y), scale, exponent


@triton.jit
def encode_expanded_tile(x, index, seed, offset, NUMBER: tl.constexpr, RANDOM: tl.constexpr):
    """Codes (GROUPS, GROUP), scales and exponents (GROUPS,); RANDOM: see `chances_of_tile`."""
    y, scale, exponent = expanded(x, index, seed, offset, NUMBER, RANDOM)
    return convert_to_codes(y, tl.float8e4nv), scale, exponent


@triton.jit
def stochastic_round_tile(x, index, seed, offset, DTYPE: tl.constexpr):
    """To a value of bfloat16 or float16, up or down by the bits of (seed, offset, index).

    The result is float32; a number beyond the largest finite one is left for a conversion to round.
    """
    h = _unfinished_bits(index, seed, offset, x.shape[1])
    noise = (h ^ (h >> 16)).to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    IS_FLOAT16: tl.constexpr = DTYPE.is_fp16()
    MASK: tl.constexpr = 0x1FFF if IS_FLOAT16 else 0xFFFF  # the bits of the mantissa that are lost
    LARGEST: tl.constexpr = 65504.0 if IS_FLOAT16 else 3.3895313892515355e38
    if IS_FLOAT16:
        # Below the normal range all values are equally far apart.
        shift = tl.where(magnitude < 2.0**-14, 2.0**-14, 0.0)
        magnitude += shift
    bits = magnitude.to(tl.int32, bitcast=True) + (noise & MASK)
    rounded = (bits & ~MASK).to(tl.float32, bitcast=True)
    if IS_FLOAT16:
        rounded -= shift
    return tl.where(tl.abs(x) < LARGEST, copysign(rounded, x), x)


@triton.jit
def positions(n, N, C, GROUP: tl.constexpr, FLAT: tl.constexpr):
    """Offsets of groups n in a state, (GROUPS, GROUP), and which of them exist.

    Then the offset of each group's first element, (GROUPS,), and the rows and columns, which are
    computed unless FLAT: memory is then one sequence of groups.
    """
    lane = tl.arange(0, GROUP)
    if FLAT:
        start = n * GROUP
        at = start[:, None] + lane[None, :]
        inside = (n < N)[:, None] & (lane < GROUP)[None, :]
        row, col = at, at
    else:
        G = tl.cdiv(C, GROUP)
        row = (n // G)[:, None]
        col = (n % G)[:, None] * GROUP + lane[None, :]
        inside = (n < N)[:, None] & (col < C)
        start = (n // G) * C + (n % G) * GROUP
        at = row * C + col
    return at, inside, start, row, col


# A state's form is that of a `StateMatrix`: dense without a scale, else linear without an exponent,
# else expanded.


@triton.jit
def load_state(codes_ptr, scale_ptr, exponent_ptr, at, inside, n, N):
    """float32 (GROUPS, GROUP) of a state; 0 outside."""
    codes = tl.load(codes_ptr + at, inside, 0)
    if exponent_ptr is not None:
        scale = tl.load(scale_ptr + n, n < N, 1.0)[:, None]
        x = decode_expanded_tile(codes, scale, tl.load(exponent_ptr + n, n < N, 1.0)[:, None])
    elif scale_ptr is not None:
        x = values(codes) * tl.load(scale_ptr + n, n < N, 1.0)[:, None]
    else:
        x = values(codes)
    return x


@triton.jit
def store_state(
    x, codes_ptr, scale_ptr, exponent_ptr, at, inside, n, N,
    index, seed, offset, NUMBER: tl.constexpr, RANDOM: tl.constexpr, amax_ptr=None,
):  # fmt: skip
    """Write a state, float32 (GROUPS, GROUP), in its form; RANDOM rounds it up or down.

    ``amax_ptr``, int32 bits of a running maximum, records the values that linear codes stand for.
    """
    if exponent_ptr is not None:
        codes, scale, exponent = encode_expanded_tile(x, index, seed, offset, NUMBER, RANDOM)
        tl.store(codes_ptr + at, codes, inside)
        tl.store(scale_ptr + n, scale, n < N)
        tl.store(exponent_ptr + n, exponent, n < N)
    elif scale_ptr is not None:
        TO_FLOAT16: tl.constexpr = codes_ptr.dtype.element_ty == tl.float16
        codes, scale = encode_linear(x, TO_FLOAT16, index, seed, offset, NUMBER, RANDOM)
        tl.store(codes_ptr + at, codes, inside)
        tl.store(scale_ptr + n, scale, n < N)
        if amax_ptr is not None:
            largest = tl.max(largest_of(values(codes) * scale[:, None]))
            tl.atomic_max(amax_ptr, magnitude_bits(largest), sem="relaxed")
    else:
        DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
        if RANDOM:
            x = stochastic_round_tile(x, index, seed, offset, DTYPE)
        tl.store(codes_ptr + at, x.to(DTYPE), inside)
