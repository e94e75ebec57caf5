"""Arithmetic is right: against exact fractions, big integers, and definitions bit by bit."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import compute

SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-127), 3.4e38]
RNG = np.random.default_rng(1)


def float32s(count):
    """Random bits, numbers of one size, and special values."""
    bits = RNG.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    near = RNG.standard_normal(count).astype(np.float32)
    return np.concatenate([bits, near, np.float32(SPECIAL)])


def bits(x):
    return x.view(f"u{x.dtype.itemsize}")


def nearest(exact, dtype):
    """A fraction, rounded once to nearest even."""
    digits, least = {np.float32: (24, -149), np.float64: (53, -1074)}[dtype]
    if exact == 0:
        return dtype(0)
    exponent = math.floor(math.log2(abs(exact))) if abs(exact) > 2.0**-1000 else -1100
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    whole = round(exact / unit)  # Python rounds halves to even
    try:
        return dtype(float(whole * unit))
    except OverflowError:
        return dtype(math.copysign(math.inf, exact))


@pytest.mark.parametrize(("type_", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_fma_rounds_once(type_, dtype):
    a, b = RNG.standard_normal((2, 400)).astype(dtype)
    # Addends that almost cancel the product, and ones far below its last bit.
    c = np.where(np.arange(400) % 2, -a * b, RNG.choice([-1, 1], 400) * dtype(2.0**-60)).astype(
        dtype
    )
    if dtype == np.float32:
        a[:100] *= np.float32(2.0**-70)
        b[:100] *= np.float32(2.0**-70)  # subnormal results
        c[:100] = np.float32(2.0**-149) * RNG.integers(-3, 4, 100).astype(np.float32)
    got = compute(f"fma.rn.{type_} $0, $1, $2, $3;", a, b, c, output=dtype)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    want = np.array([nearest(e, dtype) for e in exact], dtype)
    nonzero = np.array([e != 0 for e in exact])
    assert np.array_equal(bits(got)[nonzero], bits(want)[nonzero])
    assert (got[~nonzero] == 0).all()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_float32_operations_round_once_and_return_one_nan(name):
    a, b = float32s(500), float32s(500)[::-1].copy()
    got = compute(f"{name}.rn.f32 $0, $1, $2;", a, b, output=np.float32)
    with np.errstate(all="ignore"):
        wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name](
            a.astype(np.longdouble), b.astype(np.longdouble)
        )
        want = wide.astype(np.float32)
    want = np.where(np.isnan(want), np.uint32(0x7FFFFFFF), bits(want))
    assert np.array_equal(bits(got), want)


def test_flush_to_zero_keeps_signs():
    a = np.float32([2.0**-127, -(2.0**-127), 2.0**-126, -(2.0**-126)])
    got = compute("add.ftz.f32 $0, $1, $2;", a, np.zeros_like(a) * -1, output=np.float32)
    assert got.tolist() == [0.0, 0.0, 2.0**-126, -(2.0**-126)]
    got = compute("mul.ftz.f32 $0, $1, $2;", a, np.full_like(a, 0.5), output=np.float32)
    assert np.array_equal(np.signbit(got), np.signbit(a)) and not got.any()


def scalar_extremum(name, a, b, propagates, xorsign):
    """PTX's definition of min and max, of two Python floats."""
    sign = math.copysign(1, a) * math.copysign(1, b)
    if xorsign:
        a, b = abs(a), abs(b)
    if math.isnan(a) or math.isnan(b):
        if propagates or (math.isnan(a) and math.isnan(b)):
            return None
        chosen = b if math.isnan(a) else a
    elif a == b == 0:
        signs = [math.copysign(1, a), math.copysign(1, b)]
        chosen = math.copysign(0.0, max(signs) if name == "max" else min(signs))
    else:
        chosen = max(a, b) if name == "max" else min(a, b)
    return math.copysign(chosen, sign) if xorsign else chosen


