"""The counts of reductions."""

import torch

from float8.distributed.gradients.state import Float8Gradients


def test_counts_add_up_and_reset():
    state = Float8Gradients()
    for _ in range(2):
        state.count(torch.tensor([20, 300, 0]), 500, 500, ends_step=False)
        state.count(torch.tensor([0, 0, 1]), 100, 100, ends_step=True)
    report = state.report()
    assert (report.steps, report.elements, report.sampled) == (2, 1200, 1200)
    assert (report.flushed, report.flushed_before, report.nonfinite) == (40, 600, 2)
    text = str(report)
    assert "2 reductions of 1200 gradient values" in text
    assert "3.333% of the means" in text and "50.000% of the parts" in text
    state.reset()
    report = state.report()
    assert (report.steps, report.elements, report.flushed, report.nonfinite) == (0, 0, 0, 0)
