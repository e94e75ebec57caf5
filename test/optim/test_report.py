"""What `report` counts: bytes, values that became zero, the ends of the range, and noise."""

import pytest
import torch
from torch import nn

from float8.optim import AdamW, report


def stepped(**options):
    torch.manual_seed(3)
    p, q = nn.Parameter(torch.zeros(8, 100)), nn.Parameter(torch.zeros(8, 100))
    ours, exact = AdamW([p], min_size=0, group_size=32, **options), torch.optim.AdamW([q])
    p.grad = torch.randn(8, 100)
    p.grad[0, :32] = 0  # a group of zeros underflows nothing
    p.grad[1, 5], p.grad[1, 40] = 1e-6, 1e-6  # far below 2^-9 / 448 of their groups
    q.grad = p.grad.clone()
    ours.step()
    exact.step()
    return p, ours, exact


def test_underflow_is_counted():
    p, ours, _ = stepped()
    found = report(ours)
    first, second = found["exp_avg"], found["exp_avg_sq"]
    codes = ours.state[p]["exp_avg_sq"].codes.float()
    assert (first.elements, first.coded, first.zero) == (800, 800, 2)
    assert second.zero == 0
    assert second.smallest == int((codes == 2.0**-9).sum()) >= 2
    assert first.nbytes == 800 + 8 * 4 * 4
    assert first.sqnr is None


def test_noise_is_measured_against_a_twin():
    p, ours, exact = stepped()
    found = report(ours, exact)
    assert 25 < found["exp_avg"].sqnr < 40
    assert 20 < found["exp_avg_sq"].sqnr < 40
    ours.state[p]["exp_avg"].codes.view(torch.uint8).zero_()
    assert report(ours, exact)["exp_avg"].sqnr == pytest.approx(0, abs=1e-6)


def test_float32_states_have_no_noise():
    _, ours, exact = stepped(first_moment="float32")
    found = report(ours, exact)["exp_avg"]
    assert (found.coded, found.zero, found.nbytes) == (0, 0, 3200)
    assert found.sqnr > 120


def test_a_nan_is_counted():
    p, ours, _ = stepped()
    p.grad[3, 3] = float("nan")
    ours.step()
    assert report(ours)["exp_avg_sq"].nan == 1
