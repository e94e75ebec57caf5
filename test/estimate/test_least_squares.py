"""Costs are found again from the times that they make, and never come out negative."""

import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from float8.estimate.least_squares import explain, nonnegative

POSITIVE = st.floats(0.1, 10.0)


@given(st.lists(POSITIVE, min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_known_costs_are_recovered(costs, seed):
    torch.manual_seed(seed)
    counts = (torch.rand(12, 4, dtype=torch.float64) + 0.01).tolist()
    seconds = [sum(c * n for c, n in zip(costs, row, strict=True)) for row in counts]
    assert explain(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_magnitudes_do_not_matter():
    counts = [[1e12, 1.0, 1e6], [4e12, 1.0, 5e6], [2e13, 1.0, 1e7], [1e11, 1.0, 2e5]]
    costs = [2e-15, 5e-6, 1e-9]
    seconds = [sum(c * n for c, n in zip(costs, row, strict=True)) for row in counts]
    assert explain(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_a_cost_that_would_be_negative_is_zero():
    # Free of the bound, the line through these is 2 n - 1.
    (slope, offset) = explain([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]], [1.0, 3.0, 5.0])
    assert offset == 0 and slope > 0


def test_errors_count_relative_to_the_time():
    # One cost for both: relative errors of 1 and 1e6 weigh alike, absolute ones would not.
    (cost,) = explain([[1.0], [1e6]], [1.0, 2e6])
    assert cost == pytest.approx(1.2)  # least (cost - 1)^2 + (cost/2 - 1)^2


def test_a_column_of_nothing_costs_nothing():
    assert explain([[1.0, 0.0], [2.0, 0.0]], [3.0, 6.0]) == pytest.approx([3.0, 0.0])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_no_step_from_the_solution_goes_down(seed, unknowns):
    # The conditions of Karush, Kuhn and Tucker, which only the minimum meets.
    torch.manual_seed(seed)
    a = torch.randn(8, unknowns, dtype=torch.float64)
    assert_is_the_minimum(a, torch.randn(8, dtype=torch.float64))


def assert_is_the_minimum(a, b):
    x = nonnegative(a, b)
    downhill = a.t() @ (b - a @ x)
    assert bool((x >= 0).all())
    assert bool((downhill <= 1e-8).all())
    assert bool((downhill[x > 0].abs() <= 1e-8).all())


@pytest.fixture
def within_a_minute():
    """An active set that grows where it has to shrink never ends."""

    def end(*_):
        raise AssertionError("nonnegative does not end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_unknowns_that_leave_stay_out_until_they_are_wanted_again(within_a_minute):
    # Of twelve, several leave in one step, and some of them come back.
    for seed in range(60):
        torch.manual_seed(seed)
        a = torch.randn(15, 12, dtype=torch.float64)
        assert_is_the_minimum(a, torch.randn(15, dtype=torch.float64))


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="nothing to fit"):
        explain([], [])
