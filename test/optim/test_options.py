"""What is refused says which parameter, what is wrong with it, and what to do instead."""

import pytest
import torch
from torch import nn

from float8 import E4M3, Blockwise, Float8Tensor
from float8.optim import SGD, Adam, AdamW, Lion


def weight(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


def in_blocks():
    return Float8Tensor.from_high_precision(torch.randn(8, 8), E4M3, Blockwise(1, 4))


def with_transposed_copy():
    x = Float8Tensor.from_high_precision(torch.randn(8, 16), E4M3)
    data_t = x.float8_data.t().contiguous()
    return Float8Tensor(x.float8_data, x.scale, x.block, x.dtype, data_t)


# (optimizer, options, what the message says)
VALUES = [
    (AdamW, {"amsgrad": True}, "amsgrad"),
    (AdamW, {"lr": -1.0}, "lr must be at least 0, got -1"),
    (AdamW, {"lr": float("nan")}, "lr must be at least 0, got nan"),
    (AdamW, {"lr": torch.ones(2)}, r"lr as a tensor must have one element"),
    (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\] must be .* below 1, got 1"),
    (AdamW, {"eps": -1e-8}, "eps"),
    (Adam, {"weight_decay": -1.0}, "weight_decay"),
    (AdamW, {"first_moment": "float16"}, "first_moment"),
    (AdamW, {"second_moment": "fp8"}, "float8, float16, float32, got 'fp8'"),
    (AdamW, {"group_size": 0}, "group_size must be at least 1, got 0"),
    (AdamW, {"min_size": -1}, "min_size"),
    (AdamW, {"state_rounding": "up"}, "auto, nearest, stochastic, got 'up'"),
    (SGD, {"momentum": 0.0}, r"use torch.optim.SGD"),
    (SGD, {"nesterov": True, "dampening": 0.5}, "nesterov"),
    (Lion, {"betas": (-0.1, 0.9)}, r"betas\[0\] must be at least 0"),
]
TYPES = [
    (AdamW, {"lr": "1e-3"}, "lr must be a number .*, got '1e-3'"),  # of YAML
    (AdamW, {"betas": (0.9,)}, r"betas must be two numbers .* got \(0.9,\)"),
    (Lion, {"betas": 0.9}, r"betas must be two numbers .* got 0.9"),
    (AdamW, {"group_size": 64.0}, "group_size must be an int, got 64.0"),
    (AdamW, {"group_size": True}, "group_size must be an int, got True"),
    (AdamW, {"momentum": 0.9}, "AdamW.*unexpected keyword argument 'momentum'"),
    (Lion, {"second_moment": "float8"}, "Lion.*unexpected keyword argument 'second_moment'"),
    (
        AdamW,
        {"params": [("layer.weight", weight(2, 3, dtype=torch.float64))]},
        r"'layer.weight' .*float64",
    ),
    (AdamW, {"params": [weight(2), weight(3, dtype=torch.cfloat)]}, r"parameter 1 .*complex64"),
    (AdamW, {"params": [torch.zeros(3, dtype=torch.int32)]}, r"parameter 0 of shape \(3,\)"),
    (AdamW, {"params": [in_blocks()]}, r"block \(1, 4\).*granularity=Tensorwise\(\)"),
    (AdamW, {"params": [with_transposed_copy()]}, "leave stale"),
]
ROWS = [*((ValueError, *row) for row in VALUES), *((TypeError, *row) for row in TYPES)]


@pytest.mark.parametrize(("error", "cls", "options", "message"), ROWS)
def test_options_and_parameters_are_refused(error, cls, options, message):
    with pytest.raises(error, match=message):
        cls(**{"params": [weight(2)], **options})


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = AdamW([weight(3)])
    for group in ({"params": [weight(2)], "lr": -1.0}, {"params": [weight(2).double()]}):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weight(2)]})


def test_a_sparse_gradient_is_refused_before_anything_changes():
    table, other = nn.Embedding(10, 4, sparse=True), weight(5)
    optimizer = AdamW([other, table.weight])
    table(torch.tensor([1, 2])).sum().backward()
    other.grad = torch.ones(5)
    before = other.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter 1 .*sparse.*SparseAdam"):
        optimizer.step()
    assert torch.equal(other, before)
    assert not optimizer.state


def test_a_model_that_became_float64_is_refused_before_anything_changes():
    """Its steps would be float32's, without an error."""
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters())
    model.double()(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(TypeError, match=r"'weight' .*float64.*model.float\(\)"):
        optimizer.step()
    assert not optimizer.state