@pytest.mark.parametrize("modifier", ["", ".NaN", ".NaN.xorsign.abs", ".xorsign.abs"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extrema_of_nans_and_zeros(name, modifier):
    a, b = (np.float32(x).ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    got = compute(f"{name}{modifier}.f32 $0, $1, $2;", a, b, output=np.float32)
    for x, y, g in zip(a.tolist(), b.tolist(), got, strict=True):
        want = scalar_extremum(name, x, y, "NaN" in modifier, "xor" in modifier)
        expected = 0x7FFFFFFF if want is None else struct.unpack("I", struct.pack("f", want))[0]
        assert int(bits(g)) == expected, (x, y)


def scalar_prmt(a, b, choice):
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    out = []
    for i in range(4):
        nibble = choice >> 4 * i & 15
        byte = pool[nibble & 7]
        out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def test_prmt_is_its_definition():
    a, b, c = RNG.integers(0, 1 << 32, (3, 2000), np.uint32)
    got = compute("prmt.b32 $0, $1, $2, $3;", a, b, c, output=np.uint32)
    assert got.tolist() == [scalar_prmt(*map(int, abc)) for abc in zip(a, b, c, strict=True)]


@pytest.mark.parametrize("table", [0xE8, 0x96, 0x01, 0xF0])
def test_lop3_is_its_table(table):
    a, b, c = RNG.integers(0, 1 << 32, (3, 100), np.uint32)
    got = compute(f"lop3.b32 $0, $1, $2, $3, {table};", a, b, c, output=np.uint32)
    for x, y, z, g in zip(*(v.tolist() for v in (a, b, c, got)), strict=True):
        rows = ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1) for i in range(32))
        assert g == sum((table >> row & 1) << i for i, row in enumerate(rows))


@pytest.mark.parametrize("type_", ["s32", "u32", "s64", "u64"])
def test_integer_division_truncates(type_):
    dtype = {"s": "i", "u": "u"}[type_[0]] + str(int(type_[1:]) // 8)
    limits = np.iinfo(dtype)
    a = RNG.integers(limits.min, limits.max, 500, dtype, endpoint=True)
    b = RNG.integers(-40 if limits.min else 1, 40, 500).astype(dtype)
    b[b == 0] = 7
    a[:3], b[:3] = limits.min, [1, 2, 3]
    for name in ("div", "rem"):
        got = compute(f"{name}.{type_} $0, $1, $2;", a, b, output=dtype)
        quotient = [
            abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        rest = [x - y * q for x, y, q in zip(a.tolist(), b.tolist(), quotient, strict=True)]
        assert got.tolist() == (quotient if name == "div" else rest)


def test_products():
    a, b = RNG.integers(-(1 << 31), 1 << 31, (2, 300)).astype(np.int32)
    exact = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert compute("mul.wide.s32 $0, $1, $2;", a, b, output=np.int64).tolist() == exact
    assert compute("mul.hi.s32 $0, $1, $2;", a, b, output=np.int32).tolist() == [
        e >> 32 for e in exact
    ]
    c = RNG.integers(0, 1 << 63, 300).astype(np.uint64)
    wide = [
        (int(x) * int(y) + int(z)) % (1 << 64) for x, y, z in zip(bits(a), bits(b), c, strict=True)
    ]
    assert compute("mad.wide.u32 $0, $1, $2, $3;", a, b, c, output=np.uint64).tolist() == wide
    high = [int(x) * int(y) >> 64 for x, y in zip(c, c[::-1], strict=True)]
    got = compute("mul.hi.u64 $0, $1, $2;", c, c[::-1].copy(), output=np.uint64)
    assert got.tolist() == high


@pytest.mark.parametrize("type_", ["b32", "b64", "s32", "s64", "u16"])
def test_shifts_beyond_the_width(type_):
    size = int(type_[1:]) // 8
    x = RNG.integers(0, 1 << 62, 300).astype(f"u{size}")
    x[::2] |= x.dtype.type(1 << 8 * size - 1)
    n = RNG.integers(0, 100, 300).astype(np.uint32)
    signed = type_[0] == "s"
    got = compute(f"shr.{type_} $0, $1, $2;", x, n, output=x.dtype).tolist()
    value = x.view(f"i{size}").tolist() if signed else x.tolist()
    assert got == [(v >> s) % (1 << 8 * size) for v, s in zip(value, n.tolist(), strict=True)]
    if not signed:
        got = compute(f"shl.b{8 * size} $0, $1, $2;", x, n, output=x.dtype).tolist()
        assert got == [(v << s) % (1 << 8 * size) for v, s in zip(value, n.tolist(), strict=True)]


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_fields(type_):
    size = int(type_[1:]) // 8
    x = RNG.integers(0, 1 << 62, 500).astype(f"u{size}")
    x[::2] |= x.dtype.type(1 << 8 * size - 1)
    start, length = (RNG.integers(0, 70, 500).astype(np.uint32) for _ in range(2))
    got = compute(f"bfe.{type_} $0, $1, $2, $3;", x, start, length, output=x.dtype).tolist()
    for v, p, n, g in zip(x.tolist(), start.tolist(), length.tolist(), got, strict=True):
        top = 8 * size - 1
        sign = type_[0] == "s" and n > 0 and v >> min(p + n - 1, top) & 1
        want = sum(
            (v >> p + i & 1 if i < n and p + i <= top else bool(sign)) << i for i in range(top + 1)
        )
        assert g == want, (v, p, n)
    y = x[::-1].copy()
    got = compute(f"bfi.b{8 * size} $0, $1, $2, $3, $4;", x, y, start, length, output=x.dtype)
    for v, w, p, n, g in zip(*(a.tolist() for a in (x, y, start, length, got)), strict=True):
        mask = ((1 << n) - 1 << p) % (1 << 8 * size)
        assert g == (w & ~mask) | (v << p & mask)


def test_funnel_shift():
    low, high, n = RNG.integers(0, 1 << 32, (3, 200), np.uint32)
    n %= 70
    for side, clamp in (("l", "wrap"), ("r", "wrap"), ("l", "clamp"), ("r", "clamp")):
        got = compute(f"shf.{side}.{clamp}.b32 $0, $1, $2, $3;", low, high, n, output=np.uint32)
        for x, y, s, g in zip(*(a.tolist() for a in (low, high, n, got)), strict=True):
            both, by = y << 32 | x, s & 31 if clamp == "wrap" else min(s, 32)
            assert g == ((both << by) >> 32 if side == "l" else both >> by) % (1 << 32)


def test_bit_counts():
    x = np.concatenate([RNG.integers(0, 1 << 32, 100, np.uint32), np.uint32([0, 1, 1 << 31])])
    assert compute("popc.b32 $0, $1;", x, output=np.uint32).tolist() == [
        int(v).bit_count() for v in x
    ]
    assert compute("clz.b32 $0, $1;", x, output=np.uint32).tolist() == [
        32 - int(v).bit_length() for v in x
    ]
    assert compute("brev.b32 $0, $1;", x, output=np.uint32).tolist() == [
        int(f"{v:032b}"[::-1], 2) for v in x
    ]


def test_comparisons_of_nans():
    a, b = np.float32([1, 1, np.nan, 2]), np.float32([1, 2, 1, np.nan])
    for how, want in {
        "eq": [1, 0, 0, 0], "ne": [0, 1, 0, 0], "lt": [0, 1, 0, 0], "geu": [1, 0, 1, 1],
        "neu": [0, 1, 1, 1], "equ": [1, 0, 1, 1], "nan": [0, 0, 1, 1], "num": [1, 1, 0, 0],
    }.items():  # fmt: skip
        statement = f"setp.{how}.f32 %p1, $1, $2;\nselp.b32 $0, 1, 0, %p1;"
        assert compute(statement, a, b, output=np.int32).tolist() == want, how


def test_packed_halves():
    x, y = RNG.integers(0, 1 << 32, (2, 200), np.uint32)
    got = compute("add.s16x2 $0, $1, $2;", x, y, output=np.uint32)
    assert np.array_equal(got.view(np.uint16), x.view(np.uint16) + y.view(np.uint16))
    x, y, z = RNG.standard_normal((3, 200)).astype(np.float16)
    got = compute(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        *(bits(v).view(np.uint32) for v in (x, y, z)),
        output=np.uint32,
    )
    exact = [
        Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        for a, b, c in zip(x, y, z, strict=True)
    ]
    assert np.array_equal(
        got.view(np.float16), np.array([float(e) for e in exact]).astype(np.float16)
    )


@pytest.mark.parametrize(
    ("opcode", "function", "domain"),
    [
        ("ex2.approx.ftz.f32", np.exp2, (-120, 120)),
        ("lg2.approx.ftz.f32", np.log2, (1e-30, 1e30)),
        ("rsqrt.approx.f32", lambda x: x**-0.5, (1e-30, 1e30)),
    ],
)
def test_approximations_are_the_rounded_function(opcode, function, domain):
    x = RNG.uniform(*domain, 300).astype(np.float32)
    got = compute(f"{opcode} $0, $1;", x, output=np.float32)
    exact = function(x.astype(np.float64))
    assert (np.abs(got - exact) <= 2.0**-24 * np.abs(exact) + 2.0**-149).all()


def test_an_integer_extremum_stops_at_zero():
    a, b = np.int32([-5, -5, 7]), np.int32([-3, 4, 9])
    assert compute("max.relu.s32 $0, $1, $2;", a, b, output=np.int32).tolist() == [0, 4, 9]
    assert compute("min.relu.s32 $0, $1, $2;", a, b, output=np.int32).tolist() == [0, 0, 7]
