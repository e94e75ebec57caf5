"""What is refused says which parameter, what is wrong with it, and how to go on."""

import pytest
import torch
from torch import nn

from float8 import E4M3, Blockwise, Float8Tensor
from float8.optim import SGD, Adam, AdamW, Lion


def weight(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW([weight(2)], amsgrad=True), "amsgrad=True is not supported.*grows"),
        (lambda: AdamW([weight(2)], lr=-1.0), "lr must be at least 0, got -1"),
        (lambda: AdamW([weight(2)], lr=float("nan")), "lr must be at least 0, got nan"),
        (lambda: AdamW([weight(2)], lr=torch.ones(2)), r"lr as a tensor must have one element"),
        (lambda: AdamW([weight(2)], betas=(0.9, 1.0)), r"betas\[1\] must be .* below 1, got 1"),
        (lambda: AdamW([weight(2)], eps=-1e-8), "eps must be at least 0"),
        (lambda: Adam([weight(2)], weight_decay=-1.0), "weight_decay must be at least 0"),
        (lambda: AdamW([weight(2)], first_moment="float16"), "first_moment must be one of"),
        (lambda: AdamW([weight(2)], second_moment="fp8"), "float8, float16, float32, got 'fp8'"),
        (lambda: AdamW([weight(2)], group_size=0), "group_size must be at least 1, got 0"),
        (lambda: AdamW([weight(2)], min_size=-1), "min_size must be at least 0, got -1"),
        (lambda: AdamW([weight(2)], state_rounding="up"), "auto, nearest, stochastic, got 'up'"),
        (lambda: SGD([weight(2)], momentum=0.0), r"momentum=0 .* use torch.optim.SGD"),
        (lambda: SGD([weight(2)], nesterov=True, dampening=0.5), "nesterov needs dampening=0"),
        (lambda: Lion([weight(2)], betas=(-0.1, 0.9)), r"betas\[0\] must be at least 0"),
    ],
)
def test_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW([weight(2)], lr="1e-3"), "lr must be a number .*, got '1e-3'"),  # of YAML
        (lambda: AdamW([weight(2)], betas=(0.9,)), r"betas must be two numbers .* got \(0.9,\)"),
        (lambda: Lion([weight(2)], betas=0.9), r"betas must be two numbers .* got 0.9"),
        (lambda: AdamW([weight(2)], group_size=64.0), "group_size must be an int, got 64.0"),
        (lambda: AdamW([weight(2)], group_size=True), "group_size must be an int, got True"),
        (
            lambda: AdamW([("layer.weight", weight(2, 3, dtype=torch.float64))]),
            r"'layer.weight' of shape \(2, 3\) and dtype torch.float64 .*param.data.float\(\)",
        ),
        (lambda: AdamW([weight(2), weight(3, dtype=torch.cfloat)]), r"parameter 1 of .*complex64"),
        (
            lambda: AdamW([torch.zeros(3, dtype=torch.int32)]),
            r"parameter 0 of shape \(3,\) and dtype torch.int32",
        ),
        (
            lambda: AdamW(
                [Float8Tensor.from_high_precision(torch.randn(8, 8), E4M3, Blockwise(1, 4))]
            ),
            r"block \(1, 4\).*granularity=Tensorwise\(\)",
        ),
    ],
)
def test_types_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


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
    """Its steps would be float32's, without a word."""
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters())
    model.double()(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(TypeError, match=r"'weight' .*float64.*model.float\(\)"):
        optimizer.step()
    assert not optimizer.state
