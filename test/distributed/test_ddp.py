"""DDP on two processes: float8 layers train to the bits of one process."""

import pytest
from processes import failures
from recompute import KINDS

RECIPES = ("tensorwise", "delayed", "rowwise", "unit")
OPTIONS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "both": {"gradient_as_bucket_view": True, "static_graph": True},
}
CLAIMS = {
    **{
        f"{recipe}, {name}, and no_sync: the bits of one process": (
            "steps_equal_one_process",
            recipe,
            options,
        )
        for recipe in RECIPES
        for name, options in OPTIONS.items()
    },
    **{
        f"{recipe}, {kind} checkpointing": ("checkpointing_changes_nothing", recipe, kind)
        for recipe in ("tensorwise", "delayed")
        for kind in KINDS
    },
    **{
        f"{recipe}, one layer, the global batch at once": (
            "one_layer_equals_the_global_batch_at_once",
            recipe,
        )
        for recipe in ("delayed", "unit")
    },
    "a missing all-reduce is caught": ("a_missing_all_reduce_is_caught",),
    "compiled": ("compiling_changes_nothing", "tensorwise"),
    "fsdp2, compiled": ("compiling_fsdp2_changes_nothing", "delayed"),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("ddp_program", CLAIMS) == {}
