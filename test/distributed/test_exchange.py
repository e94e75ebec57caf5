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

OFF = CastConfig(scaling_type=ScalingType.DISABLED)
POW2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
BLOCK = CastConfig(granularity=Blockwise(128, 128))
WIDE_GRADIENT = Float8LinearConfig(
    cast_config_input_for_grad_weight=OFF, cast_config_grad_output_for_grad_weight=OFF
)
SENT = {  # whether one scale serves all GEMMs of the input
    **{name: (RECIPES[name], name in ("tensorwise", "delayed", "unit")) for name in RECIPES},
    "a product in high precision": (WIDE_GRADIENT, False),
    "a second cast": (Float8LinearConfig(cast_config_input_for_grad_weight=POW2), False),
    "blocks": (Float8LinearConfig(BLOCK, BLOCK, BLOCK, emulate=True), False),
}


@pytest.mark.parametrize("name", SENT)
def test_inputs_travel_in_float8_where_one_scale_serves_all_gemms(name):
    config, sent = SENT[name]
    assert sends_input_in_float8(config.plan) == sent


@pytest.mark.parametrize(
    ("config", "sent"),
    [(RECIPES["tensorwise"], True), (RECIPES["unit"], True), (WIDE_GRADIENT, False)],
)
def test_a_gradient_of_one_scale_travels_in_float8(config, sent, monkeypatch):
    """Of a rowwise layer. Float8 data would lose what a product in high precision reads."""
    monkeypatch.setattr(exchange, "gather", lambda x, *_: x)
    g = torch.randn(32, 16)
    ctx = SimpleNamespace(
        plan=plan_on(config, g.device, g.dtype), scatter=0, length=32, record=False,
        states=(None, None, None), ranks=SimpleNamespace(group=None),
    )  # fmt: skip
    found = exchange._gather_grad_output(ctx, g)
    assert isinstance(found, Float8Tensor) if sent else found is g


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
