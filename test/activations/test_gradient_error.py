"""The errors in the docstring are those that the command prints."""

import pytest

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
