"""MXFP4: the bits of the oracle, of torchao and of microxcaling, and when float8 casts keep them.

torchao runs here. microxcaling (github.com/microsoft/microxcaling at 7bc4195) ran outside: the
table has what it returned for one value in a block whose amax is 4, at scales 2^-100, 1 and 2^125::

    specs = MxSpecs()
    specs.update(scale_bits=8, block_size=32, shared_exp_method="max", custom_cuda=False)
    quantize_mx_op(block, specs, elem_format="fp4_e2m1", axes=[-1], round="even")

Both were compared over 650,000 blocks: random ones in three ranges, subnormals, the largest
numbers, zeros, ties at all scales, and random bits. The differences, all theirs:

- torchao 0.18 divides blocks with scale 2^-127 by 2^-126, which halves their values.
- microxcaling drops the sign of some zeros, rounds the float32 just below 0.25 up, and a few of the
  largest numbers of float32 to infinity.
"""

from __future__ import annotations

import math

import mxfp4_oracle
import pytest
import torch
from assertions import assert_bitwise
from shapes import HIGH_PRECISION
from torch import Tensor

from float8 import (
    E4M3,
    E5M2,
    Blockwise,
    Float8Tensor,
    Rowwise,
    ScaleFormat,
    Tensorwise,
)
from float8.kernels import mxfp4

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
QUARTERS = (
    *(0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4),
    *(6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6),
)
ABOVE, BELOW = (0.5, 1, 1.5, 2, 3, 4, 6), (None, 0.5, 1, 1.5, 2, 3, 4)  # of the ties


def next_to(x: float, end: float) -> float:
    """The next float32 in the direction of ``end``."""
    return torch.nextafter(torch.tensor(x), torch.tensor(end)).item()


MICROXCALING = {n / 4: value for n, value in enumerate(QUARTERS)}
for tie, above, below in zip(TIES, ABOVE, BELOW, strict=True):
    MICROXCALING |= {next_to(tie, 9.0): above}
    MICROXCALING |= {next_to(tie, 0.0): below} if below is not None else {}
FILLS = ("random", "wide", "tiny", "huge", "ties", "bits", "zeros")


def made(fill: str, shape: tuple[int, ...] = (64, 256)) -> Tensor:
    """Finite numbers in float32."""
    torch.manual_seed(FILLS.index(fill))
    x, exponent = torch.randn(shape), torch.randint(-140, 125, (*shape[:-1], 1)).double()
    if fill == "wide":
        x = (x * torch.exp2(exponent)).float()
    elif fill in ("tiny", "huge"):
        x = (x * 2.0 ** (-130 if fill == "tiny" else 126)).clamp(-3e38, 3e38)
    elif fill == "ties":
        x = (x * 16).round() / 4 * torch.exp2(exponent.clamp(-120, 120)).float()
    elif fill == "bits":
        x = torch.randint(-(2**31), 2**31, shape).to(torch.int32).view(torch.float32)
        x = torch.where(x.isfinite(), x, 0.0)
    elif fill == "zeros":
        x = -x.sign() * 0
    return x


def codes_of(values: Tensor) -> Tensor:
    """The oracle's codes of E2M1 values."""
    numbers = (values.double().abs().unsqueeze(-1) == mxfp4_oracle.VALUES).int().argmax(-1)
    return (numbers + 8 * values.float().signbit()).to(torch.uint8)


