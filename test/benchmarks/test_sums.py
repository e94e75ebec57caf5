"""The emulated sum of a tensor core, against one in rational numbers, term by term."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from benchmarks.quality import sums
from float8 import Float8Linear
from float8.kernels.definition import cast_dynamic

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FIELDS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # mantissa bits, bias, the largest finite code


def codes(rows, terms, dtype, seed):
    """Every finite code, subnormal ones and both zeros too."""
    generator = torch.Generator().manual_seed(seed)
    largest = FIELDS[dtype][2]
    found = torch.randint(0, largest + 1, (rows, terms), generator=generator)
    signs = torch.randint(0, 2, (rows, terms), generator=generator) * 0x80
    return (found + signs).to(torch.uint8).view(dtype)


def decoded(code, dtype):
    """Value and exponent; a zero has none."""
    mantissa_bits, bias, _ = FIELDS[dtype]
    field, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    exponent = max(field, 1) - bias
    significand = Fraction(mantissa, 1 << mantissa_bits) + (field > 0)
    value = (-1) ** (code >> 7) * significand * Fraction(2) ** exponent
    return value, exponent if value else -math.inf


def cut(value, exponent, bits):
    quantum = Fraction(2) ** (exponent - bits)
    return math.trunc(value / quantum) * quantum


def exponent_of(value):
    """floor(log2(|value|)); a float64 holds these numbers exactly."""
    assert Fraction(float(value)) == value
    return math.frexp(float(value))[1] - 1 if value else -math.inf


def expected(a, b, bits, every):
    pairs = [
        (decoded(x, a.dtype), decoded(y, b.dtype))
        for x, y in zip(a.view(torch.uint8).tolist(), b.view(torch.uint8).tolist(), strict=True)
    ]
    total, c = 0.0, Fraction(0)
    for first in range(0, len(pairs), 32):
        terms = [(x * y, ex + ey) for (x, ex), (y, ey) in pairs[first : first + 32]]
        top = max([exponent_of(c), *(exponent for _, exponent in terms)])
        if top > -math.inf:
            c = sum((cut(value, top, bits) for value, _ in terms), cut(c, top, bits))
            c = cut(c, exponent_of(c), bits) if c else c
        if every and (first + 32) % every == 0:
            total, c = float(torch.tensor(total) + float(c)), Fraction(0)
    return float(torch.tensor(total) + float(c))


@pytest.mark.parametrize("every", [None, 128])
@pytest.mark.parametrize("bits", [13, 8])
@pytest.mark.parametrize("largest", [0xFF, 0x07], ids=["all", "subnormal"])
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 320), (1, 3, 77), (1, 1, 1)], ids=str)
def test_every_bit_is_that_of_rational_numbers(shape, dtypes, largest, bits, every):
    rows, columns, terms = shape
    a, b = codes(rows, terms, dtypes[0], 1), codes(columns, terms, dtypes[1], 2)
    a = (a.view(torch.uint8) & largest).view(dtypes[0])  # subnormal ones are positive too
    found = sums.product(a, b, bits, every)
    assert found.tolist() == [[expected(x, y, bits, every) for y in b] for x in a]


@pytest.mark.slow  # compiles
def test_the_compiled_loop_has_the_same_bits(monkeypatch):
    a, b = codes(130, 321, E5M2, 3), codes(127, 321, E4M3, 4)
    compiled = sums.product(a, b)
    monkeypatch.setattr(sums, "LARGE", math.inf)
    assert torch.equal(compiled, sums.product(a, b))


def test_a_sum_of_ones_stops_at_two_to_the_bits_plus_one():
    """At 2^14 the quantum is 2, so that a term of 1 counts as zero; promotion prevents it."""
    ones = torch.ones(1, 20_000).to(E4M3)
    assert sums.product(ones, ones).item() == 2**14
    assert sums.product(ones, ones, bits=8).item() == 2**9
    assert sums.product(ones, ones, every=sums.PROMOTED).item() == 20_000


@pytest.mark.parametrize("bits", [13, 5])
def test_both_gradients_are_summed_fast_and_the_output_is_not(bits):
    torch.manual_seed(bits)
    layer = Float8Linear.from_float(torch.nn.Linear(12, 8, bias=False))
    x, g = torch.randn(70, 12, requires_grad=True), torch.randn(70, 8)
    plain = layer(x)
    with sums.fast_gradients(bits):
        output = layer(x)
        output.backward(g)
    assert torch.equal(output, plain)
    whole = (-1, -1)
    (g8, g_scale), (x8, x_scale), (w8, w_scale) = (
        cast_dynamic(z.detach(), whole, dtype)
        for z, dtype in ((g, E5M2), (x, E4M3), (layer.weight, E4M3))
    )
    for found, a, b, scale in (
        (x.grad, g8, w8.t(), g_scale * w_scale),
        (layer.weight.grad, g8.t(), x8.t(), g_scale * x_scale),
    ):
        wanted = torch.tensor(
            [[expected(row, column, bits, None) for column in b] for row in a]
        )  # fmt: skip
        torch.testing.assert_close(found, wanted * scale, rtol=2.0**-22, atol=0.0)
    fast, layer.weight.grad = layer.weight.grad, None
    layer(x).backward(g)
    assert not torch.equal(fast, layer.weight.grad)
