"""`float8.unit_scaling.constraints`: one factor from several, by name or by function."""

import math
import statistics

import pytest

from float8.unit_scaling.constraints import apply_constraint

SCALES = [(0.5,), (0.125, 2.0), (0.3, 0.07, 1.9), (1e-3, 1e3, 7.0, 0.2)]


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("gmean", statistics.geometric_mean),
        ("hmean", statistics.harmonic_mean),
        ("amean", statistics.fmean),
        ("to_output_scale", lambda scales: scales[0]),
    ],
)
def test_a_mean_takes_any_number_of_scales(name, oracle, scales):
    constrained = apply_constraint(name, *scales)
    assert len(constrained) == len(scales)
    assert constrained == pytest.approx([oracle(scales)] * len(scales), rel=1e-14)


@pytest.mark.parametrize(
    ("name", "scales", "expected"),
    [
        ("to_grad_input_scale", (0.1, 0.2), 0.2),
        ("to_left_grad_scale", (0.1, 0.2, 0.3), 0.2),
        ("to_right_grad_scale", (0.1, 0.2, 0.3), 0.3),
    ],
)
def test_a_gradients_scale_is_chosen_where_the_operation_has_it(name, scales, expected):
    assert apply_constraint(name, *scales) == (expected,) * len(scales)


def test_a_function_is_a_constraint():
    assert apply_constraint(max, 0.1, 0.7, 0.3) == (0.7, 0.7, 0.7)
    assert apply_constraint(lambda out, *_: math.sqrt(out), 0.25, 9.0) == (0.5, 0.5)
