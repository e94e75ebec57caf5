"""``torch._scaled_mm`` gets operands as cuBLASLt documents them, whatever their layout was."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bitwise
from pretend import (
    B1,
    B128,
    BF16,
    BLOCKWISE,
    E4M3,
    E5M2,
    EVERY_PRODUCT,
    MX,
    MX_SQUARE,
    PRODUCTS,
    ROW,
    TENSOR,
    assert_product_of,
    install_torch_scaled_mm,
    into_squares,
    matrices,
    multiply,
    operands,
    plain,
)
from shapes import HIGH_PRECISION, Case, pairs

from float8 import kernels
from float8.kernels import cublas
from float8.kernels import products as module


@pytest.fixture
def hardware(monkeypatch):
    """``torch._scaled_mm`` on an sm_90; its calls are kept in the list."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return install_torch_scaled_mm(monkeypatch)


@pairs(
    product=list(PRODUCTS),
    # whole tiles, odd, one row, three, blocks and a tail, one block, few rows, many blocks
    sizes=[(48, 272, 160), (5, 272, 123), (1, 201, 7), (3, 135, 16), (130, 257, 129),
           (132, 128, 16), (2, 512, 16), (132, 640, 144)],
    bias_dtype=[None, BF16, torch.float32],
)  # fmt: skip
def test_the_hardware_product_is_the_product(hardware, product, sizes, bias_dtype):
    """Padding changes no number; what cuBLASLt takes as it is, is not copied."""
    (M, K, N), (a_block, b_block) = sizes, product
    parts, is_blockwise = operands(*sizes, *product, E5M2), product in BLOCKWISE
    bias = None if bias_dtype is None else Case((N,), bias_dtype, seed=3).make()
    actual = multiply(parts, a_block, b_block, bias, pad=True)
    assert actual.shape == (M, N)
    assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))
    (call,) = hardware
    assert (call.bias is not None) == (bias_dtype == BF16 and not is_blockwise)
    is_padded = K % 16 or (is_blockwise and M % 4)
    assert (call.a.data_ptr() == parts[0].data_ptr()) == (not is_padded)
    if is_blockwise:  # its rows come in fours, and a contraction that is padded in whole blocks
        assert plain(call.a).shape == (M + -M % 4, K + (-K % 128 if K % 16 else 0))


@EVERY_PRODUCT
@pytest.mark.parametrize("layout", ["transposed", "sliced", "wide rows", 1, 3, 16])
def test_operands_of_any_strides_reach_the_hardware_in_its_layout(
    hardware, a_block, b_block, layout
):
    """Or that start so many elements inside their storage."""
    parts, strided = operands(32, 512, 48, a_block, b_block), []
    for part in parts:
        x = part.view(torch.uint8) if part.element_size() == 1 else part
        if isinstance(layout, int):
            x = torch.cat([x.new_zeros(layout), x.flatten()])[layout:].view(x.shape)
        elif part.dtype in (E4M3, E5M2):
            x = {
                "transposed": x.t().contiguous().t(),
                "sliced": torch.stack([x, x + 1], dim=-1).flatten(1)[:, ::2],
                "wide rows": torch.cat([x, x], dim=1)[:, : x.shape[1]],
            }[layout]
        strided.append(x.view(part.dtype))
    actual = multiply(strided, a_block, b_block)
    assert_bitwise(actual, multiply(parts, a_block, b_block), (a_block, b_block, layout))
    if layout == 16:
        assert hardware[0].a.data_ptr() == strided[0].data_ptr()


@pairs(out_dtype=HIGH_PRECISION, fast=[False, True], block=[TENSOR, ROW])
def test_out_dtype_and_accumulation_reach_the_hardware(hardware, out_dtype, fast, block):
    parts = operands(16, 32, 16, block, block)
    bias = Case((16,), out_dtype, seed=3).make()
    actual = multiply(parts, block, block, bias, out_dtype, use_fast_accum=fast)
    assert (hardware[0].out_dtype, hardware[0].fast) == (out_dtype, fast)
    assert_product_of(actual, parts, block, block, bias, (out_dtype, fast))


