"""Saved models of Transformers, beside what their own ``save_pretrained`` writes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise
from oracle import values
from published_models import convert, model_of
from safetensors.torch import load_file

from float8.checkpoints import save_pretrained
from float8.checkpoints.files import Shards


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_names_values_and_configs_are_transformers_own(name, tmp_path):
    plain = model_of(name).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs/model.safetensors")
    before = plain.config.to_dict()
    model = torch.compile(convert(plain), backend="eager")
    plan = save_pretrained(model, tmp_path / "ours")
    shards = Shards(tmp_path / "ours")
    scales = {f"{layer}.weight_scale" for layer in plan.layers}
    assert set(shards.specs) == expected.keys() | scales
    assert {f"{layer}.weight" for layer in plan.layers} < expected.keys()
    for key, x in expected.items():
        found = shards.read(key)
        layer = key.removesuffix(".weight")
        if layer not in plan.layers:
            assert_bitwise(found, x, key)
            continue
        # Each element is at most half a step of its row's grid away: 2^-4 of it, or 2^-10 scales.
        scale = shards.read(f"{layer}.weight_scale")
        error = (values(found, scale, (1, -1)) - x.double()).abs()
        assert bool((error <= (x.double().abs() * 2.0**-4).maximum(scale.double() * 2**-10)).all())
    for file in ("config.json", "generation_config.json"):
        theirs, ours = (
            json.loads((tmp_path / folder / file).read_text()) for folder in ("theirs", "ours")
        )
        if file == "config.json":
            assert ours.pop("quantization_config") == plan.quantization_config
        assert ours == theirs
    assert before == model._orig_mod.config.to_dict()
    assert not hasattr(model._orig_mod.config, "quantization_config")
