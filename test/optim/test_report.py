"""What `report` counts: bytes, values that became zero, and the ends of the range."""

import torch
from torch import nn

from float8.optim import AdamW, report


def stepped(**options):
    torch.manual_seed(3)
    p = nn.Parameter(torch.zeros(8, 100))
    ours = AdamW([p], min_size=0, group_size=32, **options)
    p.grad = torch.randn(8, 100)
    p.grad[0, :32] = 0  # a group of zeros underflows nothing
    p.grad[1, 5], p.grad[1, 40] = 1e-6, 1e-6  # far below 2^-9 / 448 of their groups
    ours.step()
    return p, ours


def test_underflow_is_counted():
    p, ours = stepped()
    found = report(ours)
    first, second = found["exp_avg"], found["exp_avg_sq"]
    codes = ours.state[p]["exp_avg_sq"].codes.float()
    assert (first.elements, first.coded, first.zero) == (800, 800, 2)
    assert second.zero == 0
    assert second.smallest == int((codes == 2.0**-9).sum()) >= 2
    assert first.nbytes == 800 + 8 * 4 * 4


def test_float32_states_lose_nothing():
    _, ours = stepped(first_moment="float32")
    found = report(ours)["exp_avg"]
    assert (found.elements, found.coded, found.zero, found.nbytes) == (800, 0, 0, 3200)


def test_a_nan_is_counted():
    p, ours = stepped()
    p.grad[3, 3] = float("nan")
    ours.step()
    assert report(ours)["exp_avg_sq"].nan == 1
