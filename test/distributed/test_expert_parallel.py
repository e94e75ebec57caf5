"""Experts on two and on four processes equal one process, by expert parallelism and by FSDP2."""

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
    ("converts_before_and_after",),
    ("takes_experts_of_other_libraries",),
    ("faults_are_found",),
    ("ranks_that_differ_get_an_error",),
    ("fsdp2_equals_one_process",),
    ("fsdp2_equals_one_process", 1, ("tensorwise", "blockwise")),
    ("weights_are_gathered_in_float8",),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, CHECKS)])
def test_experts_equal_one_process(world, checks):
    assert failures("expert_parallel_program", checks, world) == {}
