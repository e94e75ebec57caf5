"""The counts of reductions, and the rule of mu (FP8-LM's): both are in a checkpoint."""

import pytest
import torch

from float8.distributed.gradients import Float8Gradients, ScalingController
from float8.formats import E4M3


def counted():
    state = Float8Gradients(controller=ScalingController())
    state.prepare(torch.device("cpu"), 4)
    for _ in range(2):
        state.count(torch.tensor([1, 20, 300, 0], dtype=torch.int32), elements=500, sampled=500)
        state.count(torch.tensor([0, 0, 0, 1], dtype=torch.int32), elements=100, sampled=100)
        state.end_step()
    return state


def test_counts_of_buckets_and_steps_add_up():
    report = counted().report()
    assert (report.steps, report.elements, report.sampled) == (2, 1200, 1200)
    assert (report.saturated, report.flushed, report.flushed_before) == (2, 40, 600)
    assert (report.nonfinite, report.mu) == (2, 1.0)
    text = str(report)
    assert "2 reductions of 1200 gradient values" in text
    assert "0.167% saturated" in text and "50.000% of the parts" in text and "mu 1" in text


def test_reset_keeps_mu():
    state = counted()
    state.controller.mu.fill_(0.5)
    state.reset()
    report = state.report()
    assert (report.steps, report.elements, report.flushed, report.mu) == (0, 0, 0, 0.5)


# --- mu

NONE = torch.tensor(0)
ELEMENTS = 1_000_000


def controller(*args, ranks=64, **kwargs):
    made = ScalingController(*args, **kwargs)
    made.prepare(torch.device("cpu"), ranks)
    return made


@pytest.mark.parametrize(("saturated", "factor"), [(0, 2**0.001), (10, 2**0.001), (11, 0.5)])
def test_mu_is_halved_above_a_thousandth_of_a_percent_saturated(saturated, factor):
    made = controller()
    made.update(torch.tensor(saturated), NONE, ELEMENTS)
    assert made.mu.item() == pytest.approx(factor, rel=1e-6)


def test_mu_doubles_in_a_thousand_steps():
    made = controller()
    made.update(torch.tensor(ELEMENTS), NONE, ELEMENTS)
    assert made.mu == 0.5
    for _ in range(1000):
        made.update(NONE, NONE, ELEMENTS)
    assert made.mu.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"), [(None, 64, 8.0), (3.0, 64, 3.0), (None, 1, 1)]
)
def test_mu_stops_at_the_ceiling(given, ranks, expected):
    made = controller(doubling_steps=1, ceiling=given, ranks=ranks)
    for _ in range(10):
        made.update(NONE, NONE, ELEMENTS)
    assert made.mu == expected


def test_a_step_that_is_not_finite_leaves_mu():
    made = controller(0.75)
    made.update(torch.tensor(ELEMENTS), torch.tensor(2), ELEMENTS)
    made.update(NONE, torch.tensor(1), ELEMENTS)
    assert made.mu == 0.75


def test_mu_stays_the_same_tensor_and_a_saved_one_is_a_copy():
    made = controller()
    mu, saved = made.mu, made.state_dict()
    made.update(torch.tensor(ELEMENTS), NONE, ELEMENTS)
    assert saved["mu"] == 1.0
    made.load_state_dict({"mu": torch.tensor(3.0)})
    assert made.mu is mu and mu == 3.0


REFUSALS = [
    *((lambda s=s: controller().load_state_dict(s), ValueError, "positive finite mu")
      for s in ({"mu": torch.tensor(0.0)}, {"mu": torch.tensor(torch.nan)})),
    *((lambda a=a: ScalingController(**a), ValueError, "ScalingController")
      for a in ({"initial": 0.0}, {"initial": float("inf")}, {"initial": 2.0, "ceiling": 1.0},
                {"threshold": 1.0}, {"threshold": -1e-5}, {"doubling_steps": 0})),
    (lambda: Float8Gradients(torch.bfloat16), TypeError, "float8 format"),
    (lambda: Float8Gradients(E4M3, tile=0), ValueError, "tile of 0"),
    (lambda: Float8Gradients().load_state_dict({}), KeyError, "lost"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "word"), REFUSALS)
def test_arguments_that_mean_nothing_are_refused(call, kind, word):
    with pytest.raises(kind, match=word):
        call()
