"""Two gloo processes: the bytes that are counted equal those computed by hand."""

from __future__ import annotations

from processes import failures

CLAIMS = {
    "each kind of collective": ("every_collective_is_counted_by_hand",),
    "an op that is not known is refused": ("what_it_does_not_know_is_refused",),
    "FSDP2's gathers and scatters": ("fsdp2_is_seen_in_forward_and_backward",),
    "DDP's C++ reducer": ("ddp_is_seen",),
}


def test_on_two_processes():
    assert failures("wire_program", CLAIMS) == {}
