"""The definition, and the ops of a CPU, have the oracle's bits; products a plain product's error.

Casts and scales are compared bit for bit with a second implementation (``oracle.py``) over shapes,
strides, dtypes, magnitudes from 2^-130 to 2^120 and special values. Products are compared with
float64: the error is at most twice that of the plain product in the same precision.
"""

from __future__ import annotations

import math

import oracle
import pytest
import shapes
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shapes import Case
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.kernels import cpu, definition, e8m0

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL_DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
GRANULARITIES = list(shapes.GRANULARITIES.values())
FLOAT32, POWER_OF_TWO = ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO
EVERY_BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def check(case, dtype, block, scale_format):
    """Every op of one input, by both files."""
    x = case.make()
    before, replay = x.clone(), (case, dtype, block, scale_format)
    amax, scale = oracle.amax(x, block), oracle.scales(x, block, dtype, scale_format)
    codes = oracle.cast(x, scale, block, dtype)
    other = e8m0.as_float32(scale).nan_to_num(1.0, 1.0) * 0.37  # so that something saturates
    under_other = oracle.cast(x, other, block, dtype)
    value = oracle.values(codes, scale, block, dtype).float()
    fits = (scale.dtype == torch.float32,)
    for ops, promise in ((definition, ()), (cpu, fits)):
        name = ops.__name__
        assert_bitwise(ops.amax(x, block), amax, replay, f"{name}.amax")
        found = ops.scale_from_amax(amax, oracle.largest(dtype), scale_format)
        assert_bitwise(found, scale, replay, f"{name}.scale_from_amax")
        data = ops.cast_by_scale(x, scale, block, dtype, *promise)
        assert_bitwise(data, codes, replay, f"{name}.cast_by_scale by its scale")
        found = ops.cast_by_scale(x, other, block, dtype)
        assert_bitwise(found, under_other, replay, f"{name}.cast_by_scale by a given scale")
        for out in shapes.HIGH_PRECISION:
            found = ops.dequantize(codes.view(dtype), scale, block, out)
            assert_bitwise(found, value.to(out), replay, f"{name}.dequantize in {out}")
    decoded = oracle.table(dtype)[codes.long()].to(torch.bfloat16)
    assert_bitwise(cpu.to_bfloat16(data), decoded, replay, "decoded")
    assert_bitwise(x, before, replay, "the input afterwards")


@shapes.pairs(
    # Few elements; more than `cpu._SMALL`, in whole blocks and not; one element, and none.
    shape=((5, 123), (96, 384), (130, 257), (1, 1), (0, 16), (16, 0)),
    special=["zero", *shapes.SPECIALS],
    source=shapes.HIGH_PRECISION,
    fill=shapes.FILLS,
    layout=shapes.LAYOUTS,
    granularity=GRANULARITIES,
    dtype=oracle.DTYPES,
    scale_format=shapes.SCALE_FORMATS,
)
def test_bits_of_the_oracle(shape, special, source, fill, layout, granularity, dtype, scale_format):
    case = Case(shape, source, 0, fill, layout, (special,), seed=1)
    check(case, dtype, granularity.block_of(shape), scale_format)


@settings(max_examples=150)
@given(
    case=shapes.cases(),
    dtype=st.sampled_from(oracle.DTYPES),
    granularity=st.sampled_from(GRANULARITIES),
    scale_format=st.sampled_from(shapes.SCALE_FORMATS),
)
@example(Case((5, 123), fill="ties"), E4M3, Tensorwise(), POWER_OF_TWO)
@example(Case((5, 123), fill="ties", exponent=-3), E5M2, Rowwise(), POWER_OF_TWO)
@example(Case((37, 300), fill="wide", exponent=-130), E4M3, Blockwise(1, 128), FLOAT32)
@example(Case((37, 300), exponent=120, specials=("max",)), E5M2, Blockwise(1, 128), FLOAT32)
@example(Case((40, 64), fill="wide", specials=("inf", "nan")), E5M2, Blockwise(3, 5), FLOAT32)
def test_bits_of_the_oracle_for_any_input(case, dtype, granularity, scale_format):
    check(case, dtype, granularity.block_of(case.shape), scale_format)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((), ()), ((7,), (3,)), ((2, 3, 20), (1, 2, 7)), ((2, 3, 4, 10), (-1, 1, -1, 4))],
)
def test_any_rank_has_its_scales(shape, block):
    check(Case(shape, torch.bfloat16, fill="wide", seed=1), E4M3, block, FLOAT32)


