"""The stated errors are those that the command measures."""

import math

import pytest
import torch

from float8 import activations
from float8.activations import measure

STATED = {
    line[:14].strip(): [float(cell) for cell in line[14:].split()]
    for line in (activations.__doc__ or "").splitlines()
    if line[:14].strip() in measure.CASES
}


@pytest.mark.parametrize("name", measure.CASES)
def test_the_docstring_states_what_is_measured(name):
    for stated, value in zip(STATED[name], measure.row(name), strict=True):
        assert stated == value or abs(stated - value) < 0.3, (name, stated, value)


def test_what_needs_a_bit_is_exact():
    assert measure.measure("relu", 128) == measure.measure("dropout", 128) == math.inf


def test_sqnr_of_a_known_error():
    exact = torch.ones(100, dtype=torch.float64)
    assert measure.sqnr(exact.float() * 1.01, exact) == pytest.approx(40.0, abs=0.01)
