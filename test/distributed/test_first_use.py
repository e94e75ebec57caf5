"""Ranks that hold different layers, or make different calls, are told on every rank, in seconds."""

import pytest
from processes import failures

ON_TWO = {
    "a difference under ddp": ("a_difference_is_told_before_anything_travels", "ddp"),
    "a difference under fsdp2": ("a_difference_is_told_before_anything_travels", "fsdp2"),
    "a difference under fsdp1": ("a_difference_is_told_before_anything_travels", "fsdp1"),
    "a difference of the gather flag": ("a_difference_of_the_gather_flag_is_told",),
    "precompute on one rank": ("precompute_on_one_rank_is_told",),
    "orders of registration": ("orders_of_registration_may_differ",),
    "an order of registration is seen": ("an_order_of_registration_is_seen",),
    "no cost afterwards": ("a_step_costs_nothing_afterwards",),
    "copies and second conversions": ("a_copy_and_a_second_conversion_are_compared",),
    "an evaluation of one rank": ("an_evaluation_of_one_rank_is_left_alone",),
    "models without data parallelism": ("models_without_data_parallelism_may_differ",),
    "a trial of one rank": ("a_trial_of_one_rank_is_left_alone",),
    "layers that ddp leaves out": ("layers_that_ddp_leaves_out_may_differ",),
    "a first gather without the hook": ("a_first_gather_compares_without_the_hook",),
    "a gather that never meets fsdp2": ("a_gather_that_never_meets_fsdp2_is_told",),
    "a compiled function": ("the_entry_of_a_model_in_a_function_that_is_compiled",),
    "a trial with an optimizer": ("a_trial_with_an_optimizer_on_one_rank_is_left_alone",),
    "a trial before the group": ("a_trial_before_the_group_is_made_is_left_alone",),
    "a sample of one rank": ("a_sample_of_one_rank_is_left_alone",),
    "a teacher": ("a_teacher_does_not_keep_the_hook",),
    "parts of a model": ("parts_that_run_by_themselves_are_compared",),
    "a rank that does not arrive": ("a_new_process_group_begins_anew",),
}
ON_FOUR = {
    "pipeline stages": ("stages_are_compared_with_their_own_ranks",),
    "replicas of shards": ("replicas_of_shards_are_compared",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("first_use_program", ON_TWO) == {}


@pytest.mark.slow
def test_on_four_processes():
    assert failures("first_use_program", ON_FOUR, world=4) == {}
