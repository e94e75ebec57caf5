"""Which layers read a norm: names with stars, and the order of an ``nn.Sequential``."""

from __future__ import annotations

import pytest
from torch import nn

from float8.fusion.norm_readers import readers_of_norms, resolved

D = 8


def next_in_sequential(model):
    names = {module: fqn for fqn, module in model.named_modules()}
    found, _ = readers_of_norms(model, {}, lambda module: True)
    return {names[norm]: [names[layer] for layer in layers] for norm, layers in found.items()}


def test_the_next_module_of_a_sequence_reads_the_one_before_it():
    norm = nn.LayerNorm(D)
    model = nn.ModuleList([nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), norm, nn.Linear(D, D))])
    expected = {"0.0": ["0.1"], "0.1": ["0.2"], "0.2": ["0.3"]}
    assert next_in_sequential(model) == expected
    model.append(nn.ModuleList([nn.LayerNorm(D), nn.Linear(D, D)]))  # whose order says nothing
    assert next_in_sequential(model) == expected
    model.norm = norm  # which another forward may call
    del expected["0.2"]
    assert next_in_sequential(model) == expected


@pytest.mark.parametrize("how", ["a type of its own", "a replaced forward"])
def test_a_sequence_that_may_run_in_another_order_says_nothing(how):
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))
    if how == "a replaced forward":
        model.forward = lambda x: x
    else:
        model.__class__ = type("Own", (nn.Sequential,), {})
    assert next_in_sequential(model) == {}


NAMES = [f"layers.{i}.{part}" for i in (0, 1, 10) for part in ("norm", "at.q", "at.k", "up")]


def test_stars_stand_for_one_part_on_both_sides():
    found = resolved(NAMES, {"layers.*.norm": ["layers.*.at.q", "layers.*.at.k"]})
    assert found == {
        f"layers.{i}.norm": [f"layers.{i}.at.q", f"layers.{i}.at.k"] for i in (0, 1, 10)
    }
    assert resolved(NAMES, {"norm": "up"}, "layers.1.") == {"layers.1.norm": ["layers.1.up"]}
    assert resolved(NAMES, {"layers.1*.norm": "layers.1*.up"}).keys() == {
        "layers.1.norm",
        "layers.10.norm",
    }
