"""`float8.unit_scaling.functional.multiplier`: a sharpness is a positive number."""

import pytest
import torch

from float8.unit_scaling import functional as U
from float8.unit_scaling.functional.multiplier import checked_mult


@pytest.mark.parametrize("mult", [0.25, 1, 7.5])
def test_a_positive_number_is_itself(mult):
    assert checked_mult(mult, "f") == mult


@pytest.mark.parametrize("mult", [0, -1.0, float("nan"), float("inf")])
def test_a_number_that_is_not_positive_is_refused(mult):
    with pytest.raises(ValueError, match=f"gelu: mult .* greater than 0, got {mult}"):
        U.gelu(torch.ones(2), mult=mult)


@pytest.mark.parametrize("mult", [True, False, torch.tensor(1.0)])
def test_what_is_no_number_is_refused(mult):
    with pytest.raises(TypeError, match="silu: mult is a number"):
        U.silu(torch.ones(2), mult)
