"""FSDP2 with float8 gradients on four processes, where rows do not divide; and the collectives."""

import pytest
from processes import failures

CLAIMS = {
    "e4m3 is the mean on four ranks": ("is_the_mean", "e4m3", "float32", (3, 1000)),
    "0.55 of bfloat16's bytes on four ranks": ("float8_travels", 4096, 0.55),
    "DDP on four ranks": ("ddp_reduces_every_form",),
    "FSDP2 gets the mean": ("fsdp_reduces",),
    "microbatches without sync": ("fsdp_accumulates_without_sync",),
    "bfloat16 parameters, float32 results": ("fsdp_takes_mixed_precision",),
    "a divide factor of the user's": ("fsdp_divides_as_asked",),
    "a bad gradient on one rank is seen by all": ("fsdp_shows_a_bad_gradient_on_every_rank",),
    "the bits are those of one process": ("fsdp_has_the_bits_of_the_simulation",),
    "training follows float32": ("fsdp_training_follows_ddp",),
    "a controller is refused": ("fsdp_needs_no_controller",),
    "replicas alone are refused": ("replicas_alone_are_refused",),
    "another reduction is refused": ("fsdp_names_a_reduction_that_it_cannot_do",),
    "HSDP on two by two": ("hsdp_reduces",),
}


@pytest.mark.slow
def test_on_four_processes():
    assert failures("gradient_training_program", CLAIMS, world=4) == {}
