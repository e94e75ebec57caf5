"""Whatever runs inside `untouched` leaves gradients, buffers, modes and random states alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from assertions import assert_bitwise
from torch import nn

from float8.config import Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.numerics.untouched import seed_everything, untouched


def a_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16))
    config = Float8LinearConfig.from_recipe_name("delayed")
    return convert_to_float8_training(model, config=config)


def disturb(model: nn.Module) -> None:
    """Everything that a run may do to a model."""
    seed_everything(3)
    model(torch.randn(8, 16)).square().sum().backward()
    model.eval()
    model[1].running_mean = torch.full((32,), 7.0)  # another tensor in its place
    model[0].cast_input.current_amax.fill_(float("nan"))
    random.random()


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_left_behind(raises):
    model = a_model()
    model[2].eval()  # modes differ from module to module
    model(torch.randn(8, 16)).sum().backward()
    model[3].bias.grad = None
    before = copy.deepcopy(model.state_dict())
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = {name: None if g is None else g.clone() for name, g in grads.items()}
    modes = {name: m.training for name, m in model.named_modules()}
    buffers = dict(model.named_buffers())
    random_states = torch.get_rng_state(), random.getstate()

    def run():
        with untouched(model):
            disturb(model)
            if raises:
                raise KeyError("inside")

    if raises:
        with pytest.raises(KeyError):
            run()
    else:
        run()
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        if parameter.grad is not None:
            assert_bitwise(parameter.grad, values[name], name)
    for name, value in model.state_dict().items():
        assert_bitwise(value, before[name], name)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]


def test_an_optimizer_inside_backward_rests():
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    steps = []

    def step(parameter):
        steps.append(parameter)
        parameter.data -= parameter.grad

    model.weight.register_post_accumulate_grad_hook(step)
    with untouched(model):
        model(torch.randn(4, 8)).sum().backward()
    assert steps == []
    assert_bitwise(model.weight.detach(), before)
    model(torch.randn(4, 8)).sum().backward()
    assert len(steps) == 1


def test_a_backward_that_is_waiting_still_runs():
    model = a_model()
    loss = model(torch.randn(8, 16)).square().sum()  # saved scales, before they are ready
    with untouched(model):
        disturb(model)
    loss.backward()
    assert model[0].weight.grad is not None


class Keeps(nn.Module):
    """Makes buffers when it is called first, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled_later", None)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self) -> float:
        self.filled_later = torch.ones(2)
        self.register_buffer("new", torch.ones(3), persistent=False)
        return float(torch.rand((), generator=self.generator))


def test_buffers_that_a_forward_makes_go_again():
    model = Keeps()
    with untouched(model):
        model()
    assert model._buffers == {"filled_later": None}
    assert not model._non_persistent_buffers_set


def test_what_is_one_buffer_stays_one():
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
    model[1].running_mean = model[0].running_mean
    with untouched(model):
        assert model[1].running_mean is model[0].running_mean


def draw(model: Keeps) -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand()), model()


def test_seeds_reach_torch_python_numpy_and_the_models_own_generators():
    model, numbers = Keeps(), []
    for _ in range(2):
        seed_everything(5, model)
        numbers.append(draw(model))
    assert numbers[0] == numbers[1]


def test_no_random_number_is_lost():
    model = Keeps()
    seed_everything(6, model)
    expected = draw(model)
    seed_everything(6, model)
    with untouched(model):
        seed_everything(7, model)
        draw(model)
    assert draw(model) == expected


@pytest.mark.parametrize("started", [False, True])
def test_random_numbers_of_all_gpus_are_kept_and_one_that_nobody_started_is_let_be(
    monkeypatch, started
):
    """Of a model on the CPU too: all GPUs are seeded."""
    gpus = [torch.Generator().manual_seed(100 + i) for i in range(2)]
    before, calls = [g.get_state() for g in gpus], []

    def seed_all(seed):
        calls.append(seed)
        for g in gpus:
            g.manual_seed(seed)

    for name, fake in {
        "is_initialized": lambda: started,
        "device_count": lambda: 2,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device: gpus[device].get_state(),
        "set_rng_state": lambda state, device: gpus[device].set_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with untouched(model := Keeps()):
        seed_everything(3, model)
    assert calls == ([3] if started else [])
    for g, state in zip(gpus, before, strict=True):
        assert torch.equal(g.get_state(), state)
