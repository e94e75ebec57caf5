"""`float8`: the same products as conversion, on functions, in any order of transforms."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, sqnr
from torch import nn

import float8.unit_scaling as uu
from float8 import (
    CastConfig,
    accurate_layers,
    convert_to_float8_training,
    inspect,
)
from float8.config import RECIPES
from float8.unit_scaling.transforms import float8, track_scales


class Net(nn.Module):
    """A residual network with a product that is no module."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(F.linear(input=x, weight=self.mix))


def results(model, x, g):
    model.zero_grad()
    out = model(x)
    out.backward(g)
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"delayed"}))
def test_a_layer_has_the_bits_of_a_converted_one(recipe):
    plain, scaled = nn.Linear(32, 48), uu.Linear(32, 48, bias=True)
    config, x, g = RECIPES[recipe], torch.randn(16, 32), torch.randn(16, 48)
    for layer in (plain, scaled):
        model = nn.Sequential(layer)
        mine = results(float8(model, config), x, g)
        theirs = results(convert_to_float8_training(copy.deepcopy(model), config=config), x, g)
        for a, b in zip(mine, theirs, strict=True):
            assert_bitwise(a, b, recipe)


def test_functions_that_conversion_cannot_reach_run_in_float8():
    model, x = Net(), torch.randn(8, 32)
    values = float8(model, RECIPES["tensorwise"])(x)
    by_hand = F.linear(x + model.down(F.gelu(model.up(x))), model.mix)
    assert sqnr(values, model.head(by_hand)) > 20
    assert not torch.equal(values, model(x))
    mixed = float8(nn.Sequential(Net()), RECIPES["tensorwise"], module_filter_fn=lambda m, n: False)
    assert not torch.equal(mixed(x), mixed[0](x))  # the mix is no module's weight


def test_by_default_inputs_that_outgrow_the_format_do_not_saturate():
    config = replace(RECIPES["unit"], cast_config_input=CastConfig())
    assert float8(Net()).transforms[0].config == config
    plain, x = nn.Linear(32, 32), 1e4 * torch.randn(64, 32)
    exact = plain(x)
    assert sqnr(float8(nn.Sequential(plain))(x), exact) > 15
    assert sqnr(float8(nn.Sequential(plain), RECIPES["unit"])(x), exact) < 5


@pytest.mark.parametrize("recipe", ["unit", "tensorwise", "blockwise"])
def test_inspect_measures_what_it_measures_of_converted_layers(recipe):
    torch.manual_seed(0)
    layers = nn.Sequential(uu.Linear(32, 48, bias=True), nn.GELU(), uu.Linear(48, 16))
    model = nn.Sequential(float8(nn.Sequential(layers), RECIPES[recipe]))
    converted = convert_to_float8_training(copy.deepcopy(layers), config=RECIPES[recipe])
    x, g = 300 * torch.randn(64, 32), torch.randn(64, 16)
    found = []
    for each in (model, converted):
        with inspect(each) as report, torch.autocast("cpu", torch.bfloat16):
            out = each(x)
            out.backward(g.to(out.dtype))
        assert not report.skipped
        found.append(report)
    mine, theirs = ({row.key: row for row in report._rows} for report in found)
    assert {key[0] for key in mine} == {"0.0.0", "0.0.2"}
    assert list(mine) == [(f"0.0.{layer}", *rest) for layer, *rest in theirs]
    for row, other in zip(mine.values(), theirs.values(), strict=True):
        assert row == replace(other, layer=row.layer)
    assert any(row.saturated for row in mine.values()) == (recipe == "unit")


class Tied(nn.Module):
    """Its head has the embedding's weight, and two products have computed weights of one shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x, weight = self.embedding(tokens), self.head.weight
        return self.head(F.linear(F.linear(x, 2 * weight[:32]), 3 * weight[:32]))


def test_inspect_names_tied_weights_and_numbers_computed_ones():
    model, tokens = float8(Tied(), RECIPES["tensorwise"]), torch.randint(48, (16,))
    with inspect(model) as report:
        for _ in range(2):
            model(tokens).sum().backward()
    first, second = (f"product {i}, weight (32, 32)" for i in range(2))
    assert list(dict.fromkeys(row.layer for row in report._rows)) == [first, second, "head"]
    assert {row.calls for row in report._rows} == {2}
    assert all(row.gradient_sqnr for row in report._rows if row.operand == "grad_output")
    again = float8(Tied(), RECIPES["tensorwise"], module_filter_fn=accurate_layers(report, 20))
    assert again.transforms[0].skipped == ()  # no question about the embedding
    with inspect(alone := float8(nn.Linear(32, 32))) as report:
        alone(torch.randn(16, 32))
    assert {row.layer for row in report._rows} == {""}


class Fused(nn.Module):
    """Two products multiply by parts of one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 32))

    def forward(self, x):
        return F.linear(x, self.weight[:32]).sum() + F.linear(x, self.weight[32:]).sum()


def test_inspect_tells_the_parts_of_one_parameter_apart():
    with inspect(model := float8(Fused())) as report:
        model(torch.randn(16, 32)).backward()
    names = {f"product {i}, weight ({rows}, 32)" for i, rows in enumerate((32, 64))}
    assert {row.layer for row in report._rows} == names
    assert {row.calls for row in report._rows} == {1}


@pytest.mark.parametrize("recipe", ["unit", "rowwise", "mxfp8"])
def test_an_outer_transform_does_not_let_casts_write_into_their_input(recipe):
    model, x = nn.Sequential(float8(Net(), RECIPES[recipe])), torch.randn(16, 32)
    expected, kept = model(x), x.clone()
    tracked = track_scales(model)
    for _ in range(2):
        assert_bitwise(tracked(x), expected)
        assert_bitwise(x, kept)