@pytest.mark.parametrize("dtype", HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_codes_scales_and_values_are_the_oracles(fill, dtype):
    largest = min(torch.finfo(dtype).max, 3e38)
    x = made(fill).clamp(-largest, largest).to(dtype)
    values, scale = mxfp4.cast_to_mxfp4(x)
    codes, scale_bytes = mxfp4_oracle.encode(x)
    assert_bitwise(codes_of(values), codes, (fill, dtype), "codes")
    assert_bitwise(scale.view(torch.uint8), scale_bytes, (fill, dtype), "scales")
    assert_bitwise(mxfp4.pack(values), mxfp4_oracle.pack(codes), (fill, dtype), "bytes")
    assert_bitwise(mxfp4.unpack(mxfp4.pack(values)), values, (fill, dtype), "unpacked")
    projected = mxfp4.project(x)
    assert_bitwise(projected, mxfp4_oracle.project(x), (fill, dtype), "values")
    assert_bitwise(mxfp4.project(projected), projected, (fill, dtype), "projected twice")


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchao_has_these_bytes_except_where_the_scale_is_smallest(fill, dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = made(fill).to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    scale, data = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.FLOOR)
    values, own = mxfp4.cast_to_mxfp4(x)
    assert_bitwise(own.view(torch.uint8), scale.view(torch.uint8).reshape(own.shape), fill)
    smallest = own.view(torch.uint8).repeat_interleave(16, -1) == 0
    theirs = data.view(torch.uint8)
    assert_bitwise(mxfp4.pack(values).masked_fill(smallest, 0), theirs.masked_fill(smallest, 0))


@pytest.mark.parametrize("exponent", [-100, 0, 125])
def test_microxcalings_values(exponent):
    for x, value in MICROXCALING.items():
        block = torch.zeros(1, 32)
        block[0, :3] = torch.tensor([4.0, x, -x])
        found = mxfp4.project(torch.ldexp(block, torch.tensor(exponent)))
        found = torch.ldexp(found.double(), torch.tensor(-exponent))
        assert found[0, :3].tolist() == [4.0, value, -value], x


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_makes_a_block_finite(bad):
    x = torch.ones(2, 64)
    x[1, 40] = bad
    values, scale = mxfp4.cast_to_mxfp4(x)
    assert scale.view(torch.uint8).tolist() == [[125, 125], [125, 255]]
    for found in (mxfp4.project(x), values.float()):
        assert found.isnan().nonzero().tolist() == [[1, column] for column in range(32, 64)]


def test_any_strides_and_sizes():
    x = torch.randn(3, 64, 5)
    assert_bitwise(mxfp4.project(x.mT), mxfp4_oracle.project(x.mT.contiguous()))
    values = mxfp4.cast_to_mxfp4(x.mT)[0]
    assert_bitwise(mxfp4.pack(values), mxfp4.pack(values.contiguous()))
    assert mxfp4.project(torch.ones(0, 64)).shape == (0, 64)
    with pytest.raises(RuntimeError, match="40"):
        mxfp4.project(torch.ones(3, 40))


# --- when a cast to float8 keeps the values

E8M0, FLOOR, POW2 = ScaleFormat.E8M0, ScaleFormat.E8M0_FLOOR, ScaleFormat.POWER_OF_TWO
CASTS = [
    *((Blockwise(32, 32), E8M0), (Blockwise(32, 32), FLOOR), (Blockwise(128, 128), POW2)),
    *((Rowwise(), POW2), (Tensorwise(), POW2)),
]


def spread(exponents: int, top: int) -> Tensor:
    """Two blocks of a row with all values of E2M1; the second's scale is 2^exponents smaller."""
    row = torch.cat([mxfp4_oracle.VALUES, -mxfp4_oracle.VALUES]).repeat(2)
    return torch.cat([row * 2.0**top, row * 2.0 ** (top - exponents)]).float()


@pytest.mark.parametrize("top", [-100, 0, 110])
@pytest.mark.parametrize(("granularity", "scale_format"), CASTS)
def test_scales_that_differ_by_2_to_the_14_are_kept_and_no_more(granularity, scale_format, top):
    """The condition of ``Float8LinearConfig.mxfp4_weights``, and the error beyond it."""
    for exponents in range(18):
        x = spread(exponents, top)
        if granularity == Blockwise(32, 32):  # both blocks in one block of the cast
            x = x.view(2, 32)
        x = x.reshape(-1, x.shape[-1])
        for dtype in (E4M3, torch.float8_e4m3fnuz):
            kept = Float8Tensor.from_high_precision(
                x, dtype, granularity, scale_format=scale_format
            )
            error = (kept.dequantize(torch.float32).double() - x.double()).abs().max()
            assert (error == 0) == (exponents <= 14), dtype
            assert error <= 2.0**-18 * x.double().abs().max()


@pytest.mark.parametrize("scale_format", [E8M0, FLOOR])
@pytest.mark.parametrize("fill", FILLS)
def test_blocks_of_1x32_keep_every_value(fill, scale_format):
    x = mxfp4.project(made(fill))
    for dtype in (E4M3, E5M2):
        kept = Float8Tensor.from_high_precision(
            x, dtype, Blockwise(1, 32), scale_format=scale_format
        )
        assert_bitwise(kept.dequantize(torch.float32), x, (fill, dtype))


def test_zeros_beside_any_scale_are_kept():
    x = spread(0, 0)
    x[32:] = 0
    kept = Float8Tensor.from_high_precision(x[None], E4M3, Rowwise(), scale_format=POW2)
    assert_bitwise(kept.dequantize(torch.float32)[0], x)
