"""Tensor and sequence parallel layers on two and on four processes equal one process."""

import pytest
from processes import failures

ON_TWO = [
    ("parts_gather_to_the_whole",),
    ("equals_one_process",),
    ("inputs_travel_as_float8",),
    ("random_data_differ_by_rounding_only", "tensorwise", "float32"),
    ("random_data_differ_by_rounding_only", "tensorwise", "bfloat16"),
    ("random_data_differ_by_rounding_only", "delayed", "float32"),
    ("random_data_differ_by_rounding_only", "tensorwise", "bfloat16", 1, True),  # autocast
    ("layers_in_high_precision_take_a_prepared_input",),
    ("an_input_on_another_mesh_is_refused",),
    ("keyword_inputs_are_prepared_and_others_are_not",),
    ("takes_the_output_of_a_norm_in_float8",),
    ("rows_and_blocks_are_cast_by_the_receiving_rank", "rowwise"),
    ("rows_and_blocks_are_cast_by_the_receiving_rank", "rowwise_with_gw_hp"),
    ("rows_and_blocks_are_cast_by_the_receiving_rank", "blockwise"),
    ("rows_and_blocks_are_cast_by_the_receiving_rank", "mxfp8"),
    ("an_input_is_cast_once_for_all_layers",),
    ("a_nan_on_one_rank_reaches_all",),
    ("sequences_that_do_not_divide",),
    ("features_that_do_not_divide",),
    ("recomputes",),
    ("in_high_precision_equals_torchs_styles",),
    ("mixes_with_torchs_styles",),
    ("torchs_styles_equal_one_process",),
    ("a_wrong_group_is_found", "no_group", 1),
    ("compiled_sync_is_one_graph",),
    ("compiled", "dynamic", "prepared"),
]
ON_FOUR = [
    ("parts_gather_to_the_whole",),
    ("equals_one_process", ("dynamic",), ("sequence",), 1),
    ("trains_with_fully_shard",),
    ("random_data_differ_by_rounding_only", "tensorwise", "float32", 2),  # two replicas
    ("a_wrong_group_is_found", "default_group", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, ON_FOUR)])
def test_layers_equal_one_process(world, checks):
    assert failures("tensor_parallel_program", checks, world, patience=180) == {}
