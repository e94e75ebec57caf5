"""Filters answer "convert this layer?" from its name and its sizes."""

import copy

import pytest
import torch
from torch import nn

from float8 import accurate_layers, compare, convert_to_float8_training, faster_layers
from float8.convert.filters import (
    all_of,
    divisible_by,
    min_features,
    min_size,
    skip_names,
    unmatched_patterns,
)


@pytest.mark.parametrize(
    ("patterns", "fqn", "converts"),
    [
        (("lm_head",), "lm_head", False),
        (("lm_head",), "lm_head2", True),
        (("layers.0",), "layers.0.ffn.w1", False),
        (("layers.0",), "layers.01.ffn.w1", True),
        (("*.gate",), "layers.3.moe.gate", False),
        (("*.mlp.gate", "*.mlp.gate.*", "layers.3.mlp.gate"), "layers.3.mlp.gate_proj", True),
        (("*.gate", "lm_head"), "layers.3.moe.up", True),
    ],
)
def test_skip_names_matches_names_and_what_lies_below(patterns, fqn, converts):
    assert skip_names(*patterns)(nn.Linear(1, 1), fqn) is converts


def test_size_filters_look_at_both_features_and_all_of_at_every_filter():
    numpy, layer = pytest.importorskip("numpy"), nn.Linear(32, 48)
    assert min_size(32 * 48)(layer, "") and not min_size(32 * 48 + 1)(layer, "")
    assert min_features(32, 48)(layer, "")
    assert not min_features(in_features=33)(layer, "")
    assert not min_features(out_features=49)(layer, "")
    assert divisible_by(numpy.int64(16))(layer, "") and not divisible_by(32)(layer, "")
    both = all_of(skip_names("a"), min_size(1))
    assert both(layer, "b") and not both(layer, "a")
    assert not all_of(both, divisible_by(32))(layer, "b")


ODD = "in_features=32, out_features=24: not multiples of 16"


@pytest.mark.parametrize(
    ("leaves_out", "reason"),
    [
        (skip_names("layers.*"), "left out by skip_names('layers.*')"),
        (min_size(1000), "in_features=32, out_features=24, and min_size is 1,000"),
        (min_features(64, 0), "in_features=32, out_features=24, and min_features is 64 and 0"),
        (divisible_by(16), ODD),
        (
            all_of(min_size(1), all_of(divisible_by(16))),
            ODD,
        ),
        (
            all_of(lambda module, fqn: fqn == "up", divisible_by(16)),
            "module_filter_fn returned False",
        ),
        (None, f"{ODD}, which GPUs need; pad_inner_dim=True converts it"),
        (
            faster_layers("tensorwise", tokens=4096, device="H100"),
            "H100 SXM refuses it: output GEMM of 4096 tokens, in_features=32, out_features=24: "
            "columns=24 not a multiple of 16; filter the layer out with module_filter_fn or set "
            "pad_inner_dim=True",
        ),
    ],
)
def test_the_report_says_which_filter_left_a_layer_out_and_why(leaves_out, reason):
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(32, 24)]), "up": nn.Linear(4096, 4096)}
    )
    convert_to_float8_training(model, module_filter_fn=leaves_out)
    assert model.float8_conversion.skipped["layers.0"] == reason


def test_the_report_tells_the_numbers_of_a_measurement():
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    found = compare(convert_to_float8_training(copy.deepcopy(plain)), torch.randn(16, 32))
    with pytest.warns(UserWarning, match=r"its lowest SQNR is \d+\.\d dB, and min_sqnr is 99"):
        convert_to_float8_training(plain, module_filter_fn=accurate_layers(found, min_sqnr=99))


NAMES = ["model.lm_head", "model.layers.0.ffn", "model.layers.1.ffn"]


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (skip_names("model.lm_head", "*.0.ffn", "model.layers"), []),
        (skip_names("model.lm_haed"), ["'model.lm_haed'; did you mean 'model.lm_head'?"]),
        (skip_names("*lm_head", "zzz"), ["'zzz'"]),
        (skip_names("lm_head"), ["'lm_head'; did you mean 'model.lm_head'?"]),
        (all_of(skip_names("zzz"), divisible_by(16), all_of(skip_names("y"))), ["'zzz'", "'y'"]),
        (lambda module, fqn: True, []),
    ],
)
def test_patterns_that_match_nothing_are_reported(function, reported):
    assert unmatched_patterns(function, NAMES) == reported
