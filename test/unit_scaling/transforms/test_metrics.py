"""The six numbers, worked out a second time in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from float8 import E4M3, Float8Tensor, Tensorwise
from float8.unit_scaling.transforms.metrics import Metrics


def by_hand(values):
    n, mean = len(values), math.fsum(values) / len(values)
    return {
        "mean_abs": math.fsum(map(abs, values)) / n,
        "abs_mean": abs(mean),
        "std": math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1)) if n > 1 else 0.0,
        "abs_max": max(map(abs, values)),
        "abs_min": min(map(abs, values)),
        "numel": n,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (), (2, 1), (7, 33, 5), (1000,)])
def test_metrics_are_those_of_float64_arithmetic(shape, dtype):
    torch.manual_seed(1)
    x = (torch.randn(shape, dtype=torch.float64) * 3 - 1).to(dtype).requires_grad_()
    found, expected = Metrics(x).fwd, by_hand(x.detach().double().flatten().tolist())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert Metrics.names() == list(expected)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_a_nan_shows_in_every_number():
    found = Metrics(torch.tensor([1.0, math.nan])).fwd
    assert all(math.isnan(getattr(found, name)) for name in Metrics.names() if name != "numel")


def test_sparse_gradients_and_float8_tensors_count_as_what_they_stand_for():
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert Metrics(dense.to_sparse()).fwd == Metrics(dense).fwd
    x = torch.tensor([[448.0, -2.0]] * 16)
    assert Metrics(Float8Tensor.from_high_precision(x, E4M3, Tensorwise())).fwd == Metrics(x).fwd


def test_names_have_long_names_and_an_empty_tensor_has_no_numbers_but_its_size():
    assert Metrics.get_full_name("std") == "standard deviation"
    assert len(Metrics.full_names()) == len(Metrics.names()) == 6
    found = Metrics(torch.empty(0, 3)).fwd
    assert found.numel == 0 and math.isnan(found.mean_abs) and math.isnan(found.abs_max)