@pytest.mark.cuda
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@ALL_DTYPES
def test_a_gpu_casts_the_same_bits(granularity, dtype):
    case = Case((130, 257), fill="wide", layout="transposed", specials=("inf", "nan"), seed=5)
    x, block = case.make(), granularity.block_of((130, 257))
    codes, scale = definition.cast_dynamic(case.make("cuda"), block, dtype)
    assert_bitwise(scale, oracle.scales(x, block, dtype), case, "scale")
    assert_bitwise(codes, oracle.cast(x, scale.cpu(), block, dtype), case, "codes")
    value = definition.dequantize(codes, scale, block, torch.float32)
    assert_bitwise(value, oracle.values(codes, scale, block).float(), case, "value")


AMAXES = torch.tensor([1e-45, 2.0**-130, 448.0000305, 3.4028235e38, 1.17549435e-38 * 448])


@ALL_DTYPES
@pytest.mark.parametrize("scale_format", shapes.SCALE_FORMATS)
def test_the_scale_of_bfloat16s_with_every_exponent(dtype, scale_format):
    amax = torch.cat([EVERY_BFLOAT16.float().abs().unique()[::5], AMAXES])
    found = definition.scale_from_amax(amax, oracle.largest(dtype), scale_format)
    assert found.dtype == scale_format.dtype
    expected = [oracle.scale_of(value, dtype, scale_format) for value in amax.tolist()]
    assert_bitwise(e8m0.as_float32(found), torch.tensor(expected), dtype)


@ALL_DTYPES
def test_a_cast_rounds_to_nearest_even_and_saturates(dtype):
    ties, largest = oracle.ties(dtype).float(), oracle.largest(dtype)
    up, down = (ties.nextafter(torch.tensor(to)) for to in (math.inf, 0.0))
    codes, below, above, large, special = (
        definition.cast_by_scale(x, torch.ones(1), (-1,), dtype)
        for x in (
            ties,
            down,
            up,
            torch.tensor([largest, 1.01 * largest, -2 * largest, 3.4e38]),
            torch.tensor([math.inf, -math.inf, math.nan, -0.0]),
        )
    )
    assert_bitwise(codes, oracle.encode(ties, dtype), dtype)
    assert (codes.view(torch.uint8) % 2).count_nonzero() == 0
    assert_bitwise(above.double(), oracle.magnitudes(dtype)[1:], dtype)
    assert_bitwise(below.double(), oracle.magnitudes(dtype)[:-1], dtype)
    assert (large.float() / largest).tolist() == [1, 1, -1, 1]
    assert special.float().isnan().tolist() == [True, True, True, False]
    assert special.view(torch.uint8)[3] == (0 if "fnuz" in str(dtype) else 0x80)


# --- products


def operand(case: Case, name: str, dtype: torch.dtype, scale_format: str = FLOAT32):
    """(data, scale, block), cast by the oracle, so that a product is judged alone."""
    x = case.make()
    block = shapes.GRANULARITIES[name].block_of(x.shape)
    codes, scale = oracle.quantize(x, block, dtype, scale_format)
    return codes.view(dtype), scale, block


