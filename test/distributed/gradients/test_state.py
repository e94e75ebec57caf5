"""Counts add up, can be read, and move with a checkpoint."""

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


def test_buckets_and_steps_add_up():
    report = counted().report()
    assert (report.steps, report.elements, report.sampled) == (2, 1200, 1200)
    assert (report.saturated, report.flushed, report.flushed_before) == (2, 40, 600)
    assert (report.nonfinite, report.mu) == (2, 1.0)


def test_the_report_reads_as_a_sentence():
    said = str(counted().report())
    assert "2 reductions of 1200 gradient values" in said
    assert "0.167% saturated" in said and "50.000% of the parts" in said and "mu 1" in said


def test_a_new_count_begins_and_mu_stays():
    state = counted()
    state.controller.mu.fill_(0.5)
    state.reset()
    report = state.report()
    assert (report.steps, report.elements, report.flushed, report.mu) == (0, 0, 0, 0.5)


def test_a_checkpoint_holds_plain_tensors_that_restore_everything():
    state, other = counted(), Float8Gradients(controller=ScalingController(0.5))
    saved = state.state_dict()
    assert all(type(value) is torch.Tensor for value in saved.values())
    other.load_state_dict(saved)
    assert other.report() == state.report()


def test_a_unit_of_fsdp_is_a_step():
    state = Float8Gradients()
    counts = torch.tensor([0, 0, 5, 1], dtype=torch.int32)
    state.count(counts, elements=100, sampled=50)
    state.end_step()
    report = state.report()
    assert (report.steps, report.elements, report.sampled, report.flushed_before) == (1, 100, 50, 5)
    assert report.nonfinite == 1
    assert report.mu is None and "mu" not in str(report)


def test_nonsense_is_refused():
    with pytest.raises(TypeError, match="float8 format"):
        Float8Gradients(torch.bfloat16)
    with pytest.raises(ValueError, match="tile of 0"):
        Float8Gradients(E4M3, tile=0)
    with pytest.raises(ValueError, match="lacks"):
        Float8Gradients().load_state_dict({})
