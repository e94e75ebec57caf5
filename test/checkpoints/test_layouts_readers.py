"""Our layouts in the libraries that read them: transformers, and the compressed-tensors package.

A small Llama is written in each layout and loaded by ``from_pretrained``. Its weights are ours, bit
for bit. vLLM is not installed with the tests: the rules of its loader are a table at the end.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
from assertions import assert_bitwise
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from layout_cases import LAYOUT_CASES, layer_of
from transformers.quantizers.quantizers_utils import should_convert_module

FORMAT = {n: c for n, c in LAYOUT_CASES.items() if c.name == "compressed_tensors"}


# --- transformers


@pytest.mark.parametrize(
    ("layer", "skipped"),
    [
        ("model.q_proj", "q_proj"),
        ("model.mlp.up", "model.mlp"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.gate"),
        ("layers.11.up", "layers.1.up"),
        ("lm_head", "lm_head"),
    ],
)
def test_fine_grained_refuses_the_lists_that_transformers_misreads(layer, skipped):
    is_converted = should_convert_module(layer, [skipped])
    try:
        LAYOUT_CASES["fine_grained"].quantization_config([layer], [skipped])
    except ValueError:
        assert not is_converted
    else:
        assert is_converted


# --- compressed-tensors


@pytest.mark.parametrize("name", FORMAT)
@pytest.mark.parametrize("shape", [(256, 384), (200, 320), (5, 32)])
def test_compressed_tensors_decompresses_ours(name, shape):
    layout = FORMAT[name]
    layer = layer_of(layout, shape, torch.float32)
    stored = {k.removeprefix("a.up_proj."): t for k, t in layout.tensors(*layer).items()}
    config = QuantizationConfig.model_validate(layout.quantization_config(["a.up_proj"], []))
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    found = compressor.decompress(stored, scheme)["weight"]
    assert_bitwise(found, layer.weight.dequantize().to(found.dtype), (name, shape))


# --- vLLM 0.33.0: what its loader takes

# The parameter that receives a tensor, in the file that makes it, and what the parameter accepts
# (vllm/model_executor/parameter.py): PerTensorScaleParameter () or (1,); the others their own
# shape. `copy_` then converts the dtype, exactly from E8M0 to float32.
# - quantization/fp8.py, Fp8LinearMethod: BlockQuantScaleParameter (ceil(N / 128), ceil(K / 128)).
# - compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py, by strategy: PerTensorScaleParameter,
#   ChannelQuantScaleParameter (N, 1), BlockQuantScaleParameter; input_scale: per tensor.
# - compressed_tensors/schemes/compressed_tensors_w8a8_mxfp8.py: GroupQuantScaleParameter
#   (N, K / 32), uint8.
# - quantization/modelopt.py: PerTensorScaleParameter twice.
ONE, N, K = [(), (1,)], 256, 384
VLLM = {
    "fine_grained": {"weight_scale_inv": [(2, 3)]},
    "fine_grained_pow2": {"weight_scale_inv": [(2, 3)]},
    "fine_grained_e8m0": {"weight_scale_inv": [(2, 3)]},
    "tensorwise": {"weight_scale": ONE},
    "tensorwise_static": {"weight_scale": ONE, "input_scale": ONE},
    "rowwise": {"weight_scale": [(N, 1)]},
    "rowwise_static": {"weight_scale": [(N, 1)], "input_scale": ONE},
    "blocks": {"weight_scale": [(2, 3)]},
    "mx": {"weight_scale": [(N, K // 32)]},
    "modelopt": {"weight_scale": ONE, "input_scale": ONE},
}


@pytest.mark.parametrize("name", VLLM)
def test_keys_shapes_and_dtypes_are_those_of_vllms_parameters(name):
    layout = LAYOUT_CASES[name]
    stored = {
        k.removeprefix("a.up_proj."): t
        for k, t in layout.tensors(*layer_of(layout, (N, K))).items()
    }
    assert stored.pop("weight").dtype == torch.float8_e4m3fn
    assert {key: tuple(t.shape) in VLLM[name][key] for key, t in stored.items()} == dict.fromkeys(
        VLLM[name], True
    )
    wanted = {"mx": torch.uint8, "fine_grained_e8m0": torch.float8_e8m0fnu}
    assert {t.dtype for t in stored.values()} == {wanted.get(name, torch.float32)}
