"""Tensor and sequence parallel layers on two and on four processes give what one process gives."""

import pytest
from processes import failures

ON_TWO = {
    "parts make a whole": ("parts_make_a_whole",),
    "bits of one process, in every layout": ("equals_one_process",),
    "codes travel, and nothing twice": ("what_travels",),
    "random data, float32": ("a_close_fit", "tensorwise", "float32"),
    "random data, bfloat16": ("a_close_fit", "tensorwise", "bfloat16"),
    "random data, delayed": ("a_close_fit", "delayed", "float32"),
    "random data, autocast": ("a_close_fit", "tensorwise", "bfloat16", 1, True),
    "some readers are not converted": ("some_readers_are_not_converted",),
    "an input on another mesh": ("an_input_on_another_mesh_is_refused",),
    "keywords": ("keywords_are_prepared_and_others_left",),
    "norms that write float8": ("norms_that_write_float8",),
    "rows are cast where they lie": ("rows_and_blocks_are_cast_where_they_lie", "rowwise"),
    "and with a product in high precision": (
        "rows_and_blocks_are_cast_where_they_lie",
        "rowwise_with_gw_hp",
    ),
    "and blocks": ("rows_and_blocks_are_cast_where_they_lie", "blockwise"),
    "one cast for all readers": ("casts_once_for_all_readers",),
    "a bad value on one rank": ("a_nan_on_one_rank_reaches_all",),
    "sequences that do not divide": ("uneven_parts",),
    "features that do not divide": ("uneven_features",),
    "recomputation": ("recomputed",),
    "high precision": ("in_high_precision_it_is_torchs_own",),
    "beside torch's styles": ("mixes_with_torchs_styles",),
    "an amax of one rank alone is seen": ("a_wrong_group_is_seen", "no_group", 1),
    "compiled sync": ("compiled_sync_is_one_graph",),
    "compiled, prepared": ("compiled", "dynamic", "prepared"),
}
ON_FOUR = {
    "parts make a whole": ("parts_make_a_whole",),
    "bits of one process": ("equals_one_process", ("dynamic",), ("sequence",), 1),
    "with fully_shard": ("works_in_two_dimensions",),
    "replicas keep their scales": ("a_close_fit", "tensorwise", "float32", 2),
    "an amax of all ranks is seen": ("a_wrong_group_is_seen", "default_group", 2),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("tensor_parallel_program", ON_TWO, patience=180) == {}


@pytest.mark.slow
def test_on_four_processes():
    assert failures("tensor_parallel_program", ON_FOUR, world=4) == {}
