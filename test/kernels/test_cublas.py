"""``torch._scaled_mm`` gets operands as cuBLASLt documents them, whatever their layout was."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from pretend import (
    B1,
    B128,
    BF16,
    E4M3,
    E5M2,
    EVERY_PRODUCT,
    MX,
    PRODUCTS,
    ROW,
    TENSOR,
    assert_product_of,
    install_torch_scaled_mm,
    into_squares,
    multiply,
    operands,
    plain,
)
from shapes import Case
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import kernels
from float8.kernels import cublas

module = importlib.import_module("float8.kernels.scaled_mm")  # float8.kernels has its function


BLOCKWISE = [pair for pair, product in PRODUCTS.items() if product == "blockwise"]


@pytest.fixture
def hardware(monkeypatch):
    """``torch._scaled_mm`` on an sm_90; its calls are kept in the list."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return install_torch_scaled_mm(monkeypatch)


@EVERY_PRODUCT
@pytest.mark.parametrize("bias_dtype", [None, BF16, torch.float32], ids=str)
def test_the_hardware_product_is_the_product(hardware, a_block, b_block, bias_dtype):
    M, K, N = 48, 272, 160
    parts = operands(M, K, N, a_block, b_block, E5M2)
    bias = None if bias_dtype is None else Case((N,), bias_dtype, seed=3).make()
    actual = multiply(parts, a_block, b_block, bias)
    assert_product_of(actual, parts, a_block, b_block, bias, (M, K, N, a_block, b_block))
    assert len(hardware) == 1
    fuses = bias_dtype == BF16 and PRODUCTS[a_block, b_block] != "blockwise"
    assert (hardware[0].bias is not None) == fuses


@EVERY_PRODUCT
@pytest.mark.parametrize(
    "sizes", [(5, 272, 123), (48, 135, 160), (1, 201, 7), (130, 257, 129)], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_padding_changes_no_number(hardware, a_block, b_block, sizes, with_bias):
    parts = operands(*sizes, a_block, b_block)
    bias = Case((sizes[2],), BF16, seed=3).make() if with_bias else None
    actual = multiply(parts, a_block, b_block, bias, pad=True)
    assert actual.shape == (sizes[0], sizes[2])
    assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))
    assert len(hardware) == 1


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@EVERY_PRODUCT
def test_operands_of_any_strides_reach_the_hardware_in_its_layout(
    hardware, a_block, b_block, layout
):
    parts = operands(32, 512, 48, a_block, b_block)
    strided = list(parts)
    for i in (0, 2):
        codes = parts[i].view(torch.uint8)
        codes = {
            "contiguous": codes,
            "transposed": codes.t().contiguous().t(),
            "sliced": torch.stack([codes, codes + 1], dim=-1).flatten(1)[:, ::2],
        }[layout]
        strided[i] = codes.view(parts[i].dtype)
        assert strided[i].is_contiguous() == (layout == "contiguous")
    actual = multiply(strided, a_block, b_block)
    assert_bitwise(actual, multiply(parts, a_block, b_block), (a_block, b_block, layout))
    if layout == "contiguous":  # operands in cuBLASLt's layout are not copied
        assert hardware[0].a.data_ptr() == parts[0].data_ptr()
        assert hardware[0].b.data_ptr() == parts[2].data_ptr()


@EVERY_PRODUCT
@pytest.mark.parametrize("offset", [1, 3, 16])
def test_operands_that_start_unaligned_are_copied(hardware, a_block, b_block, offset):
    parts = operands(16, 256, 32, a_block, b_block)
    shifted = []
    for part in parts:
        storage = torch.empty(offset + part.numel(), dtype=part.dtype)
        shifted.append(storage[offset:].view(part.shape))
        shifted[-1].view(torch.uint8).copy_(part.view(torch.uint8))
    actual = multiply(shifted, a_block, b_block)
    assert_bitwise(actual, multiply(parts, a_block, b_block), (a_block, b_block, offset))
    if offset % 16 == 0:
        assert hardware[0].a.data_ptr() == shifted[0].data_ptr()


def test_one_row_of_any_strides_reaches_the_hardware_in_its_layout(hardware):
    parts = operands(1, 32, 16, ROW, ROW)
    wide = torch.zeros(2, 96, dtype=torch.uint8)
    wide[:1, :32] = parts[0].view(torch.uint8)
    strided = [wide.view(E4M3)[:1, :32], *parts[1:]]
    assert strided[0].stride() == (96, 1)
    assert_bitwise(multiply(strided, ROW, ROW), multiply(parts, ROW, ROW))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 127, 130])
@pytest.mark.parametrize(("a_block", "b_block"), BLOCKWISE, ids=str)
def test_rows_of_blockwise_products_come_in_fours(hardware, a_block, b_block, rows):
    """What cuBLASLt wants of them, and no more: whole fours are not copied."""
    parts = operands(rows, 512, 16, a_block, b_block)
    bias = Case((16,), BF16, seed=3).make()
    actual = multiply(parts, a_block, b_block, bias)
    assert actual.shape == (rows, 16)
    assert_product_of(actual, parts, a_block, b_block, bias, (rows, a_block, b_block))
    assert plain(hardware[0].a).shape == (rows + -rows % 4, 512)
    assert (hardware[0].a.data_ptr() == parts[0].data_ptr()) == (rows % 4 == 0)


