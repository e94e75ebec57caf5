"""`dequantize_groups` restores every code by the scale of its own group."""

import oracle
import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, pairs

from float8.kernels.gpu.dequantize_groups import dequantize_groups

SHAPES = ((80, 272), (5, 123), (1, 1000), (37, 1), (130, 257), (0, 16), (3, 0))


def operands(shape, dtype, layout, device="cpu"):
    """Data of all codes, and scales as casts write them, column by column, or row by row."""
    R, C = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 255, (-(-C // 128), R), dtype=torch.uint8, generator=generator).t()
    scale = scale if layout == "columns" else scale.contiguous()
    return codes.view(dtype).to(device), scale.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=SHAPES,
    dtype=(torch.float8_e4m3fn, torch.float8_e5m2),
    out_dtype=(torch.bfloat16, torch.float32),
    layout=("columns", "rows"),
)
def test_every_code(shape, dtype, out_dtype, layout, device):
    data, scale = operands(shape, dtype, layout, device)
    found = launcher("dequantize_groups", "_launch", device)(data, scale, 128, out_dtype)
    exact = oracle.values(data.cpu(), torch.exp2(scale.cpu().double() - 127), (1, 128), dtype)
    assert_bitwise(found.cpu(), exact.float().to(out_dtype), (shape, dtype))
    planted = launcher("dequantize_groups", "_launch", device)(data, scale.flip(0), 128, out_dtype)
    assert shape[0] < 2 or not planted.numel() or not torch.equal(planted, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 256), (1, 5), (0, 16)])
def test_opcheck(shape, device):
    _, scale = operands(shape, torch.float8_e5m2, "columns", device)
    data = torch.ones(shape, device=device).to(torch.float8_e5m2)  # torch compares no NaN
    # Not test_schema, which compares its inputs by multiplying them: not defined for float8.
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    arguments = data, scale, 128, torch.bfloat16
    torch.library.opcheck(dequantize_groups, arguments, test_utils=checks)
