"""Ranks with different layers or calls get the same error on every rank, within seconds."""

import pytest
from processes import failures

ON_TWO = [
    *(("a_difference_is_an_error_before_anything_travels", w) for w in ("ddp", "fsdp2", "fsdp1")),
    ("a_difference_of_the_gather_flag_is_an_error",),
    ("precompute_on_one_rank_is_an_error",),
    ("orders_of_registration_may_differ",),
    ("an_order_of_registration_is_found",),
    ("later_steps_compare_nothing",),
    ("a_copy_and_a_second_conversion_are_compared",),
    ("an_evaluation_of_one_rank_is_not_compared",),
    ("models_without_data_parallelism_may_differ",),
    ("a_forward_of_one_rank_is_not_compared",),
    ("layers_that_ddp_leaves_out_may_differ",),
    ("a_first_gather_compares_without_the_hook",),
    ("a_gather_flag_without_fsdp2_warns_once",),
    ("the_hook_breaks_no_graph_of_a_compiled_function",),
    ("a_step_of_one_rank_is_not_compared",),
    ("a_forward_before_the_group_is_made_is_not_compared",),
    ("a_sample_of_one_rank_is_not_compared",),
    ("a_teacher_does_not_keep_the_hook",),
    ("parts_that_run_by_themselves_are_compared",),
    ("a_new_process_group_starts_from_zero",),  # last: it replaces the process group
]
ON_FOUR = [
    ("stages_are_compared_with_their_own_ranks",),
    ("replicas_of_shards_are_compared",),
    ("a_difference_is_an_error_of_the_first_sync",),
    ("sync_reduces_in_the_order_of_the_names",),
    ("amaxes_are_reduced_over_the_given_group_only",),
    ("a_wrong_group_is_found",),
    ("one_collective_for_all_histories",),
    ("ranks_end_with_equal_bits",),
    ("a_rank_outside_of_the_group_gets_an_error",),
    ("amaxes_of_two_devices_take_one_collective",),
    ("a_pipeline_stage_syncs_with_its_own_ranks",),
    ("tensor_parallel_ranks_must_be_in_the_group",),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, ON_FOUR)])
def test_differences_are_errors_on_every_rank(world, checks):
    assert failures("rank_comparison_program", checks, world) == {}
