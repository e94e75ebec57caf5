"""Sharded models are saved as by one process, and errors reach every rank."""

from processes import failures

CHECKS = [
    *(("same_files", recipe) for recipe in ("tensorwise", "rowwise", "blockwise")),
    ("same_files", "tensorwise", True),
    ("same_files", "blockwise", False, True),
    ("same_files", "tensorwise", False, True, "fine_grained"),
    ("parallel_layers",),
    ("a_full_disk",),
    ("an_error_of_the_cast",),
    ("a_nan_in_one_shard",),
    ("an_existing_folder",),
    ("ranks_that_differ",),
    ("a_whole_model_is_saved_by_one",),
]


def test_two_ranks_save_as_one_process_does():
    assert failures("save_program", CHECKS) == {}
