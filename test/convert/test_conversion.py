"""The report of a conversion: sizes that GPUs refuse, patterns that match nothing, folded names."""

import copy
import dataclasses
import functools
import logging

import pytest
import torch
from torch import nn

import float8
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_inference,
    convert_to_float8_training,
    filters,
)
from float8.config import RECIPES


def model(features: int = 50) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(32, features), "down": nn.Linear(features, 32)})


def adamw(module):
    return torch.optim.AdamW(module.parameters())


CONVERSIONS = {
    "training": convert_to_float8_training,
    "inference": convert_to_float8_inference,
    "ms_amp": lambda m, **options: float8.ms_amp(m, adamw(m), **options)[0],
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_layers_of_sizes_that_no_gpu_multiplies_are_left_alone(convert):
    plain = model(64)
    plain["head"], plain["odd"] = nn.Linear(64, 10), nn.Linear(50, 32)
    weight = plain["head"].weight
    done = convert(copy.deepcopy(plain)).float8_conversion
    assert done.converted == ["up", "down"]
    why = "not multiples of 16, which GPUs need; pad_inner_dim=True converts it"
    assert done.skipped == {
        "head": f"in_features=64, out_features=10: {why}",
        "odd": f"in_features=50, out_features=32: {why}",
    }
    for config in (Float8LinearConfig(pad_inner_dim=True), Float8LinearConfig(emulate=True)):
        done = convert(copy.deepcopy(plain), config=config).float8_conversion
        assert done.converted == ["up", "down", "head", "odd"]
    assert Float8Linear.from_float(plain["head"]).weight is weight  # the user names it


def test_a_pattern_matches_layers_that_were_converted_before():
    skip = filters.skip_names("down")
    converted = convert_to_float8_training(model(64), module_filter_fn=skip)
    convert_to_float8_training(converted, module_filter_fn=filters.skip_names("up"))
    assert converted.float8_conversion.unmatched_patterns == []


def test_layers_of_transformers_tp_plan_say_what_to_do_instead():
    """``from_pretrained(tp_plan=...)`` replaces their forwards; Accelerate's hooks do so too."""
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    plain = model(64)
    parallel.ALL_PARALLEL_STYLES["colwise"].install_forward(plain["up"], mesh=None)
    plain["down"].forward = functools.partial(nn.Linear.forward, plain["down"])
    with pytest.warns(UserWarning, match="converted no layer"):
        why = convert_to_float8_training(plain).float8_conversion.skipped
    assert "tp_plan, which is not supported" in why["up"]
    assert "load without it" in why["up"] and "Float8ColwiseParallel" in why["up"]
    assert "convert it before that" in why["down"]


# --- what reports say, and where


def blocks(count: int = 48) -> nn.Module:
    layers = nn.ModuleList(model(64) for _ in range(count))
    for layer in layers:
        layer["gate"], layer["experts"] = nn.Linear(32, 16), nn.ModuleList([nn.Linear(32, 32)])
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(32, 10)})


def test_the_report_folds_layers_by_pattern_and_reason(caplog):
    with caplog.at_level(logging.INFO, logger="float8"):
        converted = convert_to_float8_training(blocks(), config="rowwise")
    report = str(converted.float8_conversion)
    assert [record.getMessage() for record in caplog.records] == [report]
    first, gates, head = report.splitlines()
    assert first == "converted to float8 (rowwise): 144 layers"
    assert gates.startswith("  left alone: layers.*.gate (48 layers): it routes tokens")
    assert head.startswith("  left alone: head: in_features=32, out_features=10: ")
    assert len(converted.float8_conversion.skipped) == 49


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            dataclasses.replace(RECIPES["delayed"], pad_inner_dim=True),
            "delayed, pad_inner_dim=True",
        ),
        (Float8LinearConfig(cast_config_input=RECIPES["rowwise"].cast_config_input), "own config"),
    ],
)
def test_the_report_names_the_recipe(config, name):
    done = convert_to_float8_training(model(64), config=config).float8_conversion
    assert done.recipe == name and f"converted to float8 ({name}): 2 layers" in str(done)
