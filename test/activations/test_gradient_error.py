"""The error of each op's gradients is what it was: SQNR in dB of the op's worst gradient."""

import pytest
from activations import gradient_error

# Normal inputs; inputs with outliers.
MEASURED = {
    "rms_norm": (31.5, 35.3),
    "layer_norm": (31.4, 35.3),
    "silu": (40.6, 40.7),
    "gelu": (41.1, 41.1),
    "gelu (tanh)": (41.1, 41.1),
    "sigmoid": (39.8, 39.8),
    "tanh": (35.7, 35.7),
    "mul": (31.5, 30.8),
    "silu(a) * b": (29.8, 30.9),
    "pow": (31.5, 30.8),
    "pow (x^3)": (25.4, 24.4),
    "relu": (float("inf"),) * 2,
    "dropout": (float("inf"),) * 2,
}


@pytest.mark.parametrize("name", gradient_error.CASES)
def test_the_error_of_an_ops_gradients(name):
    for stated, value in zip(MEASURED[name], gradient_error.sqnr_of(name), strict=True):
        assert stated == value or abs(stated - value) < 0.3, (name, stated, value)
