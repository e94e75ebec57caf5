"""Experts on two and on four processes equal one process."""

import pytest
from processes import failures

CHECKS = [
    ("equals_one_process",),
    ("a_scale_per_tensor_differs_by_rounding_only",),
    ("tokens_travel_as_float8",),
    ("trains",),
]
ON_TWO = [
    *CHECKS,
    ("recomputes",),
    ("takes_indices_and_weights",),
    ("ranks_that_differ_get_an_error",),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, CHECKS)])
def test_experts_equal_one_process(world, checks):
    assert failures("expert_parallel_program", checks, world) == {}
