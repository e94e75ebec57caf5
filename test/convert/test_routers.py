"""Routers are found by their place beside experts, whatever holds them, and nothing else is one."""

from __future__ import annotations

import pytest
from torch import nn

from float8 import Float8Linear, convert_to_float8_training, filters


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(32, 16).weight)


class TopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(32, 16)


def linear() -> nn.Linear:
    return nn.Linear(32, 16)


def mlp() -> nn.ModuleDict:
    return nn.ModuleDict({"gate_proj": linear(), "up": linear()})


def left_as_routers(model: nn.Module) -> set[str]:
    skipped = convert_to_float8_training(model).float8_conversion.skipped
    return {fqn for fqn, reason in skipped.items() if "routes tokens to experts" in reason}


@pytest.mark.parametrize(
    ("block", "routers"),
    [
        ({"gate": linear(), "experts": nn.ModuleList([mlp()])}, {"gate"}),
        ({"router": Router(), "experts": mlp()}, {"router"}),
        ({"choose": TopKRouter(), "routed_experts": mlp()}, {"choose.scores"}),
        ({"shared_expert_gate": linear(), "shared_expert": mlp()}, {"shared_expert_gate"}),
        ({"gate": nn.Sequential(linear(), linear()), "mlp_experts": mlp()}, {"gate.0", "gate.1"}),
        ({"gate": linear(), "up": linear()}, set()),  # a gated MLP without experts
        ({"gate_proj": linear(), "navigate": linear(), "experts": mlp()}, set()),
        ({"experts": nn.ModuleDict({"gate": linear()}), "up": linear()}, set()),
    ],
)
def test_which_layers_are_routers(block, routers):
    model = nn.ModuleDict({"block": nn.ModuleDict(block), "head": linear()})
    assert left_as_routers(model) == {f"block.{name}" for name in routers}
    assert type(model["head"]) is Float8Linear


def test_a_router_by_itself_is_converted_as_the_report_says():
    block = nn.ModuleDict({"gate": linear(), "experts": mlp()})
    convert_to_float8_training(block)
    assert type(block["gate"]) is nn.Linear
    block["gate"] = convert_to_float8_training(block["gate"])
    assert type(block["gate"]) is Float8Linear
    convert_to_float8_training(block, module_filter_fn=filters.skip_names("gate"))
    assert type(block["gate"]) is Float8Linear
