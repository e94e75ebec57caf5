"""mu follows the rule of FP8-LM: halved above 0.001 % saturated, else doubled in 1000 steps."""

import pytest
import torch

from float8.distributed.gradients import ScalingController

NONE = torch.tensor(0)
ELEMENTS = 1_000_000


def controller(*args, ranks=64, **kwargs):
    made = ScalingController(*args, **kwargs)
    made.prepare(torch.device("cpu"), ranks)
    return made


@pytest.mark.parametrize(("saturated", "factor"), [(0, 2**0.001), (10, 2**0.001), (11, 0.5)])
def test_a_thousandth_of_a_percent_is_the_limit(saturated, factor):
    one = controller()
    one.update(torch.tensor(saturated), NONE, ELEMENTS)
    assert one.mu.item() == pytest.approx(factor, rel=1e-6)


def test_it_doubles_in_a_thousand_steps_after_a_halving():
    one = controller()
    one.update(torch.tensor(ELEMENTS), NONE, ELEMENTS)
    assert one.mu == 0.5
    for _ in range(1000):
        one.update(NONE, NONE, ELEMENTS)
    assert one.mu.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"), [(None, 64, 8.0), (3.0, 64, 3.0), (None, 1, 1)]
)
def test_it_stops_at_the_ceiling(given, ranks, expected):
    one = controller(doubling_steps=1, ceiling=given, ranks=ranks)
    for _ in range(10):
        one.update(NONE, NONE, ELEMENTS)
    assert one.mu == expected


def test_a_step_that_is_not_finite_changes_nothing():
    one = controller(0.75)
    one.update(torch.tensor(ELEMENTS), torch.tensor(2), ELEMENTS)
    one.update(NONE, torch.tensor(1), ELEMENTS)
    assert one.mu == 0.75


def test_mu_is_one_tensor_for_good():
    one = controller()
    mu = one.mu
    one.update(torch.tensor(ELEMENTS), NONE, ELEMENTS)
    one.load_state_dict({"mu": torch.tensor(3.0)})
    assert one.mu is mu and mu == 3.0


def test_what_was_saved_does_not_change_with_it():
    one = controller()
    saved = one.state_dict()
    one.update(torch.tensor(ELEMENTS), NONE, ELEMENTS)
    assert saved["mu"] == 1.0


@pytest.mark.parametrize("state", [{}, {"mu": torch.tensor(0.0)}, {"mu": torch.tensor(torch.nan)}])
def test_a_useless_state_is_refused(state):
    with pytest.raises(ValueError, match="positive finite mu"):
        controller().load_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial": 0.0},
        {"initial": float("inf")},
        {"initial": 2.0, "ceiling": 1.0},
        {"threshold": 1.0},
        {"threshold": -1e-5},
        {"doubling_steps": 0},
    ],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="ScalingController"):
        ScalingController(**arguments)
