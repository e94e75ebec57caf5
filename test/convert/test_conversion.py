"""The report of a conversion: what a GPU will refuse, and patterns that match nothing."""

import logging

import pytest
import torch
from torch import nn

from float8 import (
    Float8LinearConfig,
    convert_to_float8_inference,
    convert_to_float8_training,
    filters,
)
from float8.config import RECIPES
from float8.convert.conversion import Conversion


def model(features: int = 50) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(32, features), "down": nn.Linear(features, 32)})


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch):
    monkeypatch.setattr("float8.linear.refusals._told", [])


def test_layers_that_a_gpu_refuses_are_in_the_report_and_in_the_log(caplog):
    converted = convert_to_float8_training(model())
    report = converted.float8_conversion
    assert set(report.refused_on_gpu) == {"up", "down"}
    assert "50 not a multiple of 16" in report.refused_on_gpu["up"]
    assert "pad_inner_dim=True" in report.refused_on_gpu["up"]
    assert "  a GPU will refuse: up: " in str(report)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "a GPU will refuse 2 of the 2 converted layers" in record.getMessage()


@pytest.mark.parametrize(
    "config", [Float8LinearConfig(pad_inner_dim=True), Float8LinearConfig(emulate=True)]
)
def test_where_sizes_are_padded_or_emulated_a_gpu_refuses_nothing(config, caplog):
    converted = convert_to_float8_training(model(), config=config)
    assert converted.float8_conversion.refused_on_gpu == {}
    converted["up"](torch.randn(7, 32))
    assert caplog.records == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:recipe .unit.")
def test_sizes_that_every_gpu_takes_are_not_reported(recipe, caplog):
    config = Float8LinearConfig.from_recipe_name(recipe)
    converted = convert_to_float8_training(model(64), config=config)
    assert converted.float8_conversion.refused_on_gpu == {}
    for _ in range(2):
        converted["up"](torch.randn(16, 32)).sum().backward()
    assert caplog.records == []


def test_tokens_that_a_gpu_refuses_are_logged_once(caplog):
    converted = convert_to_float8_training(model(64))
    with torch.no_grad():
        converted["up"](torch.randn(7, 32))  # has no weight gradient
    assert caplog.records == []
    for _ in range(3):
        converted["up"](torch.randn(7, 32))
        converted["down"](torch.randn(7, 64))
    [record] = caplog.records
    assert record.getMessage().startswith("up: a GPU will refuse this batch, which a CPU runs: ")
    assert "7 tokens" in record.getMessage()


def test_a_frozen_weight_takes_any_number_of_tokens(caplog):
    converted = convert_to_float8_training(model(64).requires_grad_(False))
    converted["up"](torch.randn(7, 32).requires_grad_())
    assert caplog.records == []


@pytest.mark.parametrize("convert", [convert_to_float8_training, convert_to_float8_inference])
def test_patterns_that_match_no_layer_are_in_the_report(convert):
    skip = filters.all_of(filters.skip_names("dwon", "up"), filters.divisible_by(16))
    converted = convert(model(64), module_filter_fn=skip)
    report = converted.float8_conversion
    assert report.converted == ["down"]
    assert report.unmatched_patterns == ["'dwon'; did you mean 'down'?"]
    assert "skip_names: no layer is called 'dwon'; did you mean 'down'?" in str(report)


def test_a_pattern_matches_layers_that_were_converted_before():
    skip = filters.skip_names("down")
    converted = convert_to_float8_training(model(64), module_filter_fn=skip)
    convert_to_float8_training(converted, module_filter_fn=filters.skip_names("up"))
    assert converted.float8_conversion.unmatched_patterns == []


def test_the_report_of_no_conversion():
    assert str(Conversion()) == "converted to float8: 0 layers"


def test_a_batch_is_logged_for_its_tokens_and_not_for_a_layer_that_is_in_the_report(caplog):
    converted = convert_to_float8_training(
        nn.ModuleDict({"odd": nn.Linear(50, 32), "even": nn.Linear(32, 32)})
    )
    caplog.clear()
    converted["odd"](torch.randn(7, 50))
    assert caplog.records == []
    converted["even"](torch.randn(7, 32))
    [record] = caplog.records
    assert "contraction=7 not a multiple of 16" in record.getMessage()
