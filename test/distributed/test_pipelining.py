"""Pipelines of torch.distributed.pipelining over two processes: the bits of one process."""

import pytest
from pipeline_program import SCHEDULES
from processes import failures

RECIPES = ("tensorwise", "rowwise", "unit", "delayed")
CLAIMS = {
    **{
        f"{recipe}, {schedule}": ("steps_equal_one_process", recipe, schedule)
        for recipe in RECIPES
        for schedule in SCHEDULES
    },
    "a forgotten group is refused": ("a_forgotten_group_is_refused",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("pipeline_program", CLAIMS) == {}
