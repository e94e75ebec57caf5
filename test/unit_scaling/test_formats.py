"""Simulated formats round to the right value: every code, tie and dtype; stochastic on average."""

from __future__ import annotations

import math

import pytest
import torch
from assertions import assert_bitwise

from float8.unit_scaling.formats import FPFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NATIVE = {
    torch.float8_e4m3fn: FPFormat(4, 3, "nearest"),
    torch.float8_e5m2: FPFormat(5, 2, "nearest"),
    torch.float8_e4m3fnuz: FPFormat(4, 3, "nearest", variant="fnuz"),
    torch.float8_e5m2fnuz: FPFormat(5, 2, "nearest", variant="fnuz"),
}
ODD = [
    FPFormat(2, 1, "nearest"),
    FPFormat(2, 3, "nearest"),
    FPFormat(3, 2, "nearest"),
    FPFormat(4, 3, "nearest", variant="ieee"),
    FPFormat(5, 2, "nearest", variant="fn"),
    FPFormat(6, 1, "nearest"),
    FPFormat(2, 5, "nearest", variant="fnuz"),
    FPFormat(3, 0, "nearest"),
    FPFormat(2, 0, "nearest", variant="finite"),
    FPFormat(4, 0, "nearest", variant="fn"),
    FPFormat(5, 0, "nearest", variant="fnuz"),
]


def values(fmt: FPFormat) -> list[float]:
    """Every finite value >= 0, from bit fields alone, ascending: the index of each is its code."""
    variant = fmt.variant
    if variant == "ocp":
        finite = {(2, 1), (2, 3), (3, 2)}
        pair = (fmt.exponent_bits, fmt.mantissa_bits)
        variant = "fn" if pair == (4, 3) else "finite" if pair in finite else "ieee"
    bias = 2 ** (fmt.exponent_bits - 1) - (0 if variant == "fnuz" else 1)
    found = []
    for e in range(2**fmt.exponent_bits):
        for m in range(2**fmt.mantissa_bits):
            last = e == 2**fmt.exponent_bits - 1
            if variant == "ieee" and last:
                continue
            if variant == "fn" and last and m == 2**fmt.mantissa_bits - 1:
                continue
            fraction = m / 2**fmt.mantissa_bits
            found.append(
                fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
            )
    return found


def nearest(fmt: FPFormat, x: torch.Tensor) -> torch.Tensor:
    """The nearest of all values, in float64, saturating.

    Of two as near it is the one of even significand: of even code, since consecutive codes
    alternate, save without mantissa bits, where all significands but 0 are 1. IEEE 754-2019,
    section 4.3.1, takes the larger then.
    """
    table = torch.tensor(values(fmt), dtype=torch.float64)
    table = table[table <= torch.finfo(x.dtype).max]
    x64 = x.double()
    distance = (x64.abs().clamp(max=table[-1]).unsqueeze(-1) - table).abs()
    code = torch.arange(len(table)).double()
    order = code % 2 if fmt.mantissa_bits else torch.where(code == 0, 0.0, 2 - code / len(table))
    is_nearest = distance == distance.amin(-1, keepdim=True)
    index = torch.where(is_nearest, order, 3.0).argmin(-1)
    found = torch.copysign(table[index], x64)
    if fmt.variant == "fnuz":
        found = torch.where(found == 0, 0.0, found)
    return torch.where(x64.isfinite(), found, torch.nan)


def inputs(fmt: FPFormat, dtype: torch.dtype) -> torch.Tensor:
    """All values, all ties, the values next to them, far too large and small ones, specials."""
    table = torch.tensor(values(fmt), dtype=torch.float64)
    ties = (table[1:] + table[:-1]) / 2
    most = table[-1].item()
    beyond = torch.tensor([most * 1.01, most * 1.5, most * 100, 65504.0], dtype=torch.float64)
    tiny = table[1] * torch.tensor([0.5, 0.499, 0.501, 1e-6], dtype=torch.float64)
    x = torch.cat([table, ties, beyond, tiny]).to(dtype)
    x = torch.cat([x, torch.nextafter(x, x * 0 + math.inf), torch.nextafter(x, x * 0)])
    random = torch.randn(300, dtype=torch.float64) * torch.logspace(-8, 3, 300, base=4)
    x = torch.cat([x, random.to(dtype)])
    specials = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    return torch.cat([x, -x, specials])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*NATIVE.values(), *ODD], ids=str)
def test_rounding_to_nearest_finds_the_nearest_of_all_values(fmt, dtype):
    x = inputs(fmt, dtype)
    assert_bitwise(fmt.quantise(x), nearest(fmt, x).to(dtype), (fmt, dtype))


@pytest.mark.parametrize("fmt", [*NATIVE.values(), *ODD, FPFormat(5, 10)], ids=str)
def test_a_formats_numbers_are_those_of_its_values(fmt):
    table, significands = values(fmt), 2**fmt.mantissa_bits
    assert fmt.max_absolute_value == table[-1]
    assert fmt.min_absolute_normal == table[significands]
    assert fmt.min_absolute_subnormal == table[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [FPFormat(4, 3), FPFormat(5, 0)], ids=str)
def test_the_mean_of_stochastic_rounding_is_right(fmt, dtype):
    torch.manual_seed(2)
    points = torch.tensor([1.03, -1.09, 0.0007, 300.0, 0.9999, -3.3, 1e-5]).to(dtype)
    draws = 40_000
    rounded = fmt.quantise(points.repeat(draws, 1)).double()
    grid = torch.tensor(values(fmt), dtype=torch.float64)
    above = torch.searchsorted(grid, points.double().abs())
    quantum = grid[above] - grid[above - 1]
    # The mean of n draws from two values one quantum apart: sigma <= quantum / 2 / sqrt(n).
    off = (rounded.mean(0) - points.double()).abs()
    assert (off <= 4 * quantum / 2 / draws**0.5).all(), off / quantum
    assert (rounded.abs() == grid[above]).logical_or(rounded.abs() == grid[above - 1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fwd_quantises_only_forward_and_bwd_only_backward(dtype):
    fmt = FPFormat(4, 3, "nearest")
    x = torch.randn(5, 7).to(dtype).requires_grad_()
    grad = torch.randn(5, 7).to(dtype)
    y = fmt.quantise_fwd(x)
    y.backward(grad)
    assert_bitwise(y, fmt.quantise(x))
    assert_bitwise(x.grad, grad)
    x.grad = None
    y = fmt.quantise_bwd(x)
    y.backward(grad)
    assert_bitwise(y, x)
    assert_bitwise(x.grad, fmt.quantise(grad))
    assert not torch.equal(x.grad, grad)


def test_compiled_quantising_gives_eagers_bits():
    fmt = FPFormat(4, 3, "nearest")
    x = torch.randn(40, 40).mul(100).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x):
        return FPFormat(5, 2, "nearest").quantise_bwd(fmt.quantise_fwd(x))

    grad = torch.randn(40, 40)
    y = both(x)
    y.backward(grad)
    assert_bitwise(y, fmt.quantise(x))
    assert_bitwise(x.grad, FPFormat(5, 2, "nearest").quantise(grad))
