"""Learning rates are those of u-muP's table 2, groups have one each, a step is torch's step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling.optim import (
    lr_scale_func_adam,
    lr_scale_func_sgd,
    scaled_parameters,
)

# --- the learning rate of a parameter: the table, written out once more

# shape, type, depth -> Adam, SGD behind a constrained readout
TABLE = [
    ((12, 9), "weight", None, 1 / 3, 3.0),
    ((12, 9), "weight", 4, 1 / 6, 1.5),
    ((12, 9), "output", None, 1.0, 1.0),
    ((12, 9), "output", 16, 0.25, 0.25),
    ((12,), "bias", None, 1.0, 12.0),
    ((12,), "bias", 9, 1 / 3, 4.0),
    ((12,), "norm", None, 1.0, 12.0),
    ((3, 4), "norm", None, 1.0, 12.0),  # normalised together: the width is 12
    ((16,), "weight", None, 0.25, 4.0),
    ((5, 3, 3), "weight", None, 1 / 3, 3.0),  # a convolution: fan-in counts the kernel
    ((5, 4, 2, 2), "weight", None, 0.25, 4.0),
    ((), "weight", None, 1.0, 1.0),
    ((), "bias", None, 1.0, 1.0),
    ((7, 1), "weight", None, 1.0, 1.0),
]


@pytest.mark.parametrize(("shape", "mup_type", "depth", "adam", "sgd"), TABLE)
def test_learning_rates_follow_the_table(shape, mup_type, depth, adam, sgd):
    p = uu.Parameter(torch.empty(shape), mup_type, depth)
    assert math.isclose(lr_scale_func_adam(p), adam)
    assert math.isclose(lr_scale_func_sgd("to_output_scale")(p), sgd)
    assert lr_scale_func_sgd(None)(p) == lr_scale_func_adam(p)


# --- groups


def layers():
    return nn.Sequential(
        uu.Linear(16, 16, bias=True), uu.Linear(16, 16), uu.Linear(16, 64), uu.LinearReadout(64, 5)
    )


def scaled(params, **options):
    return scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


def tensors(group):
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def rates_of(groups):
    return {id(p): g["lr"] for g in groups for p in tensors(g)}


WAYS = {
    "parameters": lambda m: m.parameters(),
    "a list": lambda m: list(m.parameters()),
    "a generator": lambda m: (p for p in m.parameters()),
    "named parameters": lambda m: m.named_parameters(),
    "the module": lambda m: m,
    "a group of a generator": lambda m: [{"params": m.parameters()}],
    "a group per layer": lambda m: [{"params": layer.parameters()} for layer in m],
    "a group per tensor": lambda m: [{"params": p} for p in m.parameters()],
    "a generator of groups": lambda m: ({"params": layer.named_parameters()} for layer in m),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_name_parameters_gives_each_once_with_its_learning_rate(way):
    m = layers()
    groups = scaled(way(m))
    assert rates_of(groups) == {id(p): 2.0 * lr_scale_func_adam(p) for p in m.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(m.parameters()))


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_independent_weight_decay_is_the_same_for_all_per_step(lr):
    for group in scaled(layers(), lr=lr, weight_decay=0.125):
        assert float(group["lr"]) * group["weight_decay"] == pytest.approx(0.125)
    for group in scaled(layers(), lr=lr, weight_decay=0.125, independent_weight_decay=False):
        assert group["weight_decay"] == 0.125


# --- optimizers

OPTIMIZERS = [uu.optim.SGD, uu.optim.Adam, uu.optim.AdamW]
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(uu.Linear(16, 12, bias=True), uu.GELU(), uu.LinearReadout(12, 5))


def give_gradients(m, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in m.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@every_optimizer
def test_a_step_is_torchs_with_the_parameters_own_learning_rate(optimizer):
    theirs = getattr(torch.optim, optimizer.__name__)
    m, by_hand = model(), model()
    options = {"momentum": 0.9} if optimizer is uu.optim.SGD else {"betas": (0.5, 0.6)}
    mine = optimizer(m.parameters(), 0.25, *options.values())
    scales = {"weight": 0.25, "bias": 1.0, "output": 1.0}
    others = [
        theirs([p], lr=0.25 * scales[p.mup_type], weight_decay=0, **options)
        for p in by_hand.parameters()
    ]
    for seed in range(3):
        give_gradients(m, seed)
        give_gradients(by_hand, seed)
        for o in (mine, *others):
            o.step()
    for p, q in zip(m.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@every_optimizer
def test_groups_added_later_are_scaled_too(optimizer):
    made = optimizer(model(), lr=0.5, weight_decay=0.25)
    late = uu.Linear(64, 4, bias=True)
    before = len(made.param_groups)
    made.add_param_group({"params": late.named_parameters()})
    assert [g["lr"] for g in made.param_groups[before:]] == [0.0625, 0.5]
    assert [g["weight_decay"] for g in made.param_groups[before:]] == [4.0, 0.5]


@every_optimizer
def test_a_plain_model_is_refused_unless_allowed(optimizer):
    with pytest.raises(ValueError, match="weight of shape"):
        optimizer(nn.Linear(3, 4))
    m = nn.Sequential(uu.Linear(16, 4), nn.Linear(4, 3))
    made = optimizer(m, lr=2.0, allow_non_unit_scaling_params=True)
    rates = rates_of(made.param_groups)
    assert [rates[id(p)] for p in m.parameters()] == [0.5, 2.0, 2.0]
    assert {g["weight_decay"] for g in made.param_groups} == {0}
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizer([])


def test_sgd_knows_the_readouts_constraint():
    made = uu.optim.SGD(model(), lr=1.0, readout_constraint="to_output_scale")
    assert [g["lr"] for g in made.param_groups] == [4.0, 12.0, 1.0]
