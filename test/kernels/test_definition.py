"""The definition has the oracle's bits; its products have a plain product's error.

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
from assertions import (
    assert_all_finite,
    assert_bitwise,
    assert_error_within_baseline,
    assert_no_saturation,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shapes import Case
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.kernels import definition, e8m0

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL_DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
BOTH_DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
EVERY_GRANULARITY = pytest.mark.parametrize("name", shapes.GRANULARITIES)
EVERY_DEVICE = pytest.mark.parametrize("device", shapes.DEVICES)
granularities = st.sampled_from(list(shapes.GRANULARITIES.values()))
scale_formats = st.sampled_from(shapes.SCALE_FORMATS)
FLOAT32, POWER_OF_TWO = ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO
formats = st.sampled_from(oracle.DTYPES)


def all_codes(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


# --- dequantising


@EVERY_DEVICE
@ALL_DTYPES
def test_every_code_has_its_value(dtype, device):
    one = torch.ones(1, device=device)
    values = definition.dequantize(all_codes(dtype).to(device), one, (-1,), torch.float32)
    assert_bitwise(values, oracle.table(dtype).to(torch.float32), dtype)


@given(case=shapes.cases(finite=True), dtype=formats, granularity=granularities)
def test_dequantising_rounds_the_product_to_float32_and_then_once(case, dtype, granularity):
    x = case.make()
    block = granularity.block_of(x.shape)
    codes, scale = oracle.quantize(x, block, dtype)
    exact = oracle.values(codes, scale, block, dtype).to(torch.float32)
    for out_dtype in shapes.HIGH_PRECISION:
        actual = definition.dequantize(codes.view(dtype), scale, block, out_dtype)
        assert_bitwise(actual, exact.to(out_dtype), (case, dtype, granularity, out_dtype))


# --- amax and scales


@given(case=shapes.cases(), granularity=granularities)
@example(Case((130, 257), specials=("nan",)), Blockwise(128, 128))
@example(Case((0, 16)), Tensorwise())
@example(Case((16, 0)), Rowwise())
@example(Case((16, 0)), Blockwise(1, 128))
def test_amax_is_the_largest_magnitude_of_each_block(case, granularity):
    x = case.make()
    block = granularity.block_of(x.shape)
    assert_bitwise(definition.amax(x, block), oracle.amax(x, block), (case, granularity))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((), ()),
        ((7,), (-1,)),
        ((7,), (3,)),
        ((2, 3, 20), (-1, -1, -1)),
        ((2, 3, 20), (1, 1, -1)),
        ((2, 3, 20), (1, 2, 7)),
        ((2, 3, 4, 10), (1, 1, 3, 4)),
        ((2, 3, 4, 10), (-1, 1, -1, 4)),
    ],
    ids=str,
)
def test_any_rank_has_its_scales(shape, block):
    case = Case(shape, torch.bfloat16, fill="wide", seed=1)
    x = case.make()
    codes, scale = definition.cast_dynamic(x, block, E4M3)
    assert_bitwise(scale, oracle.scales(x, block, E4M3), case, "scale")
    assert_bitwise(codes, oracle.cast(x, scale, block, E4M3), case, "codes")


AMAXES = [0.0, 1e-45, 2.0**-130, 2.0**-126, 1.0, 448.0, 448.0000305, 3.4028235e38]
AMAXES += [math.inf, math.nan, float(torch.tensor(1.17549435e-38 * 448))]


@BOTH_DTYPES
@pytest.mark.parametrize("scale_format", shapes.SCALE_FORMATS)
@pytest.mark.parametrize("amax", AMAXES)
def test_the_scale_follows_the_formula(amax, dtype, scale_format):
    amax = torch.tensor(amax, dtype=torch.float32)
    actual = definition.scale_from_amax(amax, oracle.largest(dtype), scale_format)
    assert actual.dtype == scale_format.dtype
    expected = oracle.scale_of(amax.item(), dtype, scale_format)
    assert_bitwise(e8m0.as_float32(actual), torch.tensor(expected), (amax, dtype))


@given(
    st.lists(st.floats(0, 2.0**127, width=32, allow_subnormal=True), min_size=1, max_size=50),
    st.sampled_from([E4M3, E5M2]),
)
def test_scales_have_the_oracles_bits(amaxes, dtype):
    for scale_format in shapes.SCALE_FORMATS:
        actual = definition.scale_from_amax(
            torch.tensor(amaxes), oracle.largest(dtype), scale_format
        )
        expected = torch.tensor([oracle.scale_of(a, dtype, scale_format) for a in amaxes])
        assert_bitwise(e8m0.as_float32(actual), expected, (amaxes, dtype, scale_format))


@given(st.floats(2.0**-110, 2.0**127, width=32), st.sampled_from([E4M3, E5M2]))
@example(448.0, E4M3)
@example(448.0 * (1 + 2**-23), E4M3)
@example(57344.0 * 2**40, E5M2)
def test_a_power_of_two_scale_never_saturates_and_wastes_less_than_half(amax, dtype):
    x = torch.tensor([amax, -amax, 0.3 * amax])
    plain = definition.scale_from_amax(x[:1], oracle.largest(dtype))
    scale = definition.scale_from_amax(x[:1], oracle.largest(dtype), POWER_OF_TWO)
    assert math.frexp(scale.item())[0] == 0.5
    assert plain <= scale < 2 * plain
    assert_no_saturation(x, torch.empty(0, dtype=dtype), scale, (amax, dtype))


@BOTH_DTYPES
def test_a_power_of_two_scale_loses_nothing_but_the_cast(dtype):
    # Codes times a power of two come back exactly, which a plain scale does not grant.
    x = oracle.table(dtype)
    x = (x[x.isfinite()] * 2.0**-31).to(torch.float32)
    codes, scale = definition.cast_dynamic(x, (-1,), dtype, POWER_OF_TWO)
    assert_bitwise(definition.dequantize(codes, scale, (-1,), torch.float32), x, dtype)


# --- casting


@settings(max_examples=150)
@given(case=shapes.cases(), dtype=formats, granularity=granularities, scale_format=scale_formats)
@example(Case((5, 123), fill="ties"), E4M3, Tensorwise(), POWER_OF_TWO)
@example(Case((5, 123), fill="ties", exponent=-3), E5M2, Rowwise(), POWER_OF_TWO)
@example(
    Case((130, 257), torch.bfloat16, layout="transposed"), E4M3, Blockwise(128, 128), POWER_OF_TWO
)
@example(Case((37, 300), fill="wide", exponent=-130), E4M3, Blockwise(1, 128), FLOAT32)
@example(Case((37, 300), exponent=120, specials=("max",)), E5M2, Blockwise(1, 128), FLOAT32)
@example(Case((40, 64), fill="wide", specials=("inf", "nan")), E5M2, Blockwise(3, 5), FLOAT32)
def test_a_dynamic_cast_has_the_oracles_bits(case, dtype, granularity, scale_format):
    x = case.make()
    before = x.clone()
    block = granularity.block_of(x.shape)
    codes, scale = definition.cast_dynamic(x, block, dtype, scale_format)
    replay = (case, dtype, granularity, scale_format)
    assert_bitwise(scale, oracle.scales(x, block, dtype, scale_format), replay, "scale")
    assert_bitwise(codes, oracle.cast(x, scale, block, dtype), replay, "codes")
    assert_bitwise(x, before, replay, "the input afterwards")


@settings(max_examples=150)
@given(
    case=shapes.cases(),
    dtype=formats,
    granularity=granularities,
    exponent=st.integers(-126, 127),
    seed=st.integers(0, 99),
)
@example(Case((5, 123), fill="ties"), E4M3, Tensorwise(), 0, 0)
@example(Case((5, 123), fill="codes"), E5M2, Tensorwise(), 0, 0)
@example(Case((5, 123), exponent=120), E4M3, Tensorwise(), -126, 0)  # x / scale overflows float32
def test_a_cast_under_a_given_scale_has_the_oracles_bits(case, dtype, granularity, exponent, seed):
    x = case.make()
    block = granularity.block_of(x.shape)
    shape = oracle.scale_shape(tuple(x.shape), block)
    mantissa = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    scale = (torch.ones(shape) if seed == 0 else mantissa.clamp(max=1.99)) * 2.0**exponent
    codes = definition.cast(x, scale, block, dtype)
    replay = (case, dtype, granularity, exponent, seed)
    assert_bitwise(codes, oracle.cast(x, scale, block, dtype), replay)


@EVERY_DEVICE
@EVERY_GRANULARITY
@BOTH_DTYPES
def test_every_device_casts_the_same_bits(device, name, dtype):
    case = Case((130, 257), fill="wide", layout="transposed", specials=("inf", "nan"), seed=5)
    x, block = case.make(), shapes.GRANULARITIES[name].block_of((130, 257))
    codes, scale = definition.cast_dynamic(case.make(device), block, dtype)
    assert_bitwise(scale, oracle.scales(x, block, dtype), (case, device), "scale")
    assert_bitwise(codes, oracle.cast(x, scale.cpu(), block, dtype), (case, device), "codes")


@ALL_DTYPES
def test_halfway_values_go_to_the_even_code(dtype):
    ties = torch.cat([oracle.ties(dtype), -oracle.ties(dtype)]).to(torch.float32)
    codes = definition.cast(ties, torch.ones(1), (-1,), dtype).view(torch.uint8)
    assert_bitwise(codes, oracle.encode(ties, dtype), dtype)
    assert (codes % 2).count_nonzero() == 0


@ALL_DTYPES
def test_values_just_beside_halfway_go_to_the_nearer_code(dtype):
    ties = oracle.ties(dtype).to(torch.float32)
    up, down = ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0))
    for x, nearer in ((up, oracle.magnitudes(dtype)[1:]), (down, oracle.magnitudes(dtype)[:-1])):
        codes = definition.cast(x, torch.ones(1), (-1,), dtype)
        assert_bitwise(codes.to(torch.float64), nearer, dtype)


@ALL_DTYPES
def test_nothing_finite_becomes_inf_or_nan(dtype):
    largest = oracle.largest(dtype)
    x = torch.tensor([largest, 1.01 * largest, 2 * largest, 1e38, 3.4e38])
    x = torch.cat([x, -x])
    codes = definition.cast(x, torch.ones(1), (-1,), dtype)
    assert_bitwise(codes.to(torch.float32), x.sign() * largest, dtype)


@ALL_DTYPES
@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_becomes_nan_under_a_given_scale(dtype, x):
    codes = definition.cast(torch.tensor([1.0, x, -0.0]), torch.ones(1), (-1,), dtype)
    assert codes.to(torch.float32)[1].isnan()
    assert codes.to(torch.float32)[[0, 2]].tolist() == [1.0, 0.0]


@BOTH_DTYPES
def test_zero_keeps_its_sign(dtype):
    codes = definition.cast(torch.tensor([0.0, -0.0]), torch.ones(1), (-1,), dtype)
    assert codes.view(torch.uint8).tolist() == [0x00, 0x80]


@EVERY_GRANULARITY
@pytest.mark.parametrize("scale_format", shapes.SCALE_FORMATS)
@pytest.mark.parametrize("x_dtype", shapes.HIGH_PRECISION, ids=str)
def test_zeros_have_a_positive_scale_and_stay_zeros(name, scale_format, x_dtype):
    x = Case((37, 300), x_dtype).make()
    x[3] = 0
    x[:, 5:10] = 0
    block = shapes.GRANULARITIES[name].block_of(x.shape)
    for zeros in (x, torch.zeros_like(x)):
        codes, scale = definition.cast_dynamic(zeros, block, E4M3, scale_format)
        assert (e8m0.as_float32(scale) > 0).all()
        assert_all_finite(e8m0.as_float32(scale), name)
        value = definition.dequantize(codes, scale, block, torch.float32)
        assert_all_finite(value, name)
        assert value[zeros == 0].count_nonzero() == 0


@BOTH_DTYPES
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 2.0**-126, 2.0**-120])
def test_an_amax_below_the_smallest_scale_is_still_cast(amax, dtype):
    x = torch.tensor([[amax, -amax, amax / 2, 0.0]])
    codes, scale = definition.cast_dynamic(x, (-1, -1), dtype)
    assert_bitwise(codes, oracle.cast(x, scale, (-1, -1), dtype), (amax, dtype))
    value = definition.dequantize(codes, scale, (-1, -1), torch.float32)
    assert_all_finite(value, amax)
    # At most half a step of the format, and half a step of float32's own subnormals.
    steps = oracle.spread(scale, (1, 1), (-1, -1)).double() * float(oracle.magnitudes(dtype)[1])
    half = torch.maximum(steps, x.double().abs() * 2.0 ** -oracle.BITS[dtype].mantissa) / 2
    assert ((value.double() - x.double()).abs() <= half * 1.001 + 2.0**-149).all()


@EVERY_GRANULARITY
@pytest.mark.parametrize("special", ["inf", "negative_inf", "nan"])
def test_what_is_not_finite_is_seen_in_its_own_block_and_nowhere_else(name, special):
    case = Case((37, 300), torch.bfloat16, specials=(special,), seed=3)
    x = case.make()
    block = shapes.GRANULARITIES[name].block_of(x.shape)
    codes, scale = definition.cast_dynamic(x, block, E4M3)
    value = definition.dequantize(codes, scale, block, torch.float32)
    spoilt = ~oracle.spread(oracle.amax(x, block), tuple(x.shape), block).isfinite()
    assert spoilt.any()
    assert_bitwise(value.isnan(), spoilt, (case, name))


# --- products


def operand(case: Case, name: str, dtype: torch.dtype, scale_format: str = FLOAT32):
    """(data, scale, block), cast by the oracle, so that a product is judged alone."""
    x = case.make()
    block = shapes.GRANULARITIES[name].block_of(x.shape)
    codes, scale = oracle.quantize(x, block, dtype, scale_format)
    return codes.view(dtype), scale, block


def assert_product(a, b, bias: Tensor | None, out_dtype: torch.dtype, replay, device="cpu") -> None:
    (a_data, a_scale, a_block), (b_data, b_scale, b_block) = a, b
    exact = oracle.matmul(a_data, a_scale, a_block, b_data, b_scale, b_block)
    exact = exact if bias is None else exact + bias.double()
    a32, b32 = (oracle.values(*operand).float() for operand in (a, b))
    plain = F.linear(a32, b32, None if bias is None else bias.float()).to(out_dtype)
    parts = [t.to(device) for t in (a_data, a_scale, b_data, b_scale)]
    bias = None if bias is None else bias.to(device)
    actual = definition.scaled_mm(*parts, a_block, b_block, bias, out_dtype)
    assert actual.dtype == out_dtype
    assert_error_within_baseline(actual, exact, plain, replay=replay, what="product")


@shapes.pairs(
    a_name=list(shapes.GRANULARITIES),
    b_name=list(shapes.GRANULARITIES),
    out_dtype=shapes.HIGH_PRECISION,
    with_bias=[False, True],
)
def test_a_product_of_any_two_granularities(a_name, b_name, out_dtype, with_bias):
    a_case, b_case = Case((17, 150), seed=1), Case((21, 150), seed=2, exponent=-6)
    a, b = operand(a_case, a_name, E4M3), operand(b_case, b_name, E5M2)
    bias = Case((21,), out_dtype, seed=3).make() if with_bias else None
    assert_product(a, b, bias, out_dtype, (a_case, b_case, a_name, b_name, out_dtype))


@EVERY_DEVICE
@shapes.pairs(
    sizes=[(5, 123, 7), (1, 16, 16), (16, 1, 1), (1, 1, 1), (0, 16, 8), (8, 16, 0), (8, 0, 5)],
    names=[("tensorwise", "tensorwise"), ("rowwise", "1x32")],
    with_bias=[False, True],
    out_dtype=[torch.float32, torch.bfloat16],
)
def test_a_product_of_odd_sizes(sizes, names, with_bias, out_dtype, device):
    M, K, N = sizes
    a_case, b_case = Case((M, K), seed=1), Case((N, K), seed=2)
    a, b = operand(a_case, names[0], E4M3), operand(b_case, names[1], E4M3)
    bias = Case((N,), seed=3).make() if with_bias else None
    assert_product(a, b, bias, out_dtype, (a_case, b_case, names), device)


@settings(max_examples=60)
@given(
    M=st.integers(0, 20),
    K=st.integers(0, 60),
    N=st.integers(0, 20),
    names=st.tuples(*[st.sampled_from(list(shapes.GRANULARITIES))] * 2),
    exponents=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
    fill=st.sampled_from(["normal", "wide", "zeros"]),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale_format=scale_formats,
)
def test_a_product_of_any_sizes_and_magnitudes(
    M, K, N, names, exponents, fill, out_dtype, scale_format
):
    a_case, b_case = Case((M, K), exponent=exponents[0]), Case((N, K), torch.bfloat16, exponents[1])
    b_case = Case((N, K), torch.bfloat16, exponents[1], fill, seed=1)
    a = operand(a_case, names[0], E5M2, scale_format)
    b = operand(b_case, names[1], E4M3, scale_format)
    assert_product(a, b, None, out_dtype, (a_case, b_case, names, out_dtype, scale_format))


@pytest.mark.parametrize("names", [("rowwise", "rowwise"), ("rowwise", "tensorwise")], ids=str)
def test_power_of_two_scales_cost_a_bfloat16_product_nothing(names):
    # Scaling by powers of two is exact, so one rounding remains: that of the float32 sum.
    a = operand(Case((16, 64), seed=1), names[0], E4M3, POWER_OF_TWO)
    b = operand(Case((16, 64), seed=2), names[1], E4M3, POWER_OF_TWO)
    actual = definition.scaled_mm(a[0], a[1], b[0], b[1], a[2], b[2], None, torch.bfloat16)
    exact = oracle.matmul(*a[:2], a[2], *b[:2], b[2])
    # K = 64 products of 8-bit significands are exact in float64, and in float32 up to its rounding.
    ulp = torch.exp2(exact.abs().log2().floor() - 7)
    assert ((actual.double() - exact).abs() <= ulp * 0.501).all()


def test_scales_whose_product_overflows_float32_are_applied_in_turn():
    a = torch.ones(4, 32, dtype=torch.uint8).view(E4M3), torch.full((4, 1), 2.0**70), (1, -1)
    b = torch.ones(5, 32, dtype=torch.uint8).view(E4M3), torch.full((5, 1), 2.0**70), (1, -1)
    assert_product(a, b, None, torch.float32, "32 * 2^-9 * 2^-9 * 2^70 * 2^70 = 2^127")
    out = definition.scaled_mm(*a[:2], *b[:2], a[2], b[2], None, torch.bfloat16)
    assert_bitwise(out, torch.full((4, 5), 2.0**127).bfloat16())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("special", ["inf", "nan"])
def test_what_is_not_finite_spoils_its_row_of_a_product_and_no_other(out_dtype, special):
    x = Case((6, 32), seed=1).make()
    x[2, 7] = math.inf if special == "inf" else math.nan
    codes, scale = definition.cast_dynamic(x, (1, -1), E4M3)
    w, w_scale, w_block = operand(Case((5, 32), seed=2), "tensorwise", E4M3)
    out = definition.scaled_mm(codes, scale, w, w_scale, (1, -1), w_block, None, out_dtype)
    assert out[2].isnan().all()
    assert_all_finite(out[[0, 1, 3, 4, 5]])


def test_a_product_is_the_same_run_after_run():
    a, b = operand(Case((33, 70)), "rowwise", E4M3), operand(Case((9, 70)), "rowwise", E4M3)
    runs = [
        definition.scaled_mm(a[0], a[1], b[0], b[1], a[2], b[2], None, torch.bfloat16)
        for _ in range(3)
    ]
    assert_bitwise(runs[1], runs[0])
    assert_bitwise(runs[2], runs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_a_layer_norm_has_the_error_of_torchs(affine, dtype):
    x = (2 + Case((37, 123), torch.float32, seed=7).make()).to(dtype)
    weight, bias = (Case((123,), dtype, seed=seed).make() for seed in (8, 9))
    weight = weight if "weight" in affine else None
    bias = bias if "bias" in affine else None
    y, mean, rstd = definition.layer_norm(x, weight, bias, 1e-5)
    w, b = (None if t is None else t.double() for t in (weight, bias))
    exact = F.layer_norm(x.double(), (123,), w, b, 1e-5)
    w, b = (None if t is None else t.float() for t in (weight, bias))
    assert_error_within_baseline(y, exact, F.layer_norm(x.float(), (123,), w, b, 1e-5))
    wide = x.double()
    assert_error_within_baseline(mean, wide.mean(1, keepdim=True), x.float().mean(1, keepdim=True))
    exact = (wide.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    assert_error_within_baseline(rstd, exact, exact.float(), 4.0)


def test_dequantising_with_a_power_of_two_scale_may_overflow_where_the_cast_did_not():
    """What the docstring of the file says of float16's largest number."""
    x = torch.full((1, 16), 65504.0, dtype=torch.float16)
    amax = definition.amax(x, (-1, -1))
    for scale_format, finite in ((POWER_OF_TWO, False), (FLOAT32, True)):
        scale = definition.scale_from_amax(amax, 448.0, scale_format)
        data = definition.cast(x, scale, (-1, -1), torch.float8_e4m3fn)
        assert bool(data.float().isfinite().all())
        plain = definition.dequantize(data, scale, (-1, -1), torch.float16)
        assert bool(plain.isfinite().all()) is finite
