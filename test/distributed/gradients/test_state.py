"""The counts of reductions, and the rule of mu (FP8-LM's): both are in a checkpoint."""

import pytest
import torch

from float8.distributed.gradients.state import Float8Gradients, ScalingController

ELEMENTS = 1_000_000


def counted(bad=1):
    state = Float8Gradients(controller=ScalingController())
    state.prepare(torch.device("cpu"), 4)
    for _ in range(2):
        state.count(torch.tensor([1, 20, 300, 0]), 500, 500, ends_step=False)
        state.count(torch.tensor([0, 0, 0, bad]), 100, 100, ends_step=True)
    return state


def test_counts_add_up_and_reset_keeps_mu():
    state = counted()
    report = state.report()
    assert (report.steps, report.elements, report.sampled) == (2, 1200, 1200)
    assert (report.saturated, report.flushed, report.flushed_before) == (2, 40, 600)
    assert (report.nonfinite, report.mu) == (2, 1.0)
    text = str(report)
    assert "2 reductions of 1200 gradient values" in text
    assert "0.167% saturated" in text and "50.000% of the parts" in text and "mu 1" in text
    assert counted(bad=0).report().mu == 0.25  # halved in both steps
    state.controller.mu.fill_(0.5)
    state.reset()
    report = state.report()
    assert (report.steps, report.elements, report.flushed, report.mu) == (0, 0, 0, 0.5)


def updated(saturated, *, nonfinite=0, mu=1.0, steps=1, ranks=64, **options):
    """mu after some steps."""
    controller = ScalingController(mu, **options)
    controller.prepare(torch.device("cpu"), ranks)
    for _ in range(steps):
        controller.update(torch.tensor(saturated), torch.tensor(nonfinite), ELEMENTS)
    return controller.mu.item()


def test_mu_stays_the_same_tensor_and_a_saved_one_is_a_copy():
    state = counted()
    mu, saved = state.controller.mu, state.state_dict()
    mu.fill_(3.0)
    assert saved["mu"] == 1.0
    state.load_state_dict(saved)
    assert state.controller.mu is mu and mu == 1.0


@pytest.mark.parametrize(
    ("mu", "expected"),
    [
        (updated(0), 2**0.001),
        (updated(10), 2**0.001),  # a thousandth of a percent
        (updated(11), 0.5),
        (updated(0, mu=0.5, steps=1000), 1.0),
        (updated(ELEMENTS, nonfinite=2, mu=0.75), 0.75),
        (updated(0, nonfinite=1, mu=0.75), 0.75),
        (updated(0, steps=3100), 8.0),  # the square root of the ranks
        (updated(0, steps=3100, ceiling=3.0), 3.0),
        (updated(0, steps=10, ranks=1), 1.0),
    ],
)
def test_mu_is_halved_on_saturation_and_grows_to_its_ceiling(mu, expected):
    assert mu == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [{"initial": 0.0}, {"initial": float("inf")}, {"initial": 2.0, "ceiling": 1.0}],
)
def test_arguments_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match="ScalingController"):
        ScalingController(**options)
