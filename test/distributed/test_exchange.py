"""Which operands travel in float8, and which part of a dimension a rank holds.

`test_tensor_parallel.py` has the exchange itself, on several processes.
"""

from types import SimpleNamespace

import pytest
import torch

from float8 import Blockwise, CastConfig, Float8LinearConfig, Float8Tensor, ScaleFormat, ScalingType
from float8.config import RECIPES
from float8.distributed import exchange
from float8.distributed.exchange import Ranks, check_even, part_of, sends_input_in_float8
from float8.linear.bound_plan import plan_on

SENT = {"tensorwise", "delayed", "unit"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_travel_in_float8_where_one_scale_serves_all_gemms(recipe):
    assert sends_input_in_float8(RECIPES[recipe].plan) == (recipe in SENT)


def test_an_input_with_a_second_cast_travels_in_high_precision():
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    other = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
    for second in (off, other):
        config = Float8LinearConfig(
            cast_config_input_for_grad_weight=second,
            cast_config_grad_output_for_grad_weight=off if second is off else None,
        )
        assert not sends_input_in_float8(config.plan)
    by_block = CastConfig(granularity=Blockwise(128, 128))
    assert not sends_input_in_float8(
        Float8LinearConfig(by_block, by_block, by_block, emulate=True).plan
    )


def gathered_gradient(config, monkeypatch):
    """The gradient that a rowwise layer of one rank multiplies, and the gradient itself."""
    monkeypatch.setattr(exchange, "gather", lambda x, *_: x)
    g = torch.randn(32, 16)
    ctx = SimpleNamespace(
        plan=plan_on(config, g.device, g.dtype), scatter=0, length=32, record=False,
        states=(None, None, None), ranks=SimpleNamespace(group=None),
    )  # fmt: skip
    return exchange._gather_grad_output(ctx, g), g


@pytest.mark.parametrize("recipe", sorted(SENT - {"delayed"}))  # which needs its state
def test_a_gradient_of_one_scale_travels_in_float8(recipe, monkeypatch):
    found, _ = gathered_gradient(RECIPES[recipe], monkeypatch)
    assert isinstance(found, Float8Tensor)


def test_a_gradient_with_a_use_in_high_precision_travels_in_high_precision(monkeypatch):
    """Its first use has one scale; float8 data would lose what grad_weight reads."""
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=off, cast_config_grad_output_for_grad_weight=off
    )
    found, g = gathered_gradient(config, monkeypatch)
    assert type(found) is torch.Tensor and torch.equal(found, g)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 12])
def test_parts_are_those_of_torch_chunk(length, size):
    x = torch.arange(2 * length).reshape(2, length)
    chunks = list(x.chunk(size, 1)) if length else []
    for rank in range(size):
        ranks = Ranks("group", size, rank)
        expected = chunks[rank] if rank < len(chunks) else x[:, :0]
        assert torch.equal(part_of(x, 1, ranks), expected)
        assert ranks.length_here(length) == expected.shape[1]


def test_lengths_on_an_accelerator_are_not_compared():
    check_even(torch.empty(2, 3, device="meta"), 0, Ranks("group", 2, 0), "a layer")
