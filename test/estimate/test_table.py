"""The printed table: its rows, totals and footnotes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from float8.estimate import DEVICES, estimate


def transformer(layers: int) -> nn.Module:
    with torch.device("meta"):
        block = lambda: nn.ModuleDict({"up": nn.Linear(512, 2048), "down": nn.Linear(2048, 512)})  # noqa: E731
        return nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(layers))})


def test_totals_leave_refused_layers_as_they_are():
    shapes = [(8192,) * 3, (8192, 8192, 50), (512, 256, 256)]
    result = estimate(shapes, recipes=["tensorwise"])
    large, odd, small = result.rows
    in_float8 = [row.recipes["tensorwise"].seconds for row in (large, small)]
    total = result.total("tensorwise")
    assert total.bf16_s == large.bf16_s + odd.bf16_s + small.bf16_s
    assert total.seconds.total == pytest.approx(sum(s.total for s in in_float8) + odd.bf16_s)
    gains = result.total("tensorwise", only_gains=True)
    assert gains.seconds.total == pytest.approx(in_float8[0].total + odd.bf16_s + small.bf16_s)
    assert gains.saved_bytes == large.recipes["tensorwise"].saved_bytes < total.saved_bytes
    assert gains.speedup > total.speedup


def test_a_refusal_is_shown_with_its_reason_once():
    text = str(estimate([(64, 50, 64), (64, 50, 64)]))
    assert text.count("refused [1]") == 2  # one line of the table, a cell for each of two recipes
    assert text.count("contraction=50 not a multiple of 16") == 1
    assert "[1] refused: output GEMM of 64 tokens" in text


@pytest.mark.parametrize("device", DEVICES)
def test_a_datasheet_prediction_says_that_nothing_was_measured(device):
    text = str(estimate([(8192,) * 3], device=device))
    assert "NOTHING HERE WAS MEASURED" in text
    assert "Forward and backward of one batch" in text
    casts = "in plain PyTorch" if device == "MI300X" else "by fused kernels"
    assert f"casts {casts}" in text


def test_a_measured_device_says_that_some_figures_are_assumed():
    sources = (*DEVICES["H100"].sources, "measured: here: the bandwidth")
    mixed = replace(DEVICES["H100"], sources=sources)
    text = str(estimate([(8192,) * 3], device=mixed, training=False))
    assert "NOTHING HERE" not in text and "measured here, and published or assumed" in text
    assert "Forward of one batch" in text
