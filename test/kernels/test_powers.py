"""Powers by bits against float64, and E4M3's fields against the 256-code table."""

from __future__ import annotations

import oracle
import pytest
import torch
from assertions import assert_bitwise

from float8.kernels import moments, powers


def test_log2_by_bits():
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(torch.rand(1 << 16, generator=generator, dtype=torch.float64) * 252 - 126)
    x = torch.cat([x.float(), 1 + (torch.rand(1 << 12, generator=generator) - 0.5) * 2.0**-8])
    exact = x.double().log2()
    # Half a spacing of the sum, and what the polynomial leaves.
    bound = exact.abs() * 2.0**-23 + 2.0**-22
    assert ((powers.log2_by_bits(x) - exact).abs() <= bound).all()
    ones = powers.log2_by_bits(torch.exp2(torch.arange(-126.0, 128)))
    assert_bitwise(ones, torch.arange(-126.0, 128))


def test_exp2_by_bits():
    t = torch.rand(1 << 16, generator=torch.Generator().manual_seed(2)) * 252 - 126
    exact = torch.exp2(t.double())
    assert ((powers.exp2_by_bits(t) / exact - 1).abs() <= 2.0**-21.5).all()
    whole = torch.arange(-126.0, 127)
    assert_bitwise(powers.exp2_by_bits(whole), torch.exp2(whole))
    below = torch.tensor([-127.0, -1e30, -torch.inf])
    assert_bitwise(powers.exp2_by_bits(below), torch.full((3,), 2.0**-126))


def test_every_code_of_e4m3():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = oracle.table(torch.float8_e4m3fn).float()
    assert_bitwise(powers.e4m3_by_bits(codes.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("log2_range", [0, 6, 30])
def test_compiled_codes_are_neighbours(log2_range, monkeypatch):
    """What a compiler gets, run eagerly: the same codes but for a tie here and there."""
    generator = torch.Generator().manual_seed(3)
    x = torch.exp2(torch.rand(4, 300, generator=generator) * log2_range - 30)
    x[0, :3] = torch.tensor([0.0, torch.nan, torch.inf])
    x[1, 5] *= -1
    expected = moments.encode_expanded(x, 128)
    values = moments.decode_expanded(*expected, 128)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = moments.encode_expanded(x, 128)
    apart = (found[0].view(torch.uint8).int() - expected[0].view(torch.uint8).int()).abs()
    nan = expected[0].float().isnan()
    assert torch.equal(found[0].float().isnan(), nan)
    apart = apart[~nan]
    assert apart.max() <= 1
    assert (apart != 0).double().mean() < 0.01
    decoded = moments.decode_expanded(*expected, 128)
    torch.testing.assert_close(decoded, values, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(decoded == 0, x == 0)
