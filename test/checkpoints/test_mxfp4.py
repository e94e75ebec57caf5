"""Packed MXFP4 weights: written, read, rewritten, and read by the libraries that have the formats.

The bytes are those of ``mxfp4_oracle``, and what is loaded is the weight that was trained.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import mxfp4_oracle
import pytest
import torch
from assertions import assert_bitwise
from hand_written import compressed, write
from safetensors.torch import load_file, save_file
from torch import nn

import float8
from float8 import E4M3, Blockwise, Float8LinearConfig, Float8Tensor, ScaleFormat
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    load,
    plan_save,
    save_pretrained,
    weight_updates,
)
from float8.checkpoints.__main__ import main
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST
from float8.checkpoints.layouts import MXFP4, GptOss, layout_of
from float8.config import RECIPES

E8M0 = ScaleFormat.E8M0


def model_of(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-1, 1, 128)[:, None])  # within 2^14
    return model.to(dtype)


def trained(model: nn.Module, recipe: str = "blockwise", **filters) -> nn.Module:
    config = replace(RECIPES[recipe], mxfp4_weights=True)
    return float8.convert_to_float8_training(model, config=config, **filters)


def assert_packed(tensors: dict, name: str, weight: torch.Tensor) -> None:
    codes, scale = mxfp4_oracle.encode(weight.detach())
    assert_bitwise(tensors[f"{name}.weight_packed"], mxfp4_oracle.pack(codes), name)
    assert_bitwise(tensors[f"{name}.weight_scale"], scale, name)
    assert f"{name}.weight" not in tensors


# --- layers


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loaded_weights_are_those_that_were_trained(recipe, dtype, tmp_path):
    model = trained(model_of(dtype=dtype), recipe)
    model(torch.randn(32, 96, dtype=dtype)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    plan = save_pretrained(model, tmp_path / "it")
    assert plan.layers == {"0": TRAINING_CAST, "2": TRAINING_CAST}
    assert "128x96" in str(plan)
    tensors = load_file(tmp_path / "it/model.safetensors")
    updates = dict(weight_updates(model))
    assert updates.keys() == tensors.keys() == plan.tensors.keys()
    assert_bitwise(tensors["0.bias"], model[0].bias)
    plain = load(model_of(1, dtype), tmp_path / "it")
    resident = load(model_of(1, dtype), tmp_path / "it", "float8")
    again = load(trained(model_of(1, dtype), recipe), tmp_path / "it")
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight
        assert_packed(tensors, name, weight)
        assert_packed(updates, name, weight)
        values = mxfp4_oracle.project(weight.detach())
        for each in (plain, again):
            assert_bitwise(each.get_submodule(name).weight.detach(), values, name)
        assert_bitwise(resident.get_submodule(name).weight.dequantize(dtype), values, name)
    x = torch.randn(16, 96, dtype=dtype)
    assert_bitwise(again(x), model(x))
    if recipe == "mxfp8":
        assert_bitwise(resident(x), model(x))
    # The same file of what was loaded: trained, resident, frozen.
    inference = float8.convert_to_float8_inference(copy.deepcopy(model))
    for number, each in enumerate((again, resident, inference)):
        save_pretrained(each, tmp_path / str(number), MXFP4())
        same = load_file(tmp_path / f"{number}/model.safetensors")
        assert same.keys() == tensors.keys()
        for key, x in tensors.items():
            assert_bitwise(same[key], x, (number, key))


def test_other_layouts_store_the_projected_weights(tmp_path):
    """In bfloat16, and in float8, which keeps them."""
    model = trained(model_of(), module_filter_fn=lambda module, name: name == "0")
    for number, layout in enumerate((FineGrained((1, 32), E8M0), CompressedTensors())):
        save_pretrained(model, tmp_path / str(number), layout)
        found = load(model_of(1), tmp_path / str(number))[0].weight.detach()
        values = mxfp4_oracle.project(model[0].weight.detach())
        assert torch.equal(found, values) == (number == 0)
    found = load_file(tmp_path / "0/model.safetensors")["2.weight"]
    assert_bitwise(found, model[2].weight)


def test_only_layers_that_train_so_are_packed(tmp_path):
    """All of them where none does: weights are rounded when they are saved."""
    model = trained(model_of(), module_filter_fn=lambda module, name: name == "0")
    float8.convert_to_float8_training(model, config="rowwise")
    plan = plan_save(model)
    assert plan.layout == MXFP4() and plan.layers == {"0": TRAINING_CAST}
    assert "mxfp4_weights" in plan.skipped["2"]
    plain = float8.convert_to_float8_training(model_of(), config="rowwise")
    plan = save_pretrained(plain, tmp_path / "it", "mxfp4")
    assert plan.layers == {"0": CAST_ANEW, "2": CAST_ANEW}
    assert_packed(load_file(tmp_path / "it/model.safetensors"), "2", plain[2].weight)


def test_weights_that_multiply_in_high_precision_are_packed(tmp_path):
    off = float8.CastConfig(float8.ScalingType.DISABLED)
    config = Float8LinearConfig(off, off, off, mxfp4_weights=True)
    model = float8.convert_to_float8_training(model_of(), config=config)
    assert save_pretrained(model, tmp_path / "it").layers == dict.fromkeys("02", TRAINING_CAST)
    assert_packed(load_file(tmp_path / "it/model.safetensors"), "0", model[0].weight)


def test_float8_weights_that_are_not_mxfp4_are_refused():
    resident = float8.convert_to_float8_inference(
        float8.convert_to_float8_training(model_of(), config="mxfp8")
    )
    with pytest.raises(ValueError, match="values that MXFP4 does not hold"):
        plan_save(resident, MXFP4())
    odd = float8.convert_to_float8_training(
        nn.Linear(40, 16), config=Float8LinearConfig(emulate=True)
    )
    with pytest.raises(ValueError, match="in_features=40 is not a multiple of 32"):
        plan_save(nn.Sequential(odd), MXFP4())


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    model = trained(model_of())
    with torch.no_grad():
        model[0].weight[3, 5] = torch.inf
    with pytest.raises(ValueError, match="NaN or inf"):
        save_pretrained(model, tmp_path / "it")


# --- files


def test_folders_are_inspected_compared_and_converted(tmp_path, capsys):
    model = trained(model_of())
    save_pretrained(model, tmp_path / "a")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["inspect", a, "--data"]) == 0
    assert "128x96" in capsys.readouterr().out
    assert main(["convert", a, b, "--layout", "bfloat16"]) == 0
    values = mxfp4_oracle.project(model[0].weight.detach())
    assert_bitwise(load_file(tmp_path / "b/model.safetensors")["0.weight"], values)
    assert main(["compare", a, b]) == 0
    assert main(["convert", b, c, "--layout", "mxfp4"]) == 0
    assert main(["compare", a, c]) == 0
    assert_packed(load_file(tmp_path / "c/model.safetensors"), "0", model[0].weight)


FAULTS = [
    ("0.weight_scale", None, "0.weight_scale is missing"),
    ("0.weight_scale", lambda x: x.masked_fill(x > 0, 255), r"holds nan at \[0, 0\]"),
    ("0.weight_scale", lambda x: x.float(), "is torch.float32"),
    ("0.weight_scale", lambda x: x[:, :1], "of shape"),
    ("0.weight_packed", None, "0.weight_packed is missing"),
    ("0.weight_packed", lambda x: x.bfloat16(), "is torch.bfloat16"),
    ("0.weight_packed", lambda x: x[None], "expected a matrix"),
]


@pytest.mark.parametrize(("key", "change", "says"), FAULTS)
def test_a_faulty_file_is_refused(key, change, says, tmp_path):
    save_pretrained(trained(model_of()), tmp_path / "it")
    file = tmp_path / "it/model.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(key)
    if change is not None:
        tensors[key] = change(tensor).contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=says):
        load(model_of(), tmp_path / "it")


# As llm-compressor writes MXFP4A16 and MXFP4 (compressed-tensors 0.20, quant_scheme.py), and as
# openai/gpt-oss-20b has it.
FOUR_BITS = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def config_of(inputs: dict | None, **weights) -> dict:
    config = compressed("group", format="mxfp4-pack-quantized")
    group = config["config_groups"]["group_0"]
    group["weights"] |= FOUR_BITS | weights
    group["input_activations"] = inputs and group["input_activations"] | inputs
    return config


def test_published_configs_are_read():
    assert layout_of(config_of(None)) == MXFP4()
    assert layout_of(config_of(FOUR_BITS)) == MXFP4()
    assert layout_of(config_of({"group_size": 128})) == MXFP4()
    assert layout_of({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == GptOss()
    assert layout_of(json.loads(json.dumps(MXFP4().quantization_config(["a"], [])))) == MXFP4()
    for config in (config_of(None, group_size=16), config_of(None, type="int")):
        with pytest.raises(ValueError, match="of MXFP4 weights"):
            layout_of(config)


def test_compressed_tensors_unpacks_ours():
    base = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    x = torch.randn(48, 96) * torch.logspace(-8, 8, 48)[:, None]
    stored = MXFP4().tensors("a", MXFP4().cast(x, E8M0, None))
    config = MXFP4().quantization_config(["a"], [])
    scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = base.BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    found = compressor.decompress({k.removeprefix("a."): x for k, x in stored.items()}, scheme)
    assert torch.equal(found["weight"].double(), mxfp4_oracle.project(x).double())


# vLLM: compressed_tensors_w4a4_mxfp4.py makes weight_packed (N, K / 2), weight_scale (N, K / 32) in
# uint8; models/gpt_oss.py reads NAME_blocks (E, N, K / 32, 16) and NAME_scales (E, N, K / 32).
def test_keys_shapes_and_dtypes_are_those_of_vllm():
    stored = MXFP4().tensors("a", MXFP4().cast(torch.randn(48, 96), E8M0, None))
    assert {k: (x.dtype, tuple(x.shape)) for k, x in stored.items()} == {
        "a.weight_packed": (torch.uint8, (48, 48)),
        "a.weight_scale": (torch.uint8, (48, 3)),
    }
    stored = GptOss().tensors("a", GptOss().cast(torch.randn(2, 48, 96), E8M0, None))
    assert {k: (x.dtype, tuple(x.shape)) for k, x in stored.items()} == {
        "a_blocks": (torch.uint8, (2, 48, 3, 16)),
        "a_scales": (torch.uint8, (2, 48, 3)),
    }


# --- models of Transformers

SIZES = {
    "llama": {"intermediate_size": 96, "tie_word_embeddings": False},
    "mixtral": {"intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}


def published(name: str, seed: int = 0) -> nn.Module:
    pytest.importorskip("transformers")
    from published_models import model_of as published_model

    return published_model(name, seed=seed, **SIZES[name]).bfloat16()


def expected(name: str, key: str, weight: torch.Tensor) -> torch.Tensor:
    """The parameter of a model that was saved."""
    if name == "gpt_oss" and weight.dim() == 3:  # (E, K, N)
        return mxfp4_oracle.project(weight.mT.contiguous()).mT
    return mxfp4_oracle.project(weight) if "proj" in key and weight.dim() > 1 else weight


@pytest.mark.parametrize("name", SIZES)
def test_transformers_has_the_weights_that_were_trained(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    plain = published(name)
    keeps = float8.filters.skip_names("lm_head")
    model = trained(copy.deepcopy(plain), "mxfp8", module_filter_fn=keeps)
    plan = save_pretrained(model, tmp_path / "it")
    assert plan.layout == (GptOss() if name == "gpt_oss" else MXFP4())
    assert set(plan.layers.values()) == {TRAINING_CAST}
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.bfloat16)
    with torch.no_grad():
        theirs(torch.arange(16)[None])  # some weights are decompressed by the first forward
    ours = load(published(name, seed=1), tmp_path / "it")
    for key, weight in plain.state_dict().items():
        wanted = expected(name, key, weight)
        for state in (ours.state_dict(), theirs.state_dict()):
            assert torch.equal(state[key], wanted), key


def test_experts_of_gpt_oss(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    plain = published("gpt_oss")
    model = trained(
        copy.deepcopy(plain),
        "blockwise",
        module_filter_fn=lambda module, name: name.endswith("experts"),
    )
    tokens = torch.arange(16)[None]
    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    save_pretrained(model, tmp_path / "it")
    tensors = load_file(tmp_path / "it/model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = model.get_parameter(name).detach()
    codes, scale = mxfp4_oracle.encode(weight.mT.contiguous())
    assert_bitwise(tensors[f"{name}_blocks"], mxfp4_oracle.pack(codes).view(4, 192, 2, 16))
    assert_bitwise(tensors[f"{name}_scales"], scale)
    read = mxfp4.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    loaded = load(published("gpt_oss", seed=1), tmp_path / "it").get_parameter(name).detach()
    assert_bitwise(loaded, mxfp4_oracle.project(weight.mT.contiguous()).mT)
    assert torch.equal(read, loaded)
    # Trained on from there; and in files of other layouts.
    again = load(
        trained(
            published("gpt_oss", seed=1),
            "blockwise",
            module_filter_fn=lambda module, name: name.endswith("experts"),
        ),
        tmp_path / "it",
    )
    assert_bitwise(again(tokens).logits, model(tokens).logits)
    assert main(["inspect", str(tmp_path / "it"), "--data"]) == 0
    assert main(["convert", str(tmp_path / "it"), str(tmp_path / "b"), "--layout", "bfloat16"]) == 0
    assert main(["compare", str(tmp_path / "it"), str(tmp_path / "b")]) == 0
    assert_bitwise(load_file(tmp_path / "b/model.safetensors")[name], loaded)
    assert main(["convert", str(tmp_path / "it"), str(tmp_path / "c"), "--layout", "mxfp4"]) == 2
    for layout in ("mxfp4", "fine_grained"):
        with pytest.raises(ValueError, match="proj: MXFP4 stacks"):
            plan_save(model, layout)
    own = lambda module, name: name.endswith("experts")  # noqa: E731
    float8.convert_to_float8_inference(model, module_filter_fn=own)
    save_pretrained(model, tmp_path / "frozen")
    for key, value in load_file(tmp_path / "frozen/model.safetensors").items():
        assert torch.equal(value, tensors[key]), key


def test_faulty_stacks_are_refused(tmp_path):
    blocks = torch.zeros(2, 64, 3, 16, dtype=torch.uint8)
    scales = torch.full((2, 64, 3), 127, dtype=torch.uint8)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 96, 64))
    config = {"quant_method": "mxfp4"}
    write(tmp_path / "a", {"w_blocks": blocks, "w_scales": scales}, config)
    load(model, tmp_path / "a")
    for number, (tensors, says) in enumerate(
        [
            ({"w_blocks": blocks}, "w_scales is missing"),
            ({"w_scales": scales}, "w_blocks is missing|w is missing"),
            ({"w_blocks": blocks[..., :8], "w_scales": scales}, "of shape"),
            ({"w_blocks": blocks[0], "w_scales": scales[0]}, "expected a stack"),
        ]
    ):
        write(tmp_path / str(number), tensors, config)
        with pytest.raises(ValueError, match=says):
            load(model, tmp_path / str(number))


def test_float8_tensors_of_any_granularity_are_packed_where_they_fit():
    x = mxfp4_oracle.project(torch.randn(64, 64))
    wanted = MXFP4().cast(x, E8M0, None)
    for block in (Blockwise(1, 32), Blockwise(32, 32)):
        fits = MXFP4().fit(
            Float8Tensor.from_high_precision(x, E4M3, granularity=block, scale_format=E8M0)
        )
        assert_bitwise(fits.float8_data.float(), wanted.float8_data.float())
