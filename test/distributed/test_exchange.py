"""Which recipes' codes may travel; that they do, on processes, tensor_parallel_program shows."""

from types import SimpleNamespace

import pytest
import torch

from float8 import Blockwise, CastConfig, Float8LinearConfig, Float8Tensor, ScalingType
from float8.config import RECIPES
from float8.distributed import exchange
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


def gathered_gradient(config, monkeypatch):
    """What a rowwise layer of one rank multiplies in backward, and the gradient itself."""
    monkeypatch.setattr(exchange, "gather", lambda x, *_: x)
    g = torch.randn(32, 16)
    ctx = SimpleNamespace(
        config=config, scatter=0, length=32, record=False, states=(None, None, None),
        ranks=SimpleNamespace(group=None),
    )  # fmt: skip
    return exchange._gathered_gradient(ctx, g), g


@pytest.mark.parametrize("recipe", sorted(SENT - {"delayed"}))  # which needs its state
def test_a_gradient_of_one_scale_travels_as_codes(recipe, monkeypatch):
    found, _ = gathered_gradient(RECIPES[recipe], monkeypatch)
    assert isinstance(found, Float8Tensor)


def test_a_gradient_whose_second_use_is_in_high_precision_travels_as_it_is(monkeypatch):
    """Its first use has one scale, tensorwise; codes would lose what grad_weight is to read."""
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=off, cast_config_grad_output_for_grad_weight=off
    )
    found, g = gathered_gradient(config, monkeypatch)
    assert type(found) is torch.Tensor and torch.equal(found, g)
