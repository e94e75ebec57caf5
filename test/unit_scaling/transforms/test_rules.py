"""Which function is called in place of another, and which calls are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.transforms.rules import rules_of
from float8.unit_scaling.transforms.unit_scale import unit_scale


def silu_3(x):
    return 3 * U.silu(x)


def test_the_users_functions_come_before_the_registered_ones_and_those_before_the_products():
    assert rules_of({F.silu: silu_3})[F.silu] is silu_3
    assert rules_of({silu_3: F.silu})[silu_3] is U.silu
    assert rules_of({})[F.gelu] is U.gelu
    mine = lambda left, right: left @ right  # noqa: E731
    registry.register(torch.matmul, mine, replace=True)
    try:
        assert rules_of({})[torch.matmul] is mine
    finally:
        registry.register(
            torch.matmul, U.matmul, replace=True, keywords={"input": "left", "other": "right"}
        )


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: nn.LSTM(4, 4), (torch.randn(3, 2, 4),), r"lstm at .* weight_ih_l0.*replace="),
        (lambda: nn.GRUCell(4, 4), (torch.randn(2, 4),), "gru_cell at .* weight_ih"),
        (lambda: nn.ConvTranspose2d(3, 4, 2), (torch.randn(2, 3, 4, 4),), "conv_transpose2d"),
        (lambda: nn.Bilinear(3, 4, 2), (torch.randn(5, 3), torch.randn(5, 4)), "bilinear"),
    ],
)
def test_a_product_without_a_unit_scaled_version_is_refused_by_its_weight(make, inputs, message):
    """At a standard deviation of 1 its weight would make the activations grow with the width."""
    with pytest.raises(ValueError, match=message):
        unit_scale(make())(*inputs)


def test_such_a_product_stays_as_it_is_where_its_weight_is_frozen_or_it_is_replaced_by_itself():
    plain, x = nn.LSTM(4, 4).requires_grad_(False), torch.randn(3, 2, 4)
    assert torch.equal(unit_scale(plain)(x)[0], plain(x)[0])
    model = unit_scale(nn.Bilinear(3, 4, 2), replace={F.bilinear: F.bilinear})
    assert model(torch.randn(5, 3), torch.randn(5, 4)).shape == (5, 2)


def test_a_parameter_that_is_none_of_the_models_is_refused_by_its_line():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4)]  # not a ModuleList

        def forward(self, x):
            return self.layers[0](x)

    with pytest.raises(ValueError, match=r"test_rules.*\(4, 4\).* none of the model's"):
        unit_scale(Hidden())(torch.randn(2, 4))