@pytest.mark.parametrize("K", [272, 301])
@pytest.mark.parametrize(("a_block", "b_block"), BLOCKWISE, ids=str)
def test_a_contraction_in_blocks_is_padded_to_whole_ones(hardware, a_block, b_block, K):
    """Only where it is no multiple of 16: scales are padded to fours, and operands are not."""
    parts = operands(8, K, 16, a_block, b_block)
    assert_product_of(multiply(parts, a_block, b_block, pad=True), parts, a_block, b_block, None, K)
    assert plain(hardware[0].a).shape[1] == (384 if K % 16 else K)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("columns", [16, 144])
@pytest.mark.parametrize(("a_block", "b_block"), BLOCKWISE, ids=str)
def test_rows_of_128x128_scales_are_padded_to_fours_and_operands_are_not_copied(
    hardware, a_block, b_block, columns, blocks
):
    """cuBLASLt reads such rows by 16 bytes; the pretended one asserts it."""
    parts = operands(132, 128 * blocks, columns, a_block, b_block, E5M2)
    actual = multiply(parts, a_block, b_block)
    assert_product_of(actual, parts, a_block, b_block, None, (a_block, b_block, columns, blocks))
    assert hardware[0].a.data_ptr() == parts[0].data_ptr()
    assert hardware[0].b.data_ptr() == parts[2].data_ptr()


@pytest.mark.parametrize("blocks", [1, 3, 4, 86])
@pytest.mark.parametrize(("a_block", "b_block"), [(B1, B128), (B128, B1)], ids=str)
def test_torch_takes_the_padded_scales(a_block, b_block, blocks):
    """By its own checks, on fake CUDA tensors."""
    with FakeTensorMode():
        parts = []
        for rows, block in ((256, a_block), (384, b_block)):
            parts.append(torch.empty(rows, 128 * blocks, dtype=E4M3, device="cuda"))
            parts.append(torch.empty(rows // block[0], blocks, device="cuda"))
        out = cublas._cublas_blockwise_mm(*parts, a_block[0], b_block[0], torch.float32, False)
        assert (out.shape, out.dtype) == ((256, 384), torch.float32)


@pytest.mark.parametrize(("a_block", "b_block"), [(B1, B128), (B128, B1)], ids=str)
def test_opcheck(hardware, a_block, b_block):
    parts = operands(8, 272, 16, a_block, b_block)
    arguments = (*parts, a_block[0], b_block[0], BF16, False)
    op = torch.ops.float8.cublas_blockwise_mm.default
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    torch.library.opcheck(op, arguments, test_utils=checks)


def test_a_compiled_product_keeps_the_op_whole(hardware, monkeypatch):
    """Torch's shape function refuses these sizes, and inductor would choose another function."""
    monkeypatch.setattr(module, "family_of", lambda device: "sm_90")
    parts = operands(8, 272, 144, B1, B128)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(parts):
        return kernels.scaled_mm(*parts, B1, B128, out_dtype=BF16)

    assert_product_of(product(parts), parts, B1, B128, None, "compiled")
    assert len(hardware) == 1


@pytest.mark.parametrize("layout", ["strided", "unaligned", "as it should be"])
def test_a_fused_bias_of_any_layout_is_the_bias(hardware, layout):
    """Torch gives cuBLASLt its address, and looks at no stride."""
    parts = operands(16, 32, 16, TENSOR, TENSOR)
    wide = Case((48,), BF16, seed=3).make()
    bias = {"strided": wide[::3], "unaligned": wide[1:17], "as it should be": wide[:16]}[layout]
    actual = multiply(parts, TENSOR, TENSOR, bias)
    assert_product_of(actual, parts, TENSOR, TENSOR, bias, layout)
    assert (hardware[0].bias.data_ptr() == bias.data_ptr()) == (layout == "as it should be")


def test_any_number_of_rows_is_taken(hardware):
    parts = operands(3, 16, 16, ROW, ROW)
    assert_product_of(multiply(parts, ROW, ROW), parts, ROW, ROW, None, "3 rows")
    assert len(hardware) == 1


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("block", [TENSOR, ROW], ids=str)
def test_out_dtype_and_accumulation_reach_the_hardware(hardware, out_dtype, fast, block):
    parts = operands(16, 32, 16, block, block)
    bias = Case((16,), out_dtype, seed=3).make()
    actual = multiply(parts, block, block, bias, out_dtype, use_fast_accum=fast)
    assert actual.dtype == out_dtype
    assert hardware[0].out_dtype == out_dtype
    assert hardware[0].fast == fast
    assert_product_of(actual, parts, block, block, bias, (out_dtype, fast))


def test_padded_codes_are_zeros():
    data = operands(3, 5, 4, TENSOR, TENSOR)[0]
    padded = cublas.pad_codes(data, 2, 11)
    assert (padded.shape, padded.dtype) == ((5, 16), E4M3)
    assert_bitwise(padded[:3, :5].contiguous(), data)
    assert padded.float().count_nonzero() == data.float().count_nonzero()


@pytest.mark.parametrize("block", [B1, B128], ids=str)
def test_a_matrix_in_layout_is_not_copied(block):
    scale = operands(256, 512, 16, block, B1)[1]
    assert cublas.contraction_last(scale) is scale
    copy = cublas.contraction_last(scale.t())
    assert copy.is_contiguous()
    assert_bitwise(copy, scale.t())


# --- MX products


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (33, 9), (257, 130), (0, 4), (4, 0)])
def test_scales_are_swizzled_as_documented(shape):
    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    found = cublas.swizzled(codes.view(torch.float8_e8m0fnu))
    assert_bitwise(found.view(torch.uint8), into_squares(codes), shape)
    assert found.is_contiguous()
    assert found.numel() == cublas.swizzled_size(*shape)


