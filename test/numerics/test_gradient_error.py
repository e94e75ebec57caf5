"""The gradient's SQNR against the gradients themselves, in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig, convert_to_float8_training, inspect
from float8.granularity import WHOLE
from float8.kernels.sqnr import sqnr
from float8.numerics import statistics
from float8.numerics.gradient_error import contracted, energies, projected
from float8.numerics.statistics import CastMatrix

TOLERANCE = 1.5  # dB: the standard deviation of 16 projections of a matrix of rank 1


def layers(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 32)).bfloat16()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recipe "unit" casts with a scale of 1')
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(model, config=config)


def gradient_sqnrs(report):
    return {c.layer: c.gradient_sqnr for c in report.casts if c.gradient_sqnr is not None}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_it_is_the_error_of_the_gradient_over_all_microbatches(recipe):
    model, inputs, exact = layers(recipe), [], 0.0
    handle = model[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with inspect(model) as report:
        for shape in ((3, 16), (40,)):  # other numbers of tokens, other shapes
            x, g = torch.randn(*shape, 48).bfloat16(), torch.randn(*shape, 32).bfloat16()
            model(x).backward(g)
            exact = exact + g.flatten(0, -2).double().T @ inputs[-1].flatten(0, -2).double()
    handle.remove()
    found = gradient_sqnrs(report)
    assert set(found) == {"0", "2"}
    # The GEMM itself and the sum in bfloat16 add an error, of some 50 dB.
    assert found["2"] == pytest.approx(sqnr(exact, model[2].weight.grad), abs=TOLERANCE)


def test_a_transposed_operand_and_pieces_change_nothing(monkeypatch):
    torch.manual_seed(0)
    x, g = torch.randn(70, 33, dtype=torch.float64), torch.randn(70, 21, dtype=torch.float64)

    def cast(a):
        data, scale = a.to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
        return CastMatrix(data, scale, (WHOLE, WHOLE), a)

    def found(turns_x, turns_g):
        x8, g8 = (
            cast(a.t().contiguous()).t() if turns else cast(a)
            for a, turns in ((x, turns_x), (g, turns_g))
        )
        return energies(contracted(g8, projected(x8, None)))

    expected = found(False, False)
    monkeypatch.setitem(statistics._PIECE, "cpu", 99)
    for turns in ((False, True), (True, False), (True, True)):
        for one, other in zip(found(*turns), expected, strict=True):
            torch.testing.assert_close(one, other)
    exact = g.T @ x
    error = (cast(g).data.double() * 0.5).T @ (cast(x).data.double() * 0.5) - exact
    for estimate, truth in zip(expected, (exact, error), strict=True):
        assert float(estimate) == pytest.approx(float(truth.square().sum()), rel=0.3)


def test_tokens_that_cancel_drown_the_gradient():
    """The casts stay as good as they were: no SQNR of an operand shows it."""
    model = layers("tensorwise")
    x, g = torch.randn(64, 48).bfloat16(), torch.randn(64, 32).bfloat16()

    def seen(factor):
        with inspect(model) as report:
            model(torch.cat([x, x])).backward(torch.cat([g, factor * g]))
        return gradient_sqnrs(report)["2"], min(c.sqnr for c in report.casts)

    (healthy, worst), (drowned, worst_drowned) = seen(1.0), seen(-0.99)
    assert healthy > 20 and drowned < 4.7
    assert worst_drowned == pytest.approx(worst, abs=2)


def test_there_is_none_without_a_cast_gradient_of_the_weight():
    frozen = layers("tensorwise")
    frozen[2].weight.requires_grad_(False)
    x = torch.randn(16, 48).bfloat16()
    for model, expected in ((frozen, {"0"}), (layers("rowwise_with_gw_hp"), set())):
        with inspect(model) as report:
            model(x).sum().backward()
        assert set(gradient_sqnrs(report)) == expected
    with inspect(frozen) as report, torch.no_grad():
        frozen(x)
    assert gradient_sqnrs(report) == {}
