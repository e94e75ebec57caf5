"""The ops as a CPU runs them: compiled, with AMX and in parts.

That their bits are the oracle's is tested in ``test_definition.py``.
"""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import shapes
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from shapes import Case

from benchmarks.measuring.memory import Allocations
from float8.kernels import cpu, definition, e8m0, plain

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL_DTYPES = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)


@shapes.pairs(
    dtype=oracle.DTYPES,
    granularity=list(shapes.GRANULARITIES),
    scale_format=shapes.FLOAT32_SCALES,
    ulps=[1, 3],
)
def test_an_operand_computed_again_by_other_bits_is_no_nan(dtype, granularity, scale_format, ulps):
    """A dynamic cast does not clamp, so a scale that was kept meets values larger than its amax.

    Where inductor recomputes what a cast reads, its rounding may differ by ulps of bfloat16, up to
    2^-7 each (pytorch#150859). Every format rounds down to its maximum from further above it: E4M3
    from 448 * 1.036 on, E5M2 from 57344 * 1.07 on, their fnuz variants from 1.033 and 1.07 on.
    """
    x = Case((37, 300), torch.bfloat16, seed=3).make()
    block = shapes.GRANULARITIES[granularity].block_of(x.shape)
    scale = definition.cast_dynamic(x, block, dtype, scale_format)[1]
    again = x.float() * (1 + ulps * 2.0**-7)
    data = cpu.cast_by_scale(again, scale, block, dtype, fits=True)
    assert cpu.dequantize(data, scale, block, torch.float32).isfinite().all()
    replay = (dtype, granularity, scale_format)
    assert_bitwise(data, definition.cast_by_scale(again, scale, block, dtype), replay)


# --- decoding