def test_scales_of_a_stack_are_swizzled_one_by_one():
    codes = torch.randint(0, 255, (3, 130, 5), dtype=torch.uint8)
    found = cublas.swizzled(codes.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert_bitwise(found, torch.stack([into_squares(each) for each in codes]))


@pytest.mark.parametrize("shape", [(128, 4), (130, 5)])
def test_scales_are_swizzled_as_torchao_does(shape):
    torchao = pytest.importorskip("torchao.prototype.mx_formats.utils")
    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    found = cublas.swizzled(codes.view(torch.float8_e8m0fnu))
    assert_bitwise(found.view(torch.uint8), torchao.to_blocked(codes).flatten(), shape)


@pytest.mark.parametrize("sizes", [(48, 272, 160), (5, 272, 123), (130, 257, 129)], ids=str)
def test_swizzled_scales_multiply_as_plain_ones(hardware, sizes):
    """They are passed on as they are, also where the data is padded."""
    parts = operands(*sizes, MX, MX)
    ready = [parts[0], cublas.swizzled(parts[1]), parts[2], cublas.swizzled(parts[3])]
    actual = multiply(ready, MX, MX, pad=True)
    assert_bitwise(actual, multiply(parts, MX, MX, pad=True), sizes)
    assert hardware[0].scale_a.data_ptr() == ready[1].data_ptr()


@pytest.mark.parametrize("sizes", [(0, 32, 16), (16, 0, 16), (16, 32, 0)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_empty_product_with_swizzled_scales(hardware, sizes, with_bias):
    M, K, N = sizes
    a, b = torch.zeros(M, K).to(E4M3), torch.zeros(N, K).to(E4M3)
    scales = [
        torch.zeros(cublas.swizzled_size(rows, K // 32), dtype=torch.uint8) for rows in (M, N)
    ]
    scales = [scale.view(torch.float8_e8m0fnu) for scale in scales]
    bias = torch.ones(N, dtype=BF16) if with_bias else None
    actual = multiply([a, scales[0], b, scales[1]], MX, MX, bias)
    assert_bitwise(actual, torch.full((M, N), float(with_bias), dtype=BF16))
    assert not hardware


def test_float32_scales_of_1x32_blocks_are_refused(hardware):
    a, a_scale, b, b_scale = operands(16, 64, 16, MX, MX)
    with pytest.raises(
        ValueError, match=r"E8M0 scales only, got torch.float32; .*ScaleFormat.E8M0"
    ):
        multiply([a, a_scale.to(torch.float32), b, b_scale], MX, MX)


def test_torch_checks_what_it_gets(monkeypatch):
    """Both of torch's functions accept the operands, on fake CUDA tensors.

    ``F.scaled_mm`` is told that the scales are swizzled; ``_scaled_mm`` takes no others.
    """
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_100")
    original, seen = torch._scaled_mm, []

    def both(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        how = (F.ScalingType.BlockWise1x32,) * 2
        swizzle = (F.SwizzleType.SWIZZLE_32_4_4,) * 2
        out = F.scaled_mm(a, b, scale_a, how[0], scale_b, how[1], *swizzle, bias, out_dtype)
        seen.append(out.shape)
        return original(
            a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )  # fmt: skip

    monkeypatch.setattr(torch, "_scaled_mm", both)
    for M, K, N in ((48, 272, 160), (5, 257, 123), (1, 16, 16), (4096, 4096, 64)):
        with FakeTensorMode(), torch.no_grad():
            parts = []
            for rows in (M, N):
                parts.append(torch.empty(rows, K, dtype=E4M3, device="cuda"))
                shape = rows, -(-K // 32)
                parts.append(torch.empty(shape, dtype=torch.float8_e8m0fnu, device="cuda"))
            bias = torch.empty(N, dtype=BF16, device="cuda")
            out = kernels.scaled_mm(*parts, MX, MX, bias, out_dtype=BF16, pad=True)
            assert (out.shape, out.dtype) == ((M, N), BF16)
    assert seen == [(48, 160), (5, 128), (1, 16), (4096, 64)]
