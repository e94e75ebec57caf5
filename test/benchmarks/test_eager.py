"""The predicted time of an eager step is that of its products and of the bytes that it moves."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measuring import eager, memory
from benchmarks.measuring.eager import ANY_PASS, BF16, H100, Shape, gemm_seconds
from float8 import E4M3
from float8.optim.gradients import HeldGradient

pytest.importorskip("triton")  # the casts of CUDA tensors are its kernels


def seconds(run):
    with memory.as_on_cuda(), torch.device("meta"), torch.no_grad(), eager.Step() as step:
        run()
    return step.seconds


def passes(*moved):
    return sum(H100.pass_seconds(ANY_PASS, size) for size in moved)


def test_products_views_sums_and_casts_cost_what_the_model_says():
    with torch.device("meta"):
        x, w = (torch.empty(256, n, dtype=torch.bfloat16) for n in (512, 768))
        g = torch.empty(512, 384, dtype=torch.bfloat16)
    n = g.numel()
    product = gemm_seconds(H100, BF16, Shape(512, 256, 768))
    for run, expected in (
        (lambda: x.t() @ w, product),
        (lambda: (x.t() @ w) + 1.0, product + passes(4 * 512 * 768)),
        (lambda: torch.empty_like(x).view(-1).detach(), 0.0),
        (lambda: HeldGradient.of(g, E4M3), passes(2 * n, 3 * n + 4)),
        (lambda: HeldGradient.of(g.float(), E4M3), passes(6 * n, 4 * n, 5 * n + 4)),
    ):
        assert seconds(run) == pytest.approx(expected, rel=1e-9)
