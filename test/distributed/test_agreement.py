"""Ranks that share scales hold the same layers, or are told on every rank where they differ."""

import pytest
from processes import failures

ON_FOUR = {
    "disagreement is told": ("disagreement_is_told_on_every_rank",),
    "orders of registration": ("orders_of_registration_may_differ",),
    "the given group only": ("amaxes_are_reduced_over_the_given_group_only",),
    "a wrong group is seen": ("a_wrong_group_is_seen",),
    "one collective": ("one_collective_for_all_histories",),
    "equal bits": ("ranks_end_with_equal_bits",),
    "a rank outside of the group": ("a_rank_outside_of_the_group_is_told",),
    "amaxes of two devices": ("amaxes_of_two_devices_meet",),
    "pipeline stages": ("stages_share_with_their_own_ranks_only",),
    "tensor parallel ranks": ("tensor_parallel_ranks_must_be_in_the_group",),
}


@pytest.mark.slow
def test_on_four_processes():
    assert failures("agreement_program", ON_FOUR, world=4) == {}