def assert_product(a, b, bias: Tensor | None, out_dtype: torch.dtype, replay, device="cpu") -> None:
    """The definition's error; on a CPU the same bits, from decoded operands too."""
    (a_data, a_scale, a_block), (b_data, b_scale, b_block) = a, b
    exact = oracle.matmul(a_data, a_scale, a_block, b_data, b_scale, b_block)
    exact = exact if bias is None else exact + bias.double()
    a32, b32 = (oracle.values(*operand).float() for operand in (a, b))
    plain = F.linear(a32, b32, None if bias is None else bias.float()).to(out_dtype)
    parts = [t.to(device) for t in (a_data, a_scale, b_data, b_scale)]
    bias = None if bias is None else bias.to(device)
    rest = (a_block, b_block, bias, out_dtype)
    actual = definition.scaled_mm(*parts, *rest)
    assert actual.dtype == out_dtype
    if exact.isfinite().all():
        assert_error_within_baseline(actual, exact, plain, replay=replay, what="product")
    else:
        assert_bitwise(actual.isfinite(), exact.isfinite(), replay)
    if device == "cpu":
        assert_bitwise(cpu.scaled_mm(*parts, *rest), actual, replay, "on a CPU")
        decoded = cpu.to_bfloat16(a_data), a_scale, cpu.to_bfloat16(b_data), b_scale
        assert_bitwise(cpu.scaled_mm(*decoded, *rest), actual, replay, "decoded")


@pytest.mark.parametrize("device", shapes.DEVICES)
@shapes.pairs(
    sizes=[(17, 150, 21), (64, 256, 136), (5, 123, 7), (16, 1, 1), (0, 8, 8), (8, 8, 0), (8, 0, 5)],
    a_name=list(shapes.GRANULARITIES),
    b_name=list(shapes.GRANULARITIES),
    bias_dtype=[None, torch.float32, torch.bfloat16],
    out_dtype=shapes.HIGH_PRECISION,
    numbers=[
        *(((), (-50, 50), scale_format) for scale_format in shapes.SCALE_FORMATS),
        *((special, (0, -6), FLOAT32) for special in ((), ("inf",), ("nan",), ("max",))),
    ],
)
def test_a_product_of_any_two_granularities(
    sizes, a_name, b_name, bias_dtype, out_dtype, numbers, device
):
    """What is not finite spoils its row of a product, unless it shares a scale, and no other."""
    M, K, N = sizes
    special, exponents, scale_format = numbers
    a_case = Case((M, K), exponent=exponents[0], specials=special, seed=1)
    b_case = Case((N, K), torch.bfloat16, exponents[1], "wide", seed=2)
    a, b = (
        operand(case, name, dtype, scale_format)
        for case, name, dtype in ((a_case, a_name, E5M2), (b_case, b_name, E4M3))
    )
    bias = None if bias_dtype is None else Case((N,), bias_dtype, seed=3).make()
    replay = (a_case, b_case, a_name, b_name, out_dtype, scale_format)
    assert_product(a, b, bias, out_dtype, replay, device)


def test_scales_whose_product_overflows_float32_are_applied_in_turn():
    a = torch.ones(4, 32, dtype=torch.uint8).view(E4M3), torch.full((4, 1), 2.0**70), (1, -1)
    b = torch.ones(5, 32, dtype=torch.uint8).view(E4M3), torch.full((5, 1), 2.0**70), (1, -1)
    assert_product(a, b, None, torch.float32, "32 * 2^-9 * 2^-9 * 2^70 * 2^70 = 2^127")
    out = definition.scaled_mm(*a[:2], *b[:2], a[2], b[2], None, torch.bfloat16)
    assert_bitwise(out, torch.full((4, 5), 2.0**127).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_a_layer_norm_has_the_error_of_torchs(affine, dtype):
    x = (2 + Case((37, 123), torch.float32, seed=7).make()).to(dtype)
    weight, bias = (Case((123,), dtype, seed=seed).make() for seed in (8, 9))
    weight = weight if "weight" in affine else None
    bias = bias if "bias" in affine else None
    y, mean, rstd = definition.norm(x, weight, bias, 1e-5, True)
    exact, plain = (
        F.layer_norm(x.to(d), (123,), *(None if t is None else t.to(d) for t in (weight, bias)))
        for d in (torch.float64, torch.float32)
    )
    assert_error_within_baseline(y, exact, plain)
    wide = x.double()
    assert_error_within_baseline(mean, wide.mean(1, keepdim=True), x.float().mean(1, keepdim=True))
    exact = (wide.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    assert_error_within_baseline(rstd, exact, exact.float(), 4.0)
