"""Which recipes' codes may travel; that they do, on processes, tensor_parallel_claims shows."""

import pytest

from float8 import Blockwise, CastConfig, Float8LinearConfig, ScalingType
from float8.config import RECIPES
from float8.distributed.exchange import sends_input

SENT = {"tensorwise", "delayed", "unit"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_travel_where_one_scale_serves_all_products(recipe):
    assert sends_input(RECIPES[recipe].plan) == (recipe in SENT)


def test_a_second_cast_wants_the_values():
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    other = CastConfig(power_of_two_scale=True)
    for second in (off, other):
        config = Float8LinearConfig(
            cast_config_input_for_grad_weight=second,
            cast_config_grad_output_for_grad_weight=off if second is off else None,
        )
        assert not sends_input(config.plan)
    by_block = CastConfig(granularity=Blockwise(128, 128))
    assert not sends_input(Float8LinearConfig(by_block, by_block, by_block, emulate=True).plan)
