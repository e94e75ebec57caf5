"""Two processes on gloo: FSDP2 shards around the layers, and ``sync`` agrees on scales.

This is the ground under a distributed room: `Float8Linear` needs nothing special for it.
"""

import pytest
from processes import failures

from float8.config import RECIPES

CLAIMS = {
    "fsdp2 gives the bits of one process": ("fsdp2_equals_one_process", list(RECIPES)),
    "all ranks end a sync with equal finite scales": ("ranks_agree", None),
    "the same after a NaN on one rank": ("ranks_agree", float("nan")),
    "the same after an infinity on one rank": ("ranks_agree", float("inf")),
    "the same where a scale is not found by every sync": ("ranks_agree", float("inf"), 2),
    "ddp does not broadcast amaxes": ("ddp_keeps_every_ranks_amaxes",),
    "a missing all-reduce is seen": ("ranks_disagree_without_the_all_reduce",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("distributed_program", CLAIMS) == {}
