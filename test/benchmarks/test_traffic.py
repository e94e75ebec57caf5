"""Bytes and launches of linear layers on CUDA, against a meter of the ops that run."""

from __future__ import annotations

import pytest
import torch
from meter import CastMeter, GemmCounter
from torch import nn

pytest.importorskip("triton")

from fake_cuda import empty, fake_cuda, step
from linear.test_autograd import K, M, N

from benchmarks.measuring import traffic
from float8.config import RECIPES
from float8.unit_scaling import functional as U

FACTORS = (0.5, 0.25, 0.125)


def layer():
    with torch.device("meta"):
        return nn.Linear(K, N, bias=False)


def metered(config):
    with fake_cuda("sm_90"), CastMeter() as meter:
        step(config, empty(M, K), empty(N, K), empty(M, N), factors=FACTORS)
    return meter


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "unit"])
def test_the_count_of_a_float8_layer_is_that_of_the_ops_that_run(recipe):
    config = RECIPES[recipe]
    counted, meter = traffic.of_layer(M, layer(), config), metered(config)
    assert counted.launches == meter.launches
    assert counted.bytes == pytest.approx(sum(meter.bytes_by_numel.values()), rel=1e-4)


class Factors(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the pointwise products, and their bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mul:
            self.bytes += args[0].nbytes + out.nbytes
        self.launches += func.overloadpacket is torch.ops.aten.mul or func in GemmCounter.OPS
        return out


def test_the_count_in_high_precision_is_that_of_the_factors():
    x, w = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((64, 32), (48, 32)))
    x.requires_grad_(), w.requires_grad_()
    grad = torch.randn(64, 48, dtype=torch.bfloat16)
    with Factors() as meter:
        U.linear(x, w).backward(grad)
    counted = traffic.of_layer(64, nn.Linear(32, 48), None)
    assert (counted.bytes, counted.launches) == (meter.bytes, meter.launches)


def test_unit_moves_less_than_measured_scales_and_launches_least():
    unit, delayed, tensorwise = (
        traffic.of_layer(M, layer(), RECIPES[name]) for name in ("unit", "delayed", "tensorwise")
    )
    assert unit.bytes == delayed.bytes < tensorwise.bytes
    assert unit.launches < delayed.launches < tensorwise.launches


def test_layers_add_up():
    one, config = traffic.of_layer(M, layer(), RECIPES["unit"]), RECIPES["unit"]
    three = traffic.of_layers(M, [layer()] * 3, config)
    assert (three.bytes, three.launches) == (3 * one.bytes, 3 * one.launches)
