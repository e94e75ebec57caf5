"""The signal to quantisation noise ratio: a known error, and what has no ordinary number."""

from __future__ import annotations

import math

import pytest
import torch

from float8.kernels.sqnr import decibels, sqnr


def test_an_error_of_one_percent_is_40_decibels():
    reference = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert sqnr(reference, reference.double() * 1.01) == pytest.approx(40.0, abs=1e-9)


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (1.0, 0.0, math.inf),
        (0.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (math.nan, math.nan, -math.inf),
        (1e-300, 1e300, -math.inf),  # the ratio underflows
        (math.nan, 1.0, math.nan),
    ],
)
def test_special_values(signal, noise, expected):
    assert decibels(signal, noise) == pytest.approx(expected, nan_ok=True)
