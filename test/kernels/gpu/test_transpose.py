"""`transpose` moves every byte, NaN codes too, from any strides."""

import pytest
import torch

pytest.importorskip("triton")

from interpreter import launcher
from shapes import DEVICES, pairs

from float8.kernels.gpu.transpose import transpose

SHAPES = ((80, 272), (5, 123), (1, 128), (37, 1), (130, 257), (0, 16))


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=SHAPES, layout=["contiguous", "transposed", "sliced", "offset"])
def test_every_byte(shape, layout, device):
    M, K = shape
    codes = torch.randint(256, (2 * M + 1, 2 * K + 1), dtype=torch.uint8, device=device)
    codes = {
        "contiguous": codes[:M, :K].contiguous(),
        "transposed": codes[:M, :K].t().contiguous().t(),
        "sliced": codes[: 2 * M : 2, : 2 * K : 2],
        "offset": codes[1:, 1:][:M, :K],
    }[layout]
    got = launcher("transpose", "_launch", device)(codes.view(torch.float8_e4m3fn))
    assert got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), codes.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 48), (1, 5), (0, 16)])
def test_opcheck(shape, device):
    data = torch.zeros(shape, device=device).to(torch.float8_e5m2)
    # Not test_schema, which compares its inputs by multiplying them: not defined for float8.
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_autograd_registration")
    torch.library.opcheck(transpose, (data,), test_utils=checks)
    torch.library.opcheck(transpose, (data.t(),), test_utils=checks)