@ALL_DTYPES
@pytest.mark.parametrize("count", [1, 40], ids=["few", "many"])  # many: of more than `_SMALL`
def test_every_code_has_its_value(dtype, count):
    """Every value is exact in bfloat16. Without NaNs the bit fields are moved; of any strides."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(count)
    finite = codes[~oracle.table(dtype)[codes.long()].isnan()]
    one_nan = torch.zeros_like(codes)
    one_nan[-1] = oracle.nan_codes(dtype)[-1]
    matrix = torch.arange(112, dtype=torch.uint8).reshape(8, 14).repeat(2 * count, 8)
    strided = matrix.t(), matrix[1::2, ::3], matrix[3:4].expand(len(matrix), -1), matrix[:0]
    for some in (codes, finite, one_nan, one_nan.flip(0), *strided):
        expected = oracle.table(dtype)[some.long()].to(torch.bfloat16)
        assert_bitwise(cpu.to_bfloat16(some.view(dtype)), expected, (dtype, some.stride()))


def test_codes_are_decoded_where_subnormals_are_flushed():
    """Small codes are subnormal bfloat16s on the way, which torch.set_flush_denormal zeroes."""
    codes = torch.arange(112, dtype=torch.uint8).repeat(80).view(E4M3)
    expected = cpu.to_bfloat16(codes)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        decoded = cpu.to_bfloat16(codes)
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise(decoded, expected)


# --- compiled


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)])
def test_the_ops_are_what_they_declare(block):
    ops, x = torch.ops.float8, torch.randn(130, 256, dtype=torch.bfloat16)
    scale_format = "e8m0" if block == (1, 128) else "power_of_two"
    data, scale = definition.cast_dynamic(x, block, E4M3, "power_of_two")
    how = block, E4M3, scale_format
    for op, args in (
        (ops.amax, (x, block)),
        (ops.cast_scaled, (x, scale, block, E4M3)),
        (ops.cast, (x, scale, *how, False, True, False, False)),
        (ops.cast, (x, None, *how, False, True, True, block == (-1, -1))),
        (ops.cast, (x, None, *how, False, False, True, False)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
    # The test of schemas (torch 2.13) fails for float8 arguments.
    args = data, scale, block, torch.bfloat16
    torch.library.opcheck(ops.dequantize.default, args, test_utils="test_faketensor")
    for out_dtype in shapes.HIGH_PRECISION:
        b = torch.randn(48, 256, dtype=out_dtype)
        b_block = (128, 128) if block == (1, 128) else block
        product = data, scale, *definition.cast_dynamic(b, b_block, E4M3), block, b_block
        for bias in (None, torch.randn(48)):
            args = *product, bias, out_dtype
            torch.library.opcheck(ops.scaled_mm.default, args, test_utils="test_faketensor")
            with torch.autocast("cpu", torch.bfloat16):
                found = ops.scaled_mm(*args)
            assert_error_within_baseline(
                found,
                definition.scaled_mm(*product, bias, torch.float32).double(),
                definition.scaled_mm(*args),
            )


# --- with AMX


def multiply_scaled(scale_format, contraction, bias=None, out_dtype=torch.bfloat16, nan=False):
    """A blockwise product: operands, blocks and the result. ``nan``: in row 5 of the first."""
    blocks, parts = ((1, 128), (128, 128)), []
    for rows, block in zip((96, 160), blocks, strict=True):
        x = Case((rows, contraction), torch.bfloat16, fill="wide", seed=rows).make()
        if nan and rows == 96:
            x[5, 0] = torch.nan
        parts += definition.cast_dynamic(x, block, E4M3, scale_format)
    return parts, blocks, cpu.scaled_mm(*parts, *blocks, bias, out_dtype)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """A processor with AMX; returns what is multiplied in bfloat16."""
    seen, dequantize = [], cpu.dequantize

    def note(data, scale, block, dtype):
        value = dequantize(data, scale, block, dtype)
        if dtype == torch.bfloat16:
            seen.append(value)
        return value

    monkeypatch.setattr(cpu, "_has_matrix_units", lambda: True)
    monkeypatch.setattr(cpu, "dequantize", note)
    return seen


@pytest.mark.parametrize("part", [1 << 18, 4096], ids=["whole", "in parts"])
@pytest.mark.parametrize("scale_format", ["power_of_two", "e8m0"])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
def test_scales_that_are_powers_of_two_multiply_in_bfloat16(
    bfloat16_products, scale_format, bias, part, monkeypatch
):
    monkeypatch.setattr(cpu, "_PART", part)
    bias = None if bias is None else 100 * torch.randn(160).to(bias)
    nan = scale_format == "e8m0"  # a NaN is no power of two
    parts, blocks, out = multiply_scaled(scale_format, 384, bias, nan=nan)
    a, b = bfloat16_products
    for found, data, scale, block in zip((a, b), parts[::2], parts[1::2], blocks, strict=True):
        value = definition.dequantize(data, scale, block, torch.float32)
        assert_bitwise(found.float(), value, scale_format, "what is multiplied")
    assert torch.equal(out.isnan().any(1).nonzero().flatten(), torch.tensor([5] * nan))
    exact = a.double() @ b.double().t() + (0 if bias is None else bias.double())
    plain = definition.scaled_mm(*parts, *blocks, bias, torch.bfloat16)
    keep = torch.arange(96) != 5
    assert_error_within_baseline(out[keep], exact[keep], plain[keep], replay=scale_format)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_format": "float32"},  # not exact in bfloat16
        {"contraction": 130},  # oneDNN reads beyond a row
        {"out_dtype": torch.float32},
    ],
    ids=str,
)
def test_other_products_are_those_of_the_definition(bfloat16_products, options):
    options = {"scale_format": "power_of_two", "contraction": 256, **options}
    parts, blocks, out = multiply_scaled(**options)
    assert not bfloat16_products
    rest = options.get("bias"), options.get("out_dtype", torch.bfloat16)
    assert_bitwise(out, definition.scaled_mm(*parts, *blocks, *rest), options)


def dynamic(x, block, dtype, scale_format="float32"):
    scale = definition.scale_from_amax(plain.amax(x, block), torch.finfo(dtype).max, scale_format)
    return plain.cast_by_scale(x, scale, block, dtype), e8m0.as_float32(scale)


def every_cast(x, scale, block, dtype):
    """Dynamic casts, a cast under a given scale, and what one stands for."""
    codes, own = dynamic(x, block, dtype)
    found = {"codes": codes, "own": own, "given": plain.cast_by_scale(x, scale, block, dtype)}
    found |= {s: dynamic(x, block, dtype, s)[1] for s in ("power_of_two", "e8m0")}
    return found | {"value": plain.dequantize(codes, own, block, x.dtype)}


COMPILED = {
    "tensorwise": Case((37, 300), torch.bfloat16, exponent=-60, fill="wide", seed=1),
    "rowwise": Case((37, 300), torch.float32, exponent=100, fill="wide", seed=2),
    "1x128": Case((37, 300), torch.float16, fill="wide", seed=3),
    "128x128": Case((37, 300), torch.float32, exponent=-130, fill="one_large", seed=5),
    "3x5": Case((37, 33), torch.float32, fill="ties", layout="transposed", seed=6),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in COMPILED),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in COMPILED),
    ],
)
def test_compiled_casts_have_the_bits_of_eager_ones(name, backend):
    """With aot_eager of other sizes too, by one graph."""
    case, block = COMPILED[name], shapes.GRANULARITIES[name].block_of(COMPILED[name].shape)
    is_dynamic = None if backend == "aot_eager" else False
    compiled = torch.compile(every_cast, fullgraph=True, backend=backend, dynamic=is_dynamic)
    dtype = E5M2 if name in ("rowwise", "3x5") else E4M3
    specials = ("inf", "nan", "negative_zero", "subnormal", "max")
    for rows, special in ((37, ()), (53 if is_dynamic is None else 37, specials)):
        case = replace(case, shape=(rows, case.shape[1]), specials=special)
        x = case.make()
        scale = oracle.scales(Case(case.shape, seed=9).make(), block, dtype)
        scale = scale * 2.0**case.exponent
        found = compiled(x, scale, block, dtype)
        for what, expected in every_cast(x, scale, block, dtype).items():
            assert_bitwise(found[what], expected, case, f"compiled {what}")


# --- in parts


@shapes.pairs(
    block=[(-1, -1), (1, -1), (-1, 1), (1, 128), (4, 16), (1, 1, -1), (1, -1, -1), (-1, -1, -1)],
    turned=[False, True],
    dtype=[torch.bfloat16, torch.float32],
)
def test_operands_in_parts(block, turned, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_PART", 512)
    monkeypatch.setattr(cpu, "_SMALL", 16)
    shape = (3, 24, 40) if len(block) == 3 else (72, 40)
    x = torch.randn(shape).to(dtype)
    x = x.mT.contiguous().mT if turned else x
    x[..., 7:9, 3] = torch.tensor([torch.nan, torch.inf], dtype=dtype)
    found = cpu.amax(x, block)
    assert_bitwise(found, definition.amax(x, block), block)
    scale = definition.scale_from_amax(found, 448.0)
    wanted = definition.cast_by_scale(x, scale, block, torch.float8_e4m3fn)
    for fits in (False, True):
        data = cpu.cast_by_scale(x, scale, block, torch.float8_e4m3fn, fits)
        assert_bitwise(data, wanted, (block, fits))
        assert data.stride() == x.stride()
    powers = definition.scale_from_amax(found, 448.0, "power_of_two").nan_to_num(4.0)
    for its, out in ((scale, torch.float32), (powers, torch.bfloat16), (scale, torch.bfloat16)):
        with Allocations([data, its]) as alive:
            start = alive.now
            values = cpu.dequantize(data, its, block, out)
            in_parts = out == torch.bfloat16 and len(block) == 2 and not turned
            if in_parts:  # float32 values of one part alone
                assert alive.peak - start <= values.nbytes + 5 * 4 * cpu._PART
        assert_bitwise(values, definition.dequantize(wanted, its, block, out), (block, out))
