"""What norms of rows share: statistics of every row, and variances that cancel nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline, error
from interpreter import launcher
from shapes import DEVICES

from float8.kernels.gpu import normed

EPS, F32 = 1e-6, torch.float32


def statistics(device, x, centred, most=2, amax=True):
    """(partial amaxes, mean, rstd) of the first pass, by at most two programs."""
    weight = torch.ones(x.shape[1], device=device)
    mean = torch.full((len(x), 1), torch.nan, device=device) if centred else None
    rstd = torch.full((len(x), 1), torch.nan, device=device)
    launch = launcher("normed", "launch_rows", device)
    norm = normed.Norm(weight, None, EPS, centred)
    return launch(x, norm, mean, rstd, F32, amax, most), mean, rstd


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("centred", [False, True])
def test_more_rows_than_programs(centred, device):
    """The first pass walks: its programs, 2 of them here, see every row, the last one too."""
    generator = torch.Generator().manual_seed(3)
    x = (1e-2 * torch.randn(4 * 5 - 1, 4, generator=generator)).to(device)
    x[-1, 0] = 5.0
    partials, mean, rstd = statistics(device, x, centred)
    assert partials.shape == (2,)
    off = x - mean if centred else x
    assert_bitwise(partials.view(F32).max(), (off * rstd).abs().max())
    exact, plain = (rstd_of(x.cpu().to(dtype), centred) for dtype in (torch.float64, F32))
    assert_error_within_baseline(rstd, exact, plain, 4.0)


def rstd_of(x, centred):
    x = x - x.mean(1, keepdim=True) if centred else x
    return (x.square().mean(1, keepdim=True) + EPS).rsqrt()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [5, 1023, 2500])
def test_a_large_mean_costs_no_digits_of_the_variance(columns, device):
    """mean(x^2) - mean(x)^2 in float32 would have none left: 1e3 squared is 1e6 variances."""
    generator = torch.Generator().manual_seed(columns)
    x = (1e3 + torch.randn(3, columns, generator=generator)).to(device)
    x[1] = -x[1]
    x[2, 0] = -1e4  # the first element says nothing of the others
    _, mean, rstd = statistics(device, x, True, amax=False)
    exact = x.double().cpu()
    assert_error_within_baseline(
        mean, exact.mean(1, keepdim=True), x.cpu().mean(1, keepdim=True), 4.0, what="mean"
    )
    square, of_mean = (t.cpu().float() for t in (x.square().mean(1), x.mean(1).square()))
    lost = error((square - of_mean + EPS).rsqrt()[:2, None], rstd_of(exact, True)[:2])
    assert error(rstd[:2], rstd_of(exact, True)[:2]) < 1e-3 * lost
    assert_error_within_baseline(rstd[2:], rstd_of(exact, True)[2:], rstd_of(x.cpu(), True)[2:], 4)
