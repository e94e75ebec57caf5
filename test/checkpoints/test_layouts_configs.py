"""quantization_config: ours are read back, published ones are read, unreadable ones are refused."""

from __future__ import annotations

import json

import pytest
from layout_cases import LAYOUT_CASES, every_layout

from float8.checkpoints import CompressedTensors, FineGrained, ModelOpt
from float8.checkpoints.layouts import layout_of
from float8.formats import ScaleFormat
from float8.granularity import Rowwise, Tensorwise

# deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; DeepSeek-V3.1 adds scale_fmt.
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# As llm-compressor writes FP8_DYNAMIC, with every field.
LLM_COMPRESSOR = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.23,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
}
# NVIDIA/TensorRT-Model-Optimizer, export/convert_hf_config.py, and what it converts.
MODEL_OPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quant_method": "modelopt",
}
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
POW2 = FineGrained(scale_format=ScaleFormat.POWER_OF_TWO)


def changed(config: dict, **fields: object) -> dict:
    return {**config, **fields}


def with_arguments(which: str, **arguments: object) -> dict:
    config = json.loads(json.dumps(LLM_COMPRESSOR))
    config["config_groups"]["group_0"][which].update(arguments)
    return config


@every_layout
def test_our_config_is_read_back_and_is_json(layout):
    config = layout.quantization_config(["a.up_proj"], ["lm_head", "a.gate"])
    expected = (
        POW2 if layout.scale_format is ScaleFormat.E8M0 and "mx" not in str(config) else layout
    )
    assert layout_of(json.loads(json.dumps(config))) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DEEPSEEK_V3, FineGrained()),
        (changed(DEEPSEEK_V3, scale_fmt="ue8m0"), POW2),
        (changed(DEEPSEEK_V3, scale_fmt="float", ignored_layers=["lm_head"]), FineGrained()),
        (changed(DEEPSEEK_V3, weight_block_size=[64, 128]), FineGrained((64, 128))),
        (LLM_COMPRESSOR, CompressedTensors(Rowwise())),
        (with_arguments("weights", strategy="tensor"), CompressedTensors(Tensorwise())),
        (
            with_arguments("input_activations", strategy="tensor", dynamic=False),
            CompressedTensors(Rowwise(), static_inputs=True),
        ),
        (MODEL_OPT, ModelOpt()),
        (HF_QUANT_CONFIG, ModelOpt()),
    ],
    ids=str,
)
def test_published_configs_are_read(config, expected):
    assert layout_of(config) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed(DEEPSEEK_V3, activation_scheme="static"), "activation_scheme='static'"),
        (changed(DEEPSEEK_V3, fmt="e5m2"), "fmt='e5m2', readable: 'e4m3'"),
        (changed(DEEPSEEK_V3, scale_fmt="float16"), "scale_fmt='float16'"),
        (changed(DEEPSEEK_V3, weight_block_size=None), "weight_block_size=None; readable: two"),
        (changed(DEEPSEEK_V3, weight_block_size=[128]), r"weight_block_size=\[128\]"),
        (changed(DEEPSEEK_V3, weight_block_size=["128", 128]), "weight_block_size="),
        (changed(DEEPSEEK_V3, quant_method="bitsandbytes"), "quant_method='bitsandbytes'"),
        (with_arguments("weights", num_bits=4), "'num_bits': 4"),
        (with_arguments("weights", type="int"), "'type': 'int'"),
        (with_arguments("weights", symmetric=False), "'symmetric': False"),
        (with_arguments("weights", dynamic=True), r"config_groups\['group_0'\]"),
        (with_arguments("input_activations", strategy="tensor"), "input_activations="),
        (changed(LLM_COMPRESSOR, config_groups={}), "config_groups of 0 different"),
        (changed(LLM_COMPRESSOR, sparsity_config={"format": "sparse-bitmask"}), "sparse-bitmask"),
        (
            changed(LLM_COMPRESSOR, transform_config={"config_groups": {"R1": 1}}),
            "transform_config",
        ),
        (changed(MODEL_OPT, quant_algo="NVFP4"), "quant_algo='NVFP4'; readable: 'FP8'"),
        ({}, "quant_method=None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_configs_are_refused_by_field(config, says):
    with pytest.raises(ValueError, match=says):
        layout_of(config)


def test_groups_of_two_schemes_are_refused_and_of_one_read():
    groups = {
        "group_0": LLM_COMPRESSOR["config_groups"]["group_0"],
        "group_1": with_arguments("weights", strategy="tensor")["config_groups"]["group_0"],
    }
    with pytest.raises(ValueError, match="config_groups of 2 different schemes"):
        layout_of(changed(LLM_COMPRESSOR, config_groups=groups))
    groups["group_1"] = changed(groups["group_0"], targets=["re:.*experts.*"])
    found = layout_of(changed(LLM_COMPRESSOR, config_groups=groups))
    assert found == CompressedTensors(Rowwise())


def test_a_dense_sparsity_config_means_nothing():
    config = changed(LLM_COMPRESSOR, sparsity_config={"format": "dense"})
    assert layout_of(config) == CompressedTensors(Rowwise())


# --- layers in high precision


def skipped_of(config: dict) -> list[str]:
    return config.get("modules_to_not_convert", config.get("ignore"))


@every_layout
def test_skipped_layers_are_listed_once_in_order(layout):
    config = layout.quantization_config(["a.up"], ["lm_head", "b.gate", "lm_head"])
    assert skipped_of(config) == ["b.gate", "lm_head"]


@pytest.mark.parametrize(
    ("layout", "layer", "name"),
    [
        ("fine_grained", "model.q_proj", "q_proj"),  # transformers: the end of a name
        ("fine_grained", "model.mlp.up", "model.mlp"),  # and its beginning
        ("modelopt", "layers.0.mlp.gate_proj", "layers.0.mlp.gate"),  # vLLM: any part
        ("modelopt", "lm_head_2", "lm_head"),
        ("fine_grained", "a", "a"),
        ("modelopt", "a", "a"),
        ("tensorwise", "a", "a"),
    ],
)
def test_a_list_that_readers_misread_is_refused(layout, layer, name):
    with pytest.raises(ValueError, match=f"{layer} is in float8 and {name} is not"):
        LAYOUT_CASES[layout].quantization_config([layer], [name])


@pytest.mark.parametrize(
    ("layout", "layer", "name"),
    [
        ("fine_grained", "layers.0.mlp.gate_proj", "layers.0.mlp.gate"),
        ("fine_grained", "layers.11.up", "layers.1.up"),
        ("modelopt", "layers.0.mlp.up_proj", "layers.0.mlp.gate"),
        ("tensorwise", "layers.0.mlp.gate_proj", "layers.0.mlp.gate"),
    ],
)
def test_other_lists_are_written(layout, layer, name):
    config = LAYOUT_CASES[layout].quantization_config([layer], [name])
    assert skipped_of(config) == [name]


def test_only_modelopt_has_another_file():
    for name, layout in LAYOUT_CASES.items():
        files = layout.other_files(["a.up"], ["lm_head"])
        assert (files == {}) == (name != "modelopt")
    quantization = files["hf_quant_config.json"]["quantization"]
    assert quantization["quant_algo"] == "FP8"
    assert quantization["exclude_modules"] == ["lm_head"]
