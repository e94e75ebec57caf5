"""Optimizers: a step is torch's step, with the learning rates of u-muP."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu

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
    mine = optimizer(m.parameters(), lr=0.25)
    scales = {"weight": 0.25, "bias": 1.0, "output": 1.0}
    others = [
        theirs([p], lr=0.25 * scales[p.mup_type], weight_decay=0) for p in by_hand.parameters()
    ]
    for seed in range(3):
        give_gradients(m, seed)
        give_gradients(by_hand, seed)
        for o in (mine, *others):
            o.step()
    for p, q in zip(m.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@every_optimizer
def test_torchs_arguments_pass_through_by_name_and_in_order(optimizer):
    if optimizer is uu.optim.SGD:
        assert optimizer(model(), 0.1, 0.9).param_groups[0]["momentum"] == 0.9
        group = optimizer(model(), 0.1, momentum=0.9, nesterov=True).param_groups[0]
        assert group["nesterov"]
    else:
        assert optimizer(model(), 0.1, (0.5, 0.6)).param_groups[0]["betas"] == (0.5, 0.6)
        assert optimizer(model(), 0.1, amsgrad=True).param_groups[0]["amsgrad"]


def test_weight_decay_is_the_same_at_every_learning_rate():
    for lr in (1e-3, 0.5):
        m = model()
        before = [p.detach().clone() for p in m.parameters()]
        optimizer = uu.optim.AdamW(m, lr=lr, weight_decay=0.125)
        for p in m.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, q in zip(m.parameters(), before, strict=True):
            torch.testing.assert_close(p, q * 0.875)


def test_by_default_nothing_decays():
    assert {g["weight_decay"] for g in uu.optim.AdamW(model()).param_groups} == {0}


@every_optimizer
@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_schedules_multiply_all_learning_rates_alike(optimizer, lr):
    m = model()
    made = optimizer(m, lr=lr)
    peaks = [float(g["lr"]) for g in made.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5**step)
    for step in range(3):
        found = [float(g["lr"]) for g in made.param_groups]
        assert found == pytest.approx([peak * 0.5**step for peak in peaks])
        give_gradients(m)
        made.step()
        schedule.step()


def test_a_schedule_that_sets_the_rate_takes_one_per_group():
    made = uu.optim.AdamW(model(), lr=0.5)
    peaks = [g["lr"] for g in made.param_groups]
    torch.optim.lr_scheduler.OneCycleLR(made, max_lr=peaks, total_steps=10)
    assert [g["lr"] * 25 for g in made.param_groups] == pytest.approx(peaks)


@every_optimizer
def test_a_group_that_is_refused_leaves_nothing_behind(optimizer):
    m, late = model(), uu.Linear(64, 4)
    made = optimizer(m.parameters(), lr=0.5)
    before = [(g["lr"], g["params"]) for g in made.param_groups]
    # two learning rates: the first of two groups would be taken before the second is refused
    with pytest.raises(ValueError, match="more than one parameter group"):
        made.add_param_group({"params": [late.weight, *m.parameters()]})
    assert [(g["lr"], g["params"]) for g in made.param_groups] == before
    made.add_param_group({"params": [late.weight]})


@every_optimizer
def test_groups_added_later_are_scaled_too(optimizer):
    made = optimizer(model(), lr=0.5, weight_decay=0.25)
    late = uu.Linear(64, 4, bias=True)
    before = len(made.param_groups)
    made.add_param_group({"params": late.named_parameters()})
    assert [g["lr"] for g in made.param_groups[before:]] == [0.0625, 0.5]
    assert [g["weight_decay"] for g in made.param_groups[before:]] == [4.0, 0.5]


@every_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_optimizer_still_scales(optimizer, copied):
    made = optimizer(model(), lr=0.5)
    other = copied(made)
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in made.param_groups]
    other.add_param_group({"params": uu.Linear(64, 4).named_parameters()})
    assert other.param_groups[-1]["lr"] == 0.0625


@every_optimizer
def test_a_parameter_in_two_groups_is_refused_as_by_torch(optimizer):
    m = model()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer([{"params": m[0].weight}, {"params": [m[0].weight], "lr": 1.0}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer(m).add_param_group({"params": m[0].named_parameters()})


@every_optimizer
def test_a_plain_model_is_refused_unless_allowed(optimizer):
    with pytest.raises(ValueError, match="weight of shape"):
        optimizer(nn.Linear(3, 4))
    made = optimizer(nn.Linear(3, 4), lr=0.5, allow_non_unit_scaling_params=True)
    assert [g["lr"] for g in made.param_groups] == [0.5]


@every_optimizer
def test_no_parameters_are_refused_as_by_torch(optimizer):
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizer([])


@every_optimizer
def test_a_checkpoint_resumes_to_the_same_bits(optimizer):
    options = {"momentum": 0.9} if optimizer is uu.optim.SGD else {}
    first, second = model(), model()
    one = optimizer(first, lr=0.1, **options)
    give_gradients(first, 1)
    one.step()
    two = optimizer(second, lr=0.1, **options)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for m, o in ((first, one), (second, two)):
        give_gradients(m, 2)
        o.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_sgd_knows_the_readouts_constraint():
    made = uu.optim.SGD(model(), lr=1.0, readout_constraint="to_output_scale")
    assert [g["lr"] for g in made.param_groups] == [4.0, 12.0, 1.0]


def test_updates_move_outputs_alike_at_every_width():
    # What the rules are for: one step of Adam changes the output as much at width 64 as at 512.
    def change(width):
        torch.manual_seed(3)
        m = nn.Sequential(uu.Linear(32, width), uu.Linear(width, width), uu.LinearReadout(width, 8))
        x, g = torch.randn(128, 32), torch.randn(128, 8)
        optimizer = uu.optim.Adam(m, lr=0.1)
        before = m(x)
        before.backward(g)
        optimizer.step()
        return float((m(x) - before).detach().square().mean().sqrt())

    assert math.isclose(change(64), change(512), rel_tol=0.3)
