"""The device functions have the numbers of `float8.kernels.moments`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES

from float8.kernels import moments, stochastic

GROUP = 64


def rows_of_every_kind():
    """Random bits; narrow and wide ranges; zeros, a zero in lane 0, specials, tiny and huge."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (32, GROUP), dtype=torch.int64, generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    exponents = torch.rand(16, GROUP, generator=generator)
    x[:16] = torch.exp2(exponents * torch.arange(16)[:, None] * 6 - 40)
    x[3, 0] = x[4, 5] = 0
    x[5], x[6], x[7] = 0, 3.0, 1e-38
    x[8, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[9] = 1e-45
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twins(dtype, device):
    x = rows_of_every_kind().to(device)
    found = launcher("probe_moments", "probe", device)(x, dtype)
    half, half_scale, codes, scale, exponent, decoded, rounded, *at_random = found
    expected = moments.encode_groups(x, GROUP, torch.float16)
    assert_bitwise(half, expected[0], what="float16 codes")
    assert_bitwise(half_scale, expected[1], what="float16 scales")
    assert_bitwise(rounded, stochastic.stochastic_round(x, dtype, 5, 7), what="rounded at random")
    expected_codes, expected_scale, expected_exponent = moments.encode_expanded(x, GROUP)
    assert_bitwise(scale, expected_scale, what="scale of the expansion")
    torch.testing.assert_close(exponent, expected_exponent, rtol=1e-6, atol=0)
    assert_adjacent(codes, expected_codes)
    values = moments.decode_expanded(codes.view(torch.float8_e4m3fn), scale, exponent, GROUP)
    torch.testing.assert_close(decoded, values, rtol=2e-5, atol=0, equal_nan=True)
    assert torch.equal(decoded == 0, x == 0)
    chances = [stochastic.chances(x, stochastic.seed_of_state(5, i), 7) for i in (-1, 0, 1)]
    half = moments.encode_groups(x, GROUP, torch.float16, chances[0])[0]
    assert_bitwise(at_random[0], half, what="float16 codes at random")
    linear = moments.encode_groups(x, GROUP, torch.float8_e4m3fn, chances[1])[0]
    assert_bitwise(at_random[1].view(linear.dtype), linear, what="E4M3 codes at random")
    assert_adjacent(at_random[2], moments.encode_expanded(x, GROUP, chances[2])[0])


def assert_adjacent(codes, expected):
    """The same code, or rarely the next one."""
    apart = (codes.int() - expected.view(torch.uint8).int()).abs()
    nan = expected.float().isnan()
    assert apart[~nan].max() <= 1
    assert (apart[~nan] != 0).double().mean() < 0.01
    assert torch.equal((codes & 0x7F) == 0x7F, nan)


def test_a_wrong_range_is_caught():
    """The planted fault: an exponent of an adjacent group."""
    x = rows_of_every_kind()[10:16]
    codes, scale, exponent = moments.encode_expanded(x, GROUP)
    y = (x.abs() / scale).pow(1 / exponent.roll(1, 0)) * 448
    with pytest.raises(AssertionError):
        assert_adjacent(y.clamp(2.0**-9, 448).to(codes.dtype).view(torch.uint8), codes)
