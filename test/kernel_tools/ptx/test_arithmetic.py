"""Arithmetic is right: against exact fractions, big integers, and definitions bit by bit."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import compute

SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-127), 3.4e38]
RNG = np.random.default_rng(1)


def bits(x):
    return x.view(f"u{x.dtype.itemsize}")


# --- integers and bits: by Python's


def prmt(a, b, choice):
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [choice >> 4 * i & 15 for i in range(4)]
    signs = [0xFF if pool[n & 7] & 0x80 else 0 for n in nibbles]
    chosen = (s if n & 8 else pool[n & 7] for n, s in zip(nibbles, signs, strict=True))
    return int.from_bytes(bytes(chosen), "little")


def lop3(table):
    def function(x, y, z):
        rows = ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    return function


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(width, is_signed):
    def function(x, start, length):
        x, top = x % (1 << width), width - 1
        sign = is_signed and length > 0 and x >> min(start + length - 1, top) & 1
        bit = (
            x >> start + i & 1 if i < length and start + i <= top else bool(sign)
            for i in range(width)
        )
        return sum(b << i for i, b in enumerate(bit))

    return function


def halves(function):
    return lambda *values: sum(
        (function(*(v >> at & 0xFFFF for v in values)) & 0xFFFF) << at for at in (0, 16)
    )


# Instruction -> the types of its operands (n: a number of bits), of its result, and its definition.
INTEGERS = {
    "prmt.b32": ("u4 u4 u4", "u4", prmt),
    "mul.wide.s32": ("i4 i4", "i8", lambda a, b: a * b),
    "mul.hi.s32": ("i4 i4", "i4", lambda a, b: a * b >> 32),
    "mul.hi.u64": ("u8 u8", "u8", lambda a, b: a * b >> 64),
    "mad.wide.u32": ("u4 u4 u8", "u8", lambda a, b, c: a * b + c),
    **{f"div.{t}{8 * n}": (f"{k}{n} {k}{n}", f"{k}{n}", quotient)
       for t, k in (("s", "i"), ("u", "u")) for n in (4, 8)},
    **{f"rem.{t}{8 * n}": (f"{k}{n} {k}{n}", f"{k}{n}", lambda a, b: a - b * quotient(a, b))
       for t, k in (("s", "i"), ("u", "u")) for n in (4, 8)},
    **{f"shr.{t}": (f"{k} n", k, lambda a, n: a >> n)
       for t, k in (("b32", "u4"), ("b64", "u8"), ("s32", "i4"), ("s64", "i8"), ("u16", "u2"))},
    **{f"shl.b{8 * n}": (f"u{n} n", f"u{n}", lambda a, n: a << n) for n in (2, 4, 8)},
    **{f"bfe.{t}{8 * n}": (f"u{n} n n", f"u{n}", field(8 * n, t == "s"))
       for t in "us" for n in (4, 8)},
    "shf.l.wrap.b32": ("u4 u4 n", "u4", lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32),
    "shf.r.wrap.b32": ("u4 u4 n", "u4", lambda a, b, n: (b << 32 | a) >> (n & 31)),
    "shf.l.clamp.b32": ("u4 u4 n", "u4", lambda a, b, n: ((b << 32 | a) << min(n, 32)) >> 32),
    "shf.r.clamp.b32": ("u4 u4 n", "u4", lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    "popc.b32": ("u4", "u4", int.bit_count),
    "clz.b32": ("u4", "u4", lambda a: 32 - a.bit_length()),
    "brev.b32": ("u4", "u4", lambda a: int(f"{a:032b}"[::-1], 2)),
    "max.relu.s32": ("i4 i4", "i4", lambda a, b: max(a, b, 0)),
    "min.relu.s32": ("i4 i4", "i4", lambda a, b: max(min(a, b), 0)),
    "add.s16x2": ("u4 u4", "u4", halves(lambda a, b: a + b)),
}  # fmt: skip


def integers(kind, count=400):
    """Random bits, small numbers and limits; none is 0, which divides nothing."""
    if kind == "n":
        return RNG.integers(0, 100, count).astype(np.uint32)
    limits = np.iinfo(kind)
    found = RNG.integers(limits.min, limits.max, count, kind, endpoint=True)
    found[::3] = RNG.integers(-40 if limits.min else 1, 40, len(found[::3])).astype(kind)
    found[:4] = [limits.min, limits.max, 1, limits.max // 2 + 1]
    return np.where(found == 0, found.dtype.type(7), found)


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers(opcode):
    kinds, result, definition = INTEGERS[opcode]
    operands = [RNG.permutation(integers(kind)) for kind in kinds.split()]
    names = ", ".join(f"${i}" for i in range(len(operands) + 1))
    got = compute(f"{opcode} {names};", *operands, output=np.dtype(result))
    want = [definition(*values) for values in zip(*(o.tolist() for o in operands), strict=True)]
    size = 1 << 8 * got.dtype.itemsize
    assert [g % size for g in got.tolist()] == [w % size for w in want]


@pytest.mark.parametrize("table", [0xE8, 0x96, 0x01, 0xF0])
def test_lop3_is_its_table(table):
    a, b, c = RNG.integers(0, 1 << 32, (3, 100), np.uint32)
    got = compute(f"lop3.b32 $0, $1, $2, $3, {table};", a, b, c, output=np.uint32)
    assert got.tolist() == list(map(lop3(table), a.tolist(), b.tolist(), c.tolist()))


# --- floats: by fractions


def nearest(exact, dtype):
    """A fraction, rounded once to nearest even."""
    digits, least, largest = {2: (11, -24, 15), 4: (24, -149, 127), 8: (53, -1074, 1023)}[
        np.dtype(dtype).itemsize
    ]
    if exact == 0:
        return dtype(0)
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(exact)
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    rounded = round(exact / unit) * unit  # Python rounds halves to even
    if abs(rounded) >= Fraction(2) ** (largest + 1):
        return dtype(math.inf if exact > 0 else -math.inf)
    return dtype(math.copysign(float(rounded), -1 if exact < 0 else 1))


FLOATS = {
    "add": (lambda a, b: a + b, np.add),
    "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply),
    "div": (lambda a, b: a / b, np.divide),
    "fma": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_round_once_and_return_one_nan(name, dtype):
    exact, of_specials = FLOATS[name]
    count = 2 + (name == "fma")
    random = RNG.integers(0, 1 << 63, (count, 200), np.uint64, endpoint=True).astype(np.uint64)
    random = (random << np.uint64(1)).view(dtype)[:, :200]
    near = RNG.standard_normal((count, 200)).astype(dtype)
    small = near[:, :100] * dtype(2.0**-70)
    tiny = small.copy()
    if name == "fma":  # addends that almost cancel the product, and far below its last bit
        near[2, ::2], near[2, 1::4] = -(near[0] * near[1])[::2], dtype(2.0**-60)
        tiny[2] = dtype(2.0**-149) * RNG.integers(-3, 4, 100).astype(dtype)
    special = np.resize(np.array(np.meshgrid(SPECIAL, SPECIAL), dtype).reshape(2, -1), (count, 100))
    operands = np.concatenate([random, near, tiny, special], 1).astype(dtype)
    names = ", ".join(f"${i}" for i in range(count + 1))
    type_ = f"f{8 * np.dtype(dtype).itemsize}"
    got = compute(f"{name}.rn.{type_} {names};", *operands, output=dtype)
    nan = {4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[got.dtype.itemsize]
    for values, g in zip(operands.T, got, strict=True):
        finite = np.isfinite(values).all() and not (name == "div" and values[1] == 0)
        fraction = exact(*map(Fraction, values.tolist())) if finite else 0
        with np.errstate(all="ignore"):  # zeros have signs, which fractions lack
            want = nearest(fraction, dtype) if fraction else of_specials(*values)
        expected = nan if np.isnan(want) else int(bits(want))
        assert int(bits(g)) == expected or (not fraction and g == want == 0), values


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
    else:
        chosen = (max if name == "max" else min)(a, b, key=lambda x: (x, math.copysign(1, x)))
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


def test_comparisons_of_nans():
    a, b = np.float32([1, 1, np.nan, 2]), np.float32([1, 2, 1, np.nan])
    for how, want in {
        "eq": [1, 0, 0, 0], "ne": [0, 1, 0, 0], "lt": [0, 1, 0, 0], "geu": [1, 0, 1, 1],
        "neu": [0, 1, 1, 1], "equ": [1, 0, 1, 1], "nan": [0, 0, 1, 1], "num": [1, 1, 0, 0],
    }.items():  # fmt: skip
        statement = f"setp.{how}.f32 %p1, $1, $2;\nselp.b32 $0, 1, 0, %p1;"
        assert compute(statement, a, b, output=np.int32).tolist() == want, how


@pytest.mark.parametrize(("type_", "shift"), [("f16x2", 0), ("bf16x2", 16)])
def test_packed_halves(type_, shift):
    x, y, z = RNG.standard_normal((3, 200)).astype(np.float16 if not shift else np.float32)
    if shift:
        x, y, z = (v.view(np.uint16)[1::2].copy() for v in (x, y, z))  # truncated
    words = [v.view(np.uint16).view(np.uint32) for v in (x, y, z)]
    got = compute(f"fma.rn.{type_} $0, $1, $2, $3;", *words, output=np.uint32).view(np.uint16)
    for a, b, c, g in zip(x, y, z, got, strict=True):
        values = [v if not shift else (np.uint32(v) << 16).view(np.float32) for v in (a, b, c)]
        exact = FLOATS["fma"][0](*(Fraction(float(v)) for v in values))
        if not shift:
            assert g == bits(nearest(exact, np.float16))
            continue
        near = (np.arange(int(g) - 1, int(g) + 2, dtype=np.uint32) << 16).view(np.float32)
        errors = [abs(Fraction(float(v)) - exact) for v in near]
        assert errors[1] <= min(errors)


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
