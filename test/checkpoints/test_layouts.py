"""Every layout: written, read, inspected, converted and compared, to the bits of the oracle.

The oracle casts and reads by the words of each format, in float64, and shares no code with the
library. A ``quantization_config`` of ours is read back, published ones are read or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from hand_written import FINE, compressed, write
from layout_cases import BLOCKS, LAYOUT_CASES, Layer, every_layout, layer_of
from safetensors.torch import load_file
from torch import Tensor, nn

import float8
from float8 import E4M3, E5M2, Float8LinearConfig, Float8Tensor
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    ModelOpt,
    load,
    plan_save,
    save_pretrained,
)
from float8.checkpoints.__main__ import TARGETS, main
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST
from float8.checkpoints.layouts import Layout, layout_of
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise

# Whole blocks; edges in both dimensions; one block; one row.
SHAPES = ((256, 384), (200, 320), (128, 32), (1, 64))
POW2 = FineGrained(scale_format=ScaleFormat.POWER_OF_TWO)


def read_back(layout: Layout, stored: dict[str, Tensor], dtype=torch.bfloat16) -> Layer:
    name = next(iter(stored)).removesuffix(".weight")
    return Layer(name, *layout.layer(name, stored.__getitem__, stored.keys(), dtype))


# --- there and back


def model_of(shape: tuple[int, int], seed: int = 0) -> nn.Module:
    """One layer; its rows are of all magnitudes, and a block is zero."""
    torch.manual_seed(seed)
    layer = nn.Linear(shape[1], shape[0])
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 3, shape[0])[:, None])
        layer.weight[:, :128] *= shape[1] != 384
    return nn.ModuleDict({"up": layer}).bfloat16()


@every_layout
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_through_files_keep_the_bits(layout, shape, tmp_path):
    weight, bias = (p.detach().clone() for p in model_of(shape).parameters())
    block, scale_format = layout.block, layout.scale_format.value
    data, scale = oracle.quantize(weight, block, E4M3.dtype, scale_format)
    values = oracle.values(data.view(E4M3.dtype), scale, block)
    model = float8.convert_to_float8_training(
        model_of(shape), config=Float8LinearConfig(emulate=True)
    )
    scales = {"up": 0.03125} if layout.static_inputs else None
    plan = save_pretrained(model, tmp_path / "a", layout, input_scales=scales)
    is_trained = block == (-1, -1)
    assert plan.layers == {"up": TRAINING_CAST if is_trained else CAST_ANEW}
    file = load_file(tmp_path / "a/model.safetensors")
    found = dict(file)
    assert_bitwise(found.pop("up.weight"), data, "data")
    assert_bitwise(found.pop("up.bias"), bias, "bias")
    stored = found.pop(f"up{layout.scale_key}")
    stored = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
    assert (
        oracle.scale_values(stored).flatten().tolist()
        == oracle.scale_values(scale).flatten().tolist()
    )
    assert [(k, x.item()) for k, x in found.items()] == [
        (f"{name}.input_scale", x) for name, x in (scales or {}).items()
    ]
    # The config, as JSON.
    text = (tmp_path / "a/config.json").read_text()
    is_bytes = isinstance(layout, FineGrained) and layout.scale_format is ScaleFormat.E8M0
    expected = replace(layout, scale_format=POW2.scale_format) if is_bytes else layout
    assert layout_of(json.loads(text)["quantization_config"]) == expected
    # Read, and written again from what was read.
    plain = load(model_of(shape, seed=1), tmp_path / "a")
    assert_bitwise(plain["up"].weight.detach(), values.bfloat16(), "high precision")
    if block != (3, 5):  # which nothing multiplies
        resident = load(model_of(shape, seed=1), tmp_path / "a", "float8")
        assert_bitwise(resident["up"].weight.float8_data, data, "resident")
        save_pretrained(resident, tmp_path / "b", layout)
        assert_same_files(tmp_path / "b", file)
    # By the command line: the values, and the same files from high precision and from themselves.
    a, b = str(tmp_path / "a"), str(tmp_path / "values")
    assert main(["inspect", a, "--data"]) == 0
    assert main(["convert", a, b, "--layout", "float32"]) == 0
    found = load_file(tmp_path / "values/model.safetensors")
    assert_bitwise(found["up.weight"], values.float(), "converted")
    assert main(["compare", a, b]) == 0
    write(tmp_path / "plain", {"up.weight": weight, "up.bias": bias}, None)
    for target in [name for name, each in TARGETS.items() if each == layout]:
        for source in ("a",) if layout.static_inputs else ("a", "plain"):
            out = tmp_path / f"{source} again"
            assert main(["convert", str(tmp_path / source), str(out), "--layout", target]) == 0
            assert_same_files(out, file)


def assert_same_files(folder, expected: dict[str, Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert_bitwise(found[key], x, (folder.name, key))


# --- what a file may hold besides


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("layout", [CompressedTensors(static_inputs=True), ModelOpt()])
def test_a_scale_per_tensor_has_any_shape_of_one_element(layout, shape):
    layer = layer_of(layout)
    stored = layout.tensors(*layer)
    reshaped = {k: t if k.endswith(".weight") else t.reshape(shape) for k, t in stored.items()}
    back = read_back(layout, reshaped)
    assert_same_float8(back.weight, layer.weight)
    assert_bitwise(back.input_scale, layer.input_scale)


@pytest.mark.parametrize("name", ["fine_grained", "tensorwise", "rowwise", "blocks"])
def test_scales_in_bfloat16_are_read_exactly(name):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(*layer_of(layout))
    key = list(stored)[1]
    stored[key] = stored[key].to(torch.bfloat16)
    scale = read_back(layout, stored).weight.scale
    assert_bitwise(scale, stored[key].to(torch.float32).reshape(scale.shape))


def test_bytes_of_e8m0_become_float32_where_scales_are_powers_of_two():
    """``scale_fmt="ue8m0"`` does not say which dtype stores the scales; blocks of zeros too."""
    in_bytes = FineGrained(scale_format=ScaleFormat.E8M0)
    x = torch.randn(256, 256)
    x[:128, :128] = 0
    weight = Float8Tensor.from_high_precision(x, E4M3, BLOCKS, scale_format=ScaleFormat.E8M0)
    stored = in_bytes.tensors("a", weight)
    read = layout_of(in_bytes.quantization_config(["a"], []))
    back = read_back(read, stored, torch.float32).weight
    assert back.scale.dtype == torch.float32
    assert_bitwise(back.dequantize(), weight.dequantize())
    assert_same_float8(read_back(in_bytes, stored, torch.float32).weight, weight)


def test_scales_that_are_no_powers_of_two_are_read_though_not_written():
    """DeepSeek-V3.1 says ``"ue8m0"``; scales of its ``o_proj`` have another mantissa.

    deepseek-ai/DeepSeek-V3, issue 961.
    """
    layer = layer_of(FineGrained())
    layout = FineGrained(scale_format=ScaleFormat.POWER_OF_TWO)
    assert_same_float8(read_back(layout, FineGrained().tensors(*layer)).weight, layer.weight)
    assert "powers of two" in layout.fit(layer.weight)
    layer.weight.scale.flatten()[0] = 0.5  # one of them is
    assert "powers of two" in layout.fit(layer.weight)


# --- files with a fault


def first(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.flatten().index_fill(0, torch.tensor(0), value).reshape(t.shape)


def nan_byte(t: Tensor) -> Tensor:
    return t.view(torch.uint8).index_fill(1, torch.tensor(1), 255).view(t.dtype)


FLOATS = [name for name, layout in LAYOUT_CASES.items() if not layout.scale_format.is_e8m0]
BYTES = ["fine_grained_e8m0", "mx"]
GRIDS = ["fine_grained", "blocks", "mx", "rowwise"]
STATIC = ["tensorwise_static", "rowwise_static", "modelopt"]
# (layouts, number of the tensor, its change; or None: it is missing; what the message says)
FAULTS = [
    (FLOATS, 1, None, "is missing"),
    (FLOATS, 1, first(math.nan), "holds nan"),
    (FLOATS, 1, first(math.inf), "holds inf"),
    (FLOATS, 1, first(0.0), r"holds 0\.0"),
    (FLOATS, 1, first(-0.5), r"holds -0\.5"),
    (FLOATS, 1, Tensor.double, "is torch.float64"),
    (FLOATS, 1, Tensor.int, "is torch.int32"),
    (FLOATS, 1, lambda t: torch.ones(t.numel() + 1, 1), "of shape"),
    (FLOATS, 1, lambda t: t.reshape(-1, 1, 1), "of shape"),
    (FLOATS, 0, Tensor.bfloat16, "is torch.bfloat16"),
    (FLOATS, 0, lambda t: t.view(torch.float8_e5m2), "is torch.float8_e5m2"),
    (FLOATS, 0, lambda t: t[None], "expected a matrix"),
    (BYTES, 1, nan_byte, r"holds nan at \[0, 1\]"),
    (["fine_grained"], 1, lambda t: torch.full_like(t, 120, dtype=torch.uint8), "torch.uint8"),
    (["mx"], 1, Tensor.float, "is torch.float32"),
    (GRIDS, 1, Tensor.t, "of shape"),
    (GRIDS, 1, lambda t: t.repeat_interleave(2, 1), "of shape"),
    (STATIC, 2, None, "is missing"),
    (STATIC, 2, lambda t: t * 0, r"holds 0\.0"),
    (STATIC, 2, lambda t: torch.ones(2), r"of shape \(2,\)"),
]


@pytest.mark.parametrize(
    ("name", "number", "change", "says"),
    [(name, *rest) for names, *rest in FAULTS for name in names],
)
def test_a_faulty_file_is_refused_by_key_and_value(name, number, change, says):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(*layer_of(layout, (256, 384)))
    key = list(stored)[number]
    tensor = stored.pop(key)
    if change is not None:
        stored[key] = change(tensor)
    with pytest.raises(ValueError, match=says) as raised:
        layout.layer("a.up_proj", stored.__getitem__, stored.keys(), torch.bfloat16)
    assert str(raised.value).startswith(key)


# --- layers that a layout cannot store


@every_layout
def test_a_layer_of_another_kind_is_refused_with_the_reason(layout):
    _, weight, _ = layer_of(layout)
    x, scale = torch.ones(200, 320), weight.scale
    cast = Float8Tensor.from_high_precision
    refused = [
        (cast(x, E4M3, Blockwise(7, 11)), "7x11 scales"),
        (cast(x, E5M2, layout.granularity, scale_format=layout.scale_format), "e5m2"),
    ]
    if not layout.scale_format.is_e8m0:
        in_bytes = torch.ones_like(scale).to(torch.float8_e8m0fnu)
        for bad, says in ((torch.full_like(scale, math.nan), "nan at"), (in_bytes, "e8m0fnu")):
            refused.append((weight._replace(scale=bad), says))
    for weight, says in refused:
        assert says in layout.fit(weight)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CompressedTensors(Blockwise(3, 5)), "granularity must be one of"),
        (
            lambda: plan_save(
                float8.convert_to_float8_training(
                    model_of((5, 40)), config=Float8LinearConfig(emulate=True)
                ),
                LAYOUT_CASES["mx"],
            ),
            "up: in_features=40 is not a multiple of 32",
        ),
        (lambda: CompressedTensors(BLOCKS, static_inputs=True), "granularity must be one of"),
    ],
)
def test_a_layout_that_no_file_can_have_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# --- quantization_config

# As llm-compressor writes FP8_DYNAMIC; NVIDIA/TensorRT-Model-Optimizer, what
# export/convert_hf_config.py converts; DeepSeek-V3.1 adds scale_fmt to `FINE`.
DYNAMIC = compressed("channel")
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}
OWN_FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def with_arguments(which: str, **arguments: object) -> dict:
    config = json.loads(json.dumps(DYNAMIC))
    config["config_groups"]["group_0"][which].update(arguments)
    return config


def with_groups(*configs: dict, **others: object) -> dict:
    groups = {str(i): config["config_groups"]["group_0"] for i, config in enumerate(configs)}
    return DYNAMIC | {"config_groups": groups} | others


CONFIGS = [
    (FINE, FineGrained()),
    (FINE | {"scale_fmt": "ue8m0"}, POW2),
    (FINE | {"scale_fmt": "float", "ignored_layers": ["lm_head"]}, FineGrained()),
    (FINE | {"weight_block_size": [64, 128]}, FineGrained((64, 128))),
    (DYNAMIC, CompressedTensors(Rowwise())),
    (compressed("tensor"), CompressedTensors(Tensorwise())),
    (compressed("channel", static=True), CompressedTensors(Rowwise(), static_inputs=True)),
    (DYNAMIC | {"sparsity_config": {"format": "dense"}}, CompressedTensors(Rowwise())),
    (with_groups(DYNAMIC, DYNAMIC), CompressedTensors(Rowwise())),
    (MODEL_OPT, ModelOpt()),
    (OWN_FILE, ModelOpt()),
    (FINE | {"activation_scheme": "static"}, "'activation_scheme': 'static'"),
    (FINE | {"fmt": "e5m2"}, "'fmt': 'e5m2'"),
    (FINE | {"scale_fmt": "float16"}, "'scale_fmt': 'float16'"),
    (FINE | {"weight_block_size": None}, "weight_block_size"),
    (FINE | {"weight_block_size": ["128", 128]}, "weight_block_size"),
    (with_arguments("weights", num_bits=4), "'num_bits': 4"),
    (with_arguments("weights", dynamic=True), "config_groups"),
    (with_arguments("input_activations", strategy="tensor"), "one scheme of 8 bit"),
    (with_groups(), "one scheme of 8 bit"),
    (with_groups(DYNAMIC, compressed("tensor")), "one scheme of 8 bit"),
    (DYNAMIC | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
    (DYNAMIC | {"transform_config": {"config_groups": {"R1": 1}}}, "transform_config"),
    (MODEL_OPT | {"quant_algo": "NVFP4"}, "NVFP4"),
    ({}, "readable are"),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS)
def test_published_configs_are_read_or_refused_by_field(config, expected):
    if isinstance(expected, Layout):
        assert layout_of(config) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            layout_of(config)


def skipped_of(config: dict) -> list[str]:
    return config.get("modules_to_not_convert", config.get("ignore"))


# Readers of modelopt go by any part of names (vLLM), those of compressed_tensors by whole names; of
# fine_grained see test_layouts_readers.py.
@pytest.mark.parametrize(
    ("layout", "layer", "name", "is_misread"),
    [
        ("modelopt", "layers.0.mlp.gate_proj", "layers.0.mlp.gate", True),
        ("modelopt", "lm_head_2", "lm_head", True),
        ("modelopt", "a", "a", True),
        ("modelopt", "layers.0.mlp.up_proj", "layers.0.mlp.gate", False),
        ("tensorwise", "a", "a", True),
        ("tensorwise", "layers.0.mlp.gate_proj", "layers.0.mlp.gate", False),
    ],
)
def test_lists_of_skipped_layers_that_readers_misread_are_refused(layout, layer, name, is_misread):
    if is_misread:
        with pytest.raises(ValueError, match=f"{layer} is in float8 and {name} is not"):
            LAYOUT_CASES[layout].quantization_config([layer], [name])
    else:
        config = LAYOUT_CASES[layout].quantization_config([layer], [name, "b", name])
        assert skipped_of(config) == sorted(["b", name])
