"""Two processes on gloo: FSDP2 shards around the layers, and ``sync`` agrees on scales.

This is the ground under a distributed room: `Float8Linear` needs nothing special for it.
"""

import distributed_claims as claims
import pytest

from float8.config import RECIPES


@pytest.mark.slow
def test_fsdp2_gives_the_bits_of_one_process():
    claims.on_two_processes(claims.fsdp2_equals_one_process, list(RECIPES))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.slow
def test_all_ranks_end_a_sync_with_equal_finite_scales(bad):
    claims.on_two_processes(claims.ranks_agree, bad)


@pytest.mark.slow
def test_ddp_does_not_broadcast_amaxes():
    claims.on_two_processes(claims.ddp_keeps_every_ranks_amaxes)


@pytest.mark.slow
def test_a_missing_all_reduce_is_seen():
    claims.on_two_processes(claims.ranks_disagree_without_the_all_reduce)
