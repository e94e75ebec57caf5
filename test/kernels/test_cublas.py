"""``torch._scaled_mm`` gets operands as cuBLASLt documents them, whatever their layout was."""

from __future__ import annotations

import importlib

import pytest
import torch
from assertions import assert_bitwise
from pretend import (
    B1,
    B128,
    BF16,
    E4M3,
    E5M2,
    EVERY_PRODUCT,
    PRODUCTS,
    ROW,
    TENSOR,
    assert_product_of,
    install_torch_scaled_mm,
    multiply,
    operands,
    plain,
)
from shapes import Case

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
    if offset % 16 == 0 and B128 not in (a_block, b_block):  # those are padded, so copied
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
    """To four of them where a side has 128x128 scales, whose rows cuBLASLt reads by 16 bytes."""
    parts = operands(8, K, 16, a_block, b_block)
    assert_product_of(multiply(parts, a_block, b_block, pad=True), parts, a_block, b_block, None, K)
    in_fours = B128 in (a_block, b_block)
    assert plain(hardware[0].a).shape[1] == (512 if in_fours else 384 if K % 16 else K)


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
