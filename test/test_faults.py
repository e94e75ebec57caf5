"""Every planted fault of a layer fails the check of the layer."""

from dataclasses import replace

import faults
import pytest
import torch
from layer_check import check_layer
from torch import nn

from float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training

# Recipes in which a fault changes nothing.
INVISIBLE = {
    ("one scale for all rows", "tensorwise"),  # it has one scale
    ("swapped scales", "tensorwise"),  # the product of two numbers does not depend on their order
    # A scale twice as large changes rounding only at the ends of the format.
    ("format maximum of fnuz", "rowwise"),
    ("format maximum of fnuz", "blockwise"),
    ("format maximum of fnuz", "mxfp8"),
}


@pytest.mark.parametrize("fault", faults.LAYER_FAULTS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_planted_fault_fails_the_check_of_the_layer(fault, recipe):
    if (fault, recipe) in INVISIBLE:
        pytest.skip("the fault changes nothing in this recipe")
    check_layer(recipe)
    with faults.LAYER_FAULTS[fault](), pytest.raises(AssertionError, match="replay: check_layer"):
        check_layer(recipe)


def _saturates() -> bool:
    static = CastConfig(scaling_type=ScalingType.STATIC, static_scale=1.0)
    # E5M2, because some versions of torch saturate E4M3 conversions by themselves.
    e5m2 = replace(static, target_dtype=torch.float8_e5m2)
    e4m3 = replace(static, target_dtype=torch.float8_e4m3fn)
    config = Float8LinearConfig(e5m2, static, e4m3)
    layer = convert_to_float8_training(nn.Linear(16, 16, bias=False), config=config)
    return bool(layer(torch.full((1, 16), 1e6)).isfinite().all())


def test_a_forgotten_clamp_is_found():
    assert _saturates()
    with faults.forgotten_clamp():
        assert not _saturates()
