"""E4M3 by float32 arithmetic against the 256-code table, and moments as compiled code has them."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from assertions import assert_bitwise

from float8.kernels import compiled_coding as coding
from float8.kernels import moments

E4M3 = torch.float8_e4m3fn
TABLE = oracle.table(E4M3).float()
NUMBERS = torch.arange(256.0)


def magnitudes(seed: int) -> torch.Tensor:
    """0 .. 448: all values, all ties between two of them, and random ones of every size."""
    values = TABLE[:127]
    ties = (values[1:] + values[:-1]) / 2
    generator = torch.Generator().manual_seed(seed)
    scattered = torch.exp2(torch.rand(4096, generator=generator) * 24 - 15.2)
    return torch.cat([values, ties, ties * (1 + 2.0**-23), scattered.clamp(max=448.0)])


def below_as_number(y: torch.Tensor) -> torch.Tensor:
    base, t = coding.steps(y)
    return base + t.floor()


def neighbours(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the codes below and above, float64."""
    base, t = coding.steps(y)
    return tuple(TABLE[(base + whole).long()].double() for whole in (t.floor(), t.ceil()))


def test_every_number_has_the_value_of_its_code():
    assert_bitwise(coding.values(NUMBERS), TABLE)


def test_every_code_has_its_number():
    assert_bitwise(coding.numbers(torch.arange(256, dtype=torch.uint8).view(E4M3)), NUMBERS)


def test_logarithms_of_every_magnitude():
    exact = (TABLE[1:127].double() / 448).log2()
    assert (coding.log2_ratios(NUMBERS[1:127]) - exact).abs().max() <= 2.0**-18
    assert coding.log2_ratios(NUMBERS[126:127]) == 0


@pytest.mark.parametrize("exponent", [1 / 64, 0.37, 1.0, 4.0])
def test_expanded_values(exponent):
    exact = (TABLE.double().abs() / 448) ** exponent * torch.where(NUMBERS > 127, -1, 1)
    found = coding.expanded_values(NUMBERS, torch.tensor(exponent))
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=0, equal_nan=True)


def test_a_step_is_a_place_between_two_codes():
    y = magnitudes(1)
    base, t = coding.steps(y)
    assert torch.equal(base % 8, torch.zeros_like(base))
    below, above = neighbours(y)
    share = (t - t.floor()).double()
    assert torch.equal(below + share * (above - below), y.double())


def test_the_nearest_code():
    y = magnitudes(2)
    expected = oracle.encode(y, E4M3)
    assert torch.equal(coding.nearest(y).to(torch.uint8), expected)


def test_rounding_at_random_goes_up_as_often_as_it_should():
    """With the chances 0, 1/64, .. 63/64 it goes up in as many of 64 as the exact share says."""
    y = magnitudes(3)[:200]
    chances = torch.arange(64.0).unsqueeze(1) / 64
    below, above = neighbours(y)
    whole = below_as_number(y)
    ups = (coding.at_random(y, chances) > whole).sum(0)
    share = (y.double() - below) / (above - below).clamp(min=1e-30)
    assert ((ups - share * 64).abs() <= 1).all()
    for exponent in (0.2, 0.6, 1.7):
        some = y[(y >= 2.0**-9)]
        low, high = below[y >= 2.0**-9], above[y >= 2.0**-9]
        n = below_as_number(some)
        ups = (coding.at_random_expanded(some, chances, torch.tensor(exponent)) > n).sum(0)
        share = (some.double() ** exponent - low**exponent) / (
            high**exponent - low**exponent
        ).clamp(min=1e-30)
        assert ((ups - share * 64).abs() <= 1).all(), exponent


def test_signs_and_what_is_not_finite():
    x = torch.tensor([2.0, -2.0, 0.0, -0.0, math.nan, math.inf, -math.inf])
    codes = coding.codes_of(coding.nearest(torch.tensor([2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 1.0])), x)
    expected = torch.tensor([2.0, -2.0, 0.0, 0.0, math.nan, math.nan, math.nan])
    assert_bitwise(codes.float().abs().nan_to_num(9.0), expected.abs().nan_to_num(9.0))
    assert codes.float()[1] == -2


def group_of(log2_range: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.exp2(torch.rand(4, 300, generator=generator) * log2_range - 30)
    x[0, :3] = torch.tensor([0.0, torch.nan, torch.inf])
    x[1, 5] *= -1
    return x


@pytest.mark.parametrize("at_random", [False, True])
def test_what_a_compiler_gets_are_the_eager_codes(at_random, monkeypatch):
    """Run eagerly, as compiled code runs: linear codes to the bit, expanded ones or a neighbour."""
    for log2_range in (0, 6, 30):
        x = group_of(log2_range)
        chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(4))
        given = chance if at_random else None
        linear = moments.encode(x, 128, E4M3, given)
        expanded = moments.encode_expanded(x, 128, given)
        values = moments.decode_expanded(*expanded, 128), moments.decode(*linear, 128)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            for found, expected in zip(moments.encode(x, 128, E4M3, given), linear, strict=True):
                assert_bitwise(found.float(), expected.float())
            found = moments.encode_expanded(x, 128, given)
            decoded = moments.decode_expanded(*expanded, 128), moments.decode(*linear, 128)
        nan = expanded[0].float().isnan()
        assert torch.equal(found[0].float().isnan(), nan)
        bytes_ = [codes.view(torch.uint8).int()[~nan] for codes in (found[0], expanded[0])]
        apart = (bytes_[0] - bytes_[1]).abs()
        assert apart.max() <= 1
        assert (apart != 0).double().mean() < 0.01
        torch.testing.assert_close(decoded[0], values[0], rtol=2e-5, atol=0, equal_nan=True)
        assert torch.equal(decoded[0] == 0, values[0] == 0)
        assert_bitwise(decoded[1], values[1])