@pytest.mark.parametrize(("a_block", "b_block"), [(B1, B128), (B128, B1)], ids=str)
def test_a_compiled_product_keeps_the_op_whole(hardware, a_block, b_block, monkeypatch):
    """Torch's shape function refuses these sizes, and inductor would choose another function."""
    arguments = (*operands(8, 272, 16, a_block, b_block), a_block[0], b_block[0], BF16, False)
    op = torch.ops.float8.cublas_blockwise_mm.default
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    torch.library.opcheck(op, arguments, test_utils=checks)
    hardware.clear()
    monkeypatch.setattr(module, "family_of", lambda device: "sm_90")
    parts = operands(8, 272, 144, a_block, b_block)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(parts):
        return kernels.scaled_mm(*matrices(parts, a_block, b_block), out_dtype=BF16)

    assert_product_of(product(parts), parts, a_block, b_block, None, "compiled")
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


# --- MX products


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (33, 9), (257, 130), (0, 4), (4, 0)])
def test_scales_are_swizzled_as_documented(shape):
    """As torchao does it, and of a stack one by one."""
    codes = torch.randint(0, 255, (2, *shape), dtype=torch.uint8)
    found = cublas.swizzled(codes[0].view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert_bitwise(found, into_squares(codes[0]), shape)
    assert found.is_contiguous() and found.numel() == cublas.swizzled_size(*shape)
    both = cublas.swizzled(codes.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert_bitwise(both, torch.stack([into_squares(each) for each in codes]))
    if 0 not in shape:
        torchao = pytest.importorskip("torchao.prototype.mx_formats.utils")
        assert_bitwise(found, torchao.to_blocked(codes[0]).flatten(), shape)


@pytest.mark.parametrize(
    "sizes", [(48, 272, 160), (130, 257, 129), (0, 32, 16), (16, 0, 16), (16, 32, 0)], ids=str
)
def test_swizzled_scales_multiply_as_plain_ones(hardware, sizes):
    """They are passed on as they are, also where the data is padded; of empty products, not."""
    parts, bias = operands(*sizes, MX, MX), torch.ones(sizes[2], dtype=BF16)
    ready = [parts[0], cublas.swizzled(parts[1]), parts[2], cublas.swizzled(parts[3])]
    actual = multiply(ready, MX, MX, bias, pad=True)
    assert_bitwise(actual, multiply(parts, MX, MX, bias, pad=True), sizes)
    assert bool(hardware) == (0 not in sizes)
    assert not hardware or hardware[0].scale_a.data_ptr() == ready[1].data_ptr()


@pairs(
    # whole tiles; multiples of 32; odd; less than a block; rows and blocks beyond a tile
    sizes=[(128, 256, 128), (160, 96, 32), (48, 272, 160), (5, 40, 123), (1, 7, 7),
           (257, 1056, 144)],
    out_dtype=[BF16, torch.float16],
    b_block=[MX, MX_SQUARE],
    b_dtype=[E4M3, E5M2],
)  # fmt: skip
def test_amd_reads_scales_in_rows(hardware, sizes, out_dtype, b_block, b_dtype, monkeypatch):
    """Of MX products on gfx95, whose sizes are padded; scales of all operands differ."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "gfx95")
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    M, _, N = sizes
    parts = operands(*sizes, MX, b_block, b_dtype)
    for part in parts[1::2]:  # by rows and by blocks
        steps = torch.arange(part.numel()).reshape(part.shape) % 5
        part.view(torch.uint8).add_(steps.to(torch.uint8))
    bias = Case((N,), out_dtype, seed=3).make()
    actual = multiply(parts, MX, b_block, bias, out_dtype, pad=True)
    assert (actual.shape, actual.dtype) == ((M, N), out_dtype)
    assert_product_of(actual, parts, MX, b_block, bias, (sizes, b_block))
    assert hardware[0].bias is None
    with pytest.raises(ValueError, match="mx product in bfloat16 or float16 only"):
        multiply(parts, MX, b_block, out_dtype=torch.float32, pad=True)


def test_scales_of_1x32_are_not_read_as_those_of_32x32(hardware):
    a, a_scale, b, b_scale = operands(16, 64, 48, MX, MX)
    with pytest.raises(ValueError, match=r"48 rows in blocks of 32x32 have 2 rows.*got 48"):
        multiply([a, a_scale, b, b_scale], MX, MX_SQUARE)


def test_float32_scales_of_1x32_blocks_are_refused(hardware):
    a, a_scale, b, b_scale = operands(16, 64, 16, MX, MX)
    with pytest.raises(ValueError, match=r"E8M0 scales only.*ScaleFormat.E8M0"):
        multiply([a, a_scale.to(torch.float32), b, b_scale], MX, MX)
