"""The predicted time of an eager step is that of its products and of the bytes that it moves."""

from __future__ import annotations

import re
from functools import partial
from statistics import mean

import pytest
import torch

from benchmarks.measuring import eager, memory
from benchmarks.measuring.eager import (
    ANY_PASS,
    BF16,
    FAST_GRADIENTS,
    H100,
    TENSORWISE_PRODUCT,
    Shape,
    gemm_seconds,
)
from benchmarks.measuring.report import ROOT
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
        (lambda: HeldGradient.of(g), passes(2 * n, 3 * n + 4)),
        (lambda: HeldGradient.of(g.float()), passes(6 * n, 4 * n, 5 * n + 4)),
    ):
        assert seconds(run) == pytest.approx(expected, rel=1e-9)


def test_gradients_that_sum_fast_take_the_part_that_an_h100_measured():
    text = (ROOT / "benchmarks" / "results" / "h100_2026-11-27" / "gemms.txt").read_text()
    found = re.findall(r"dense (\d+),(\d+),(\d+) tensorwise e5m2 fast=(\w+) +([\d.]+) us", text)
    us = {(*map(int, sizes), fast == "True"): float(time) for *sizes, fast, time in found}
    shapes = {sizes[:3] for sizes in us}
    parts = [us[(*shape, True)] / us[(*shape, False)] for shape in shapes]
    assert mean(parts) == pytest.approx(FAST_GRADIENTS, abs=0.001)
    for M, K, N in shapes:  # what is not fast is priced as precise
        predicted = gemm_seconds(H100, TENSORWISE_PRODUCT, Shape(M, K, N)) * 1e6
        assert predicted == pytest.approx(us[M, K, N, False], rel=0.055)


@pytest.mark.parametrize(
    ("dtype", "is_fast", "part"),
    [
        (torch.float8_e5m2, True, FAST_GRADIENTS),
        (torch.float8_e5m2, False, 1),
        (torch.float8_e4m3fn, True, 1),  # an output, which is fast by default
    ],
)
def test_products_are_priced_by_what_sums_them(dtype, is_fast, part):
    empty = partial(torch.empty, device="meta")
    a, b = empty(256, 512, dtype=dtype), empty(768, 512, dtype=torch.float8_e4m3fn)
    run = partial(torch._scaled_mm, a, b.t(), empty(()), empty(()), out_dtype=torch.bfloat16)
    expected = gemm_seconds(H100, TENSORWISE_PRODUCT, Shape(256, 512, 768)) * part
    assert seconds(partial(run, use_fast_accum=is_fast)) == pytest.approx(expected, rel=1e-9)
