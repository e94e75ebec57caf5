"""Saved models of Transformers, beside what their own ``save_pretrained`` writes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise
from published_models import convert, model_of
from safetensors.torch import load_file

from float8.checkpoints import save_pretrained


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_names_and_configs_are_transformers_own(name, tmp_path):
    plain = model_of(name).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs/model.safetensors")
    before = plain.config.to_dict()
    model = torch.compile(convert(plain), backend="eager")
    plan = save_pretrained(model, tmp_path / "ours")
    found = load_file(tmp_path / "ours/model.safetensors")
    assert found.keys() == expected.keys() | {f"{layer}.weight_scale" for layer in plan.layers}
    for key in expected.keys() - {f"{layer}.weight" for layer in plan.layers}:
        assert_bitwise(found[key], expected[key], key)
    for file in ("config.json", "generation_config.json"):
        theirs, ours = (
            json.loads((tmp_path / folder / file).read_text()) for folder in ("theirs", "ours")
        )
        if file == "config.json":
            assert ours.pop("quantization_config") == plan.quantization_config
        assert ours == theirs
    assert before == model._orig_mod.config.to_dict()
    assert not hasattr(model._orig_mod.config, "quantization_config")
