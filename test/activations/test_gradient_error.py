"""The errors in the docstring are those that the command prints."""

import math

import pytest
import torch

from float8 import activations
from float8.activations import gradient_error

STATED = {
    line[:14].strip(): [float(cell) for cell in line[14:].split()]
    for line in (activations.__doc__ or "").splitlines()
    if line[:14].strip() in gradient_error.CASES
}


@pytest.mark.parametrize("name", gradient_error.CASES)
def test_the_docstring_states_what_is_measured(name):
    for stated, value in zip(STATED[name], gradient_error.sqnr_of(name), strict=True):
        assert stated == value or abs(stated - value) < 0.3, (name, stated, value)


def test_an_op_that_saves_bits_is_exact():
    assert (
        gradient_error.worst_sqnr("relu", 128)
        == gradient_error.worst_sqnr("dropout", 128)
        == math.inf
    )


def test_sqnr_of_a_known_error():
    exact = torch.ones(100, dtype=torch.float64)
    assert gradient_error.sqnr(exact.float() * 1.01, exact) == pytest.approx(40.0, abs=0.01)
