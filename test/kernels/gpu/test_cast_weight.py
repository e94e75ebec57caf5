"""`cast_weight`: a float8 weight from its master, to the definition's bits."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS, pairs

from float8.kernels import moments
from float8.kernels.gpu.cast_weight import _definition, cast_weight_op


def master(shape, group, device="cpu"):
    """Codes and scales of a random master, and the amax of what it holds."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3e-3
    codes, scale = moments.encode_groups(x.to(device), group, torch.float16)
    return codes, scale, moments.decode_groups(codes, scale, group).abs().max().reshape(1)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=((4, 256), (3, 300), (1, 7), (37, 1)),
    group=(128, 32),
    dtype=FORMATS,
    transposed=(False, True),
)
def test_agrees(shape, group, dtype, transposed, device):
    codes, scale, amax = master(shape, group, device)
    data = torch.zeros(shape[::-1] if transposed else shape, dtype=torch.uint8, device=device)
    data = (data.t() if transposed else data).view(dtype)
    weight_scale = torch.zeros((), device=device)
    arguments = (codes, scale, data, weight_scale, group, amax)
    launcher("cast_weight", "_launch", device)(*arguments)
    x = moments.decode_groups(codes, scale, group)
    expected, expected_scale = oracle.quantize(x.cpu(), (-1, -1), dtype)
    replay = (shape, group, dtype, transposed)
    assert_bitwise(weight_scale.reshape(1, 1), expected_scale, replay, "scale")
    assert_bitwise(data, expected, replay, "codes")
    again = torch.zeros_like(data.view(torch.uint8)).view(dtype)
    _definition(codes, scale, again, weight_scale, group, amax)
    assert_bitwise(data, again, replay, "the definition's data")


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_where_it_is_and_a_skipped_step_writes_nothing(device):
    codes, scale, amax = master((2, 64), 32, device)
    codes[1, 3] = math.nan
    data = torch.zeros(2, 64, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight_scale = torch.zeros((), device=device)
    launch = launcher("cast_weight", "_launch", device)
    launch(codes, scale, data, weight_scale, 32, amax, torch.ones(1, device=device))
    assert data.view(torch.uint8).count_nonzero() == 0 and weight_scale == 0
    launch(codes, scale, data, weight_scale, 32, amax, torch.zeros(1, device=device))
    assert data.float().isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    codes, scale, amax = master((2, 70), 32, device)
    data = torch.zeros(2, 70, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    arguments = (codes, scale, data, torch.zeros((), device=device), 32, amax)
    torch.library.opcheck(cast_weight_op, arguments, test_utils=("test_faketensor",))
