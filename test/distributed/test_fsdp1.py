"""FSDP1, and FSDP2 without a float8 gather, on four processes: the bits of one process."""

import pytest
from processes import failures
from recompute import KINDS

FORMS = (
    ("fsdp1_trains", "FULL_SHARD"),
    ("fsdp1_in_mixed_precision_trains_as_autocast_does",),
    ("fsdp2_trains",),
    ("fsdp2_in_mixed_precision_trains_as_autocast_does",),
    ("hsdp_trains",),
)
# Scales of a whole weight, from the gathered one or from a history, are what sharding may spoil;
# rows and constants take every other form.
FORMS_OF = {"tensorwise": FORMS, "delayed": FORMS, "rowwise": FORMS[::2], "unit": FORMS[1::2]}
CLAIMS = {
    **{
        f"{recipe}: {claim.replace('_', ' ')} {' '.join(arguments)}": (claim, recipe, *arguments)
        for recipe, forms in FORMS_OF.items()
        for claim, *arguments in forms
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
        for recipe, kind, hidden in (
            ("tensorwise", "fsdp1", 3),
            ("tensorwise", "fsdp2", 1),
            ("delayed", "fsdp1", 1),
            ("delayed", "fsdp2", 3),
            ("rowwise", "fsdp1", 3),
            ("rowwise", "fsdp2", 1),
        )
    },
}  # fmt: skip


@pytest.mark.slow
def test_on_four_processes():
    assert failures("fsdp1_program", CLAIMS, world=4) == {}
