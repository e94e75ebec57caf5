"""Float8 gradients on several processes: the reductions, DDP and FSDP2."""

import pytest
from processes import failures
from torch import nn

from float8.distributed.gradients import float8_gradients

SIZES = (1, 7, 31, 1000, 4099)
ON_ONE = [("every_microbatch_may_be_reduced",)]
ON_TWO = [
    *ON_ONE,
    ("is_the_mean", "e4m3", "float32", SIZES),
    ("is_the_mean", "e5m2", "bfloat16", SIZES),
    ("is_the_mean", "e4m3", "float16", SIZES),
    ("has_the_bits_of_the_simulation",),
    *(
        ("a_bad_value_on_one_rank_makes_all_ranks_nan", float(bad))
        for bad in ("nan", "inf", "-inf")
    ),
    ("zeros_stay_zeros",),
    ("an_empty_gradient_is_reduced",),
    ("saturation_is_counted",),
    ("underflow_is_counted",),
    ("half_of_the_bytes_of_bfloat16_travel", 1 << 16, 0.51),
    ("half_of_the_bytes_of_bfloat16_travel", 2048, 0.55),
    ("no_value_moves_to_the_host",),
    ("a_planted_fault_is_found", "scale not shared"),
    ("a_planted_fault_is_found", "no pre-scaling"),
    ("a_planted_fault_is_found", "no division by N"),
    ("a_planted_fault_is_found", "sum in float8"),
    ("a_planted_fault_is_found", "minimum instead of maximum"),
    ("a_bad_value_would_be_lost_without_nan_scales",),
    ("ddp_reduces_every_form",),
    ("ddp_accumulates_without_sync",),
    ("ddp_takes_bfloat16",),
    ("ddp_refuses_float64",),
    ("parameters_that_ddp_ignores_may_have_any_dtype",),
    ("a_compiled_ddp_reduces",),
    ("ddp_training_follows_float32",),
    ("ddp_training_fails_with", "scale not shared"),
    ("ddp_training_fails_with", "no pre-scaling"),
    ("a_restart_restores_mu_and_the_counts",),
    ("a_distributed_checkpoint_has_the_state",),
    ("mu_is_halved_on_saturation_on_all_ranks",),
    ("different_arguments_of_ranks_are_an_error",),
    ("a_gradient_scaler_skips_a_bad_gradient",),
]
ON_FOUR = [
    ("is_the_mean", "e4m3", "float32", (3, 1000)),
    ("half_of_the_bytes_of_bfloat16_travel", 4096, 0.55),
    ("ddp_reduces_every_form",),
    ("fsdp_reduces",),
    ("fsdp_accumulates_without_sync",),
    ("fsdp_takes_mixed_precision",),
    ("fsdp_takes_a_divide_factor",),
    ("a_bad_gradient_on_one_rank_makes_all_shards_nan",),
    ("fsdp_has_the_bits_of_the_simulation",),
    ("fsdp_training_follows_ddp",),
    ("fsdp_refuses_a_controller",),
    ("a_replicated_model_is_refused",),
    ("fsdp_refuses_another_reduction",),
    ("hsdp_reduces",),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)])
def test_gradients_travel_as_float8(world, checks):
    assert failures("gradient_program", checks, world) == {}


def test_a_model_that_is_not_parallel_is_refused():
    with pytest.raises(TypeError, match=r"Linear reduces no gradients.*fully_shard"):
        float8_gradients(nn.Linear(4, 4))
