"""The errors in the package's docstring are those that are measured."""

import pytest
from activations import gradient_error

import float8.activations

STATED = {
    line[:14].strip(): [float(cell) for cell in line[14:].split()]
    for line in (float8.activations.__doc__ or "").splitlines()
    if line[:14].strip() in gradient_error.CASES
}


@pytest.mark.parametrize("name", gradient_error.CASES)
def test_the_docstring_states_what_is_measured(name):
    for stated, value in zip(STATED[name], gradient_error.sqnr_of(name), strict=True):
        assert stated == value or abs(stated - value) < 0.3, (name, stated, value)
