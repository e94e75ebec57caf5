"""FSDP1, and FSDP2 without a float8 gather, on four processes: the bits of one process."""

import pytest
from processes import failures
from recompute import KINDS

RECIPES = ("tensorwise", "delayed", "rowwise", "unit")
CLAIMS = {
    **{
        f"{recipe}: {claim.replace('_', ' ')} {' '.join(arguments)}": (claim, recipe, *arguments)
        for recipe in RECIPES
        for claim, *arguments in (
            ("fsdp1_trains", "FULL_SHARD"),
            ("fsdp1_in_mixed_precision_trains_as_autocast_does",),
            ("fsdp2_trains",),
            ("fsdp2_in_mixed_precision_trains_as_autocast_does",),
            ("hsdp_trains",),
        )
    },
    "fsdp1 that keeps whole parameters": ("fsdp1_trains", "delayed", "SHARD_GRAD_OP"),
    "fsdp1 that rounds buffers is refused": ("fsdp1_that_rounds_buffers_is_refused",),
    "cpu offload": ("cpu_offload_trains", "delayed"),
    **{
        f"{recipe}: {kind} checkpointing": ("checkpointing_changes_nothing", recipe, kind)
        for recipe in ("tensorwise", "delayed")
        for kind in KINDS
    },
    **{
        f"{recipe}, {kind}, {hidden} rows on four": ("uneven_shards_train", recipe, kind, hidden)
        for recipe in ("tensorwise", "delayed", "rowwise")
        for kind in ("fsdp1", "fsdp2")
        for hidden in (3, 1)
    },
}  # fmt: skip


@pytest.mark.slow
def test_on_four_processes():
    assert failures("fsdp1_claims", CLAIMS, world=4) == {}
