"""Mixtures of experts, written here in float8 and read by Transformers, which knows nothing of us.

On a CPU it dequantises on load, with its own arithmetic, and stacks the experts itself.
"""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise
from published_models import convert, model_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from float8 import E4M3, Blockwise, Float8Tensor, ScaleFormat
from float8.checkpoints import save_pretrained
from float8.checkpoints.stacks import published


def dequantised(plain, layers):
    """The plain model with the values that the published layers have in float8, by definition."""
    model = copy.deepcopy(plain)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, slot in published(model).items():
            if key.removesuffix(".weight") in layers:
                part = slot.of(own[slot.parameter])
                scales = ScaleFormat.POWER_OF_TWO
                cast = Float8Tensor.from_high_precision(
                    part, E4M3, Blockwise(128, 128), scale_format=scales
                )
                part.copy_(cast.dequantize())
    return model


@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
@pytest.mark.parametrize(
    ("name", "rows"), [("mixtral", 48), ("mixtral", 128), ("qwen3_moe", 32), ("deepseek_v3", 32)]
)
def test_transformers_reads_experts_in_float8(name, rows, tmp_path):
    """``rows`` of gate and of up: in a stack they share blocks of 128 rows where they are fewer."""
    sizes = {"intermediate_size": 128, "hidden_size": 128} if rows == 128 else {}
    plain = model_of(name, **sizes)
    plan = save_pretrained(
        convert(copy.deepcopy(plain), "blockwise"), tmp_path / "it", "fine_grained"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.float32)
    expected = dequantised(plain, plan.layers)
    for key, x in expected.state_dict().items():
        assert_bitwise(loaded.state_dict()[key], x, replay=key)
    tokens = torch.randint(64, (2, 16))
    assert type(loaded) is type(plain)
    torch.testing.assert_close(loaded(tokens).logits, expected(tokens).logits)
    assert not torch.equal(loaded(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize(("name", "recipe"), [("qwen3_moe", "rowwise"), ("mixtral", "tensorwise")])
def test_compressed_tensors_reads_experts_in_float8(name, recipe, tmp_path):
    """Its decompression, which Transformers runs, stacks the values that the file has."""
    pytest.importorskip("compressed_tensors")
    plain = model_of(name)
    plan = save_pretrained(convert(copy.deepcopy(plain), recipe), tmp_path / "it")
    assert sum("experts" in layer for layer in plan.layers) == (24 if name == "qwen3_moe" else 18)
    written = load_file(tmp_path / "it" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.float32)
    loaded(torch.randint(64, (1, 4)))  # linear layers are decompressed by the first forward
    own = loaded.state_dict()
    for key, slot in published(plain).items():
        expected = written[key].float()
        if key.removesuffix(".weight") in plan.layers:
            expected = expected * written[f"{key}_scale"]
        assert_bitwise(slot.of(own[slot.parameter]), expected, replay=key)
