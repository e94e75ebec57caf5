"""DDP with float8 gradients on two processes."""

import pytest
from processes import failures

CLAIMS = {
    "every form of DDP gets the mean": ("ddp_reduces_every_form",),
    "no_sync accumulates and sends nothing": ("ddp_accumulates_without_sync",),
    "bfloat16 models": ("ddp_takes_bfloat16",),
    "float64 is refused by name": ("ddp_refuses",),
    "what DDP ignores is left alone": ("ddp_leaves_what_it_ignores",),
    "a compiled DDP": ("compiled_ddp_is_seen_through",),
    "training follows float32": ("ddp_training_follows_float32",),
    **{
        f"training does not, planted: {name}": ("ddp_training_fails_with", name)
        for name in ("scale not shared", "no pre-scaling")
    },
    "a restart finds mu and the counts": ("ddp_mu_is_found_again_after_a_restart",),
    "a distributed checkpoint has both": ("a_distributed_checkpoint_carries_the_state",),
    "mu is halved on saturation, on all ranks": ("ddp_mu_follows_saturation",),
    "ranks with other settings are told": ("settings_of_ranks_are_compared",),
    "a bad gradient on one rank is seen": ("ddp_a_scaler_sees_a_bad_gradient",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("gradient_training_program", CLAIMS) == {}
