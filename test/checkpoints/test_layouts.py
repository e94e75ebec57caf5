"""Layouts: a layer becomes named tensors and back, to the same bits; anything wrong is refused.

The oracle reads the stored tensors alone, by the words of each format, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from layout_cases import BLOCKS, LAYOUT_CASES, MX, every_layout, layer_of
from torch import Tensor

from float8 import E4M3, E5M2, Float8Tensor
from float8.checkpoints import CompressedTensors, FineGrained, ModelOpt
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.layouts import LAYOUTS, layout_of
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Tensorwise

# Whole blocks; edges in both dimensions; one block; one row.
SHAPES = ((256, 384), (200, 320), (128, 32), (1, 64))


def read_back(layout: Layout, stored: dict[str, Tensor], dtype=torch.bfloat16) -> Layer:
    name = next(iter(stored)).removesuffix(".weight")
    return layout.layer(name, stored.__getitem__, stored.keys(), dtype)


def stored_values(stored: dict[str, Tensor]) -> Tensor:
    """What a file's weight stands for: ``codes * scale``, scales spread over their blocks."""
    (data,) = (t for key, t in stored.items() if key.endswith(".weight"))
    (scale,) = (t for key, t in stored.items() if ".weight_scale" in key)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scale.view(torch.uint8).to(torch.float64) - 127
        scale64 = 2.0**exponents
    else:
        scale64 = scale.to(torch.float64)
    if scale64.numel() > 1:
        rows, columns = (
            torch.arange(n) // max(e for e in (1, 3, 5, 32, 128, n) if math.ceil(n / e) == blocks)
            for n, blocks in zip(data.shape, scale64.shape, strict=True)
        )
        scale64 = scale64[rows][:, columns]
    return oracle.table(torch.float8_e4m3fn)[data.view(torch.uint8).long()] * scale64


# --- there and back


@every_layout
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_comes_back_to_the_same_bits(layout, shape):
    layer = layer_of(layout, shape)
    assert layout.refuses(layer) is None
    stored = layout.tensors(layer)
    back = read_back(layout, stored)
    assert back.name == layer.name
    assert_same_float8(back.weight, layer.weight, (layout, shape))
    assert next(iter(stored)) == "a.up_proj.weight"
    assert tuple(key.removeprefix("a.up_proj") for key in stored)[1:] == layout.suffixes()
    if layout.static_inputs:
        assert_bitwise(back.input_scale, layer.input_scale)


@every_layout
def test_nothing_is_copied(layout):
    layer = layer_of(layout)
    storages = {
        t.untyped_storage().data_ptr() for t in (layer.weight.float8_data, layer.weight.scale)
    }
    stored = layout.tensors(layer)
    assert {stored[key].untyped_storage().data_ptr() for key in list(stored)[:2]} == storages


@every_layout
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stored_weight_is_codes_times_scale(layout, shape):
    layer = layer_of(layout, shape, torch.float32)
    found = layer.weight.dequantize().double()
    expected = stored_values(layout.tensors(layer))
    assert_bitwise(found, expected.to(torch.float32).double(), (layout, shape))


@pytest.mark.parametrize("fault", ["inverse", "transposed", "one block further"])
def test_the_oracle_sees_a_wrong_scale(fault):
    layer = layer_of(FineGrained(), (256, 256), torch.float32)
    stored = FineGrained().tensors(layer)
    key = "a.up_proj.weight_scale_inv"
    wrong = {
        "inverse": stored[key].reciprocal(),
        "transposed": stored[key].t(),
        "one block further": stored[key].roll(1, 0),
    }
    found = stored_values({**stored, key: wrong[fault]})
    assert not torch.equal(found.to(torch.float32), layer.weight.dequantize())


@every_layout
def test_meta_tensors_have_the_names_and_sizes(layout):
    real = layer_of(layout)
    weight = Float8Tensor(
        *(part.to("meta") for part in (real.weight.float8_data, real.weight.scale)),
        real.weight.block,
        real.weight.dtype,
    )
    layer = Layer(real.name, weight, real.input_scale)
    assert layout.refuses(layer) is None
    found = {key: (t.shape, t.dtype) for key, t in layout.tensors(layer).items()}
    assert found == {key: (t.shape, t.dtype) for key, t in layout.tensors(real).items()}


# --- what a file may hold besides


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("layout", [CompressedTensors(static_inputs=True), ModelOpt()])
def test_a_scale_per_tensor_has_any_shape_of_one_element(layout, shape):
    layer = layer_of(layout)
    stored = layout.tensors(layer)
    reshaped = {k: t if k.endswith(".weight") else t.reshape(shape) for k, t in stored.items()}
    back = read_back(layout, reshaped)
    assert_same_float8(back.weight, layer.weight)
    assert_bitwise(back.input_scale, layer.input_scale)


@pytest.mark.parametrize("name", ["fine_grained", "tensorwise", "rowwise", "blocks"])
def test_scales_in_bfloat16_are_read_exactly(name):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(layer_of(layout))
    key = list(stored)[1]
    stored[key] = stored[key].to(torch.bfloat16)
    scale = read_back(layout, stored).weight.scale
    assert_bitwise(scale, stored[key].to(torch.float32).reshape(scale.shape))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_bytes_of_e8m0_become_float32_where_scales_are_powers_of_two(dtype):
    """``scale_fmt="ue8m0"`` does not say which dtype stores the scales; blocks of zeros too."""
    in_bytes = FineGrained(scale_format=ScaleFormat.E8M0)
    x = torch.randn(256, 256)
    x[:128, :128] = 0
    weight = Float8Tensor.from_high_precision(x, E4M3, BLOCKS, scale_format=ScaleFormat.E8M0)
    stored = in_bytes.tensors(Layer("a", weight))
    stored["a.weight_scale_inv"] = stored["a.weight_scale_inv"].view(dtype)
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
    assert_same_float8(read_back(layout, FineGrained().tensors(layer)).weight, layer.weight)
    assert "powers of two" in layout.refuses(layer)


# --- files with a fault


@dataclass(frozen=True)
class Fault:
    """One change of a layer's stored tensors, and what the message must say."""

    key: str
    change: object  # (tensor) -> tensor, or None: the tensor is missing
    says: str


def _first(value: float):
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[0] = value
        return t

    return change


FAULTS = {
    "missing": Fault("scale", None, "is missing"),
    "nan": Fault("scale", _first(math.nan), "holds nan at"),
    "inf": Fault("scale", _first(math.inf), "holds inf at"),
    "zero": Fault("scale", _first(0.0), "holds 0.0 at"),
    "negative": Fault("scale", _first(-0.5), "holds -0.5 at"),
    "float64": Fault("scale", lambda t: t.double(), "is torch.float64, expected"),
    "integers": Fault("scale", lambda t: t.to(torch.int32), "is torch.int32, expected"),
    "one row more": Fault("scale", lambda t: torch.cat([t, t[:1]]), "has shape"),
    "flat": Fault("scale", lambda t: t.reshape(-1, 1, 1), "has shape"),
    "bf16 weight": Fault("weight", lambda t: t.to(torch.bfloat16), "is torch.bfloat16, expected"),
    "E5M2 weight": Fault("weight", lambda t: t.view(torch.float8_e5m2), "is torch.float8_e5m2"),
    "3-d weight": Fault("weight", lambda t: t[None], "expected a matrix"),
}
FLOAT_SCALES = {n: c for n, c in LAYOUT_CASES.items() if not c.scale_format.is_e8m0}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("layout", FLOAT_SCALES.values(), ids=FLOAT_SCALES)
def test_a_faulty_file_is_refused_by_key_and_value(layout, fault):
    stored = layout.tensors(layer_of(layout))
    key = list(stored)[0 if fault.key == "weight" else 1]
    if fault.change is None:
        del stored[key]
    else:
        stored[key] = fault.change(stored[key].reshape(1) if not stored[key].dim() else stored[key])
    with pytest.raises(ValueError, match=fault.says) as raised:
        read_back(layout, stored)
    assert str(raised.value).startswith(key)


@pytest.mark.parametrize("name", ["fine_grained_e8m0", "mx"])
def test_a_byte_that_is_nan_is_refused(name):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(layer_of(layout))
    key = list(stored)[1]
    stored[key] = stored[key].clone()
    stored[key].view(torch.uint8)[0, 1] = 255
    with pytest.raises(ValueError, match=rf"{key} holds nan at \[0, 1\]"):
        read_back(layout, stored)


@pytest.mark.parametrize("name", ["fine_grained", "mx"])
def test_bytes_and_floats_are_not_taken_for_each_other(name):
    """Bytes of uint8 mean E8M0 only where the config says so."""
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(layer_of(layout))
    key = list(stored)[1]
    other = {torch.float32: torch.uint8, torch.uint8: torch.float32}[stored[key].dtype]
    stored[key] = torch.full(stored[key].shape, 120).to(other)
    with pytest.raises(ValueError, match=f"{key} is {other}, expected"):
        read_back(layout, stored)


@pytest.mark.parametrize("name", ["fine_grained", "blocks", "mx", "rowwise"])
def test_a_transposed_grid_and_another_block_size_are_refused(name):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(layer_of(layout, (256, 384)))
    key = list(stored)[1]
    for wrong in (stored[key].t(), stored[key].repeat_interleave(2, 1)):
        with pytest.raises(ValueError, match=rf"{key} has shape \({wrong.shape[0]}, "):
            read_back(layout, {**stored, key: wrong})


@pytest.mark.parametrize("name", ["tensorwise_static", "rowwise_static", "modelopt"])
def test_an_input_scale_that_is_missing_or_wrong_is_refused(name):
    layout = LAYOUT_CASES[name]
    stored = layout.tensors(layer_of(layout))
    key = "a.up_proj.input_scale"
    for wrong, says in ((torch.tensor(0.0), "holds 0.0"), (torch.ones(2), r"has shape \(2,\)")):
        with pytest.raises(ValueError, match=f"{key} {says}"):
            read_back(layout, {**stored, key: wrong})
    del stored[key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        read_back(layout, stored)


# --- layers that a layout cannot store


@every_layout
def test_a_layer_of_another_kind_is_refused_with_the_reason(layout):
    layer = layer_of(layout)
    data, scale = layer.weight.float8_data, layer.weight.scale
    block, dtype = layer.weight.block, layer.weight.dtype
    float32 = Float8Tensor.from_high_precision(torch.ones(200, 320), E4M3, Blockwise(7, 11))
    assert "7x11 scales" in layout.refuses(Layer("a", float32))
    e5m2 = Float8Tensor.from_high_precision(
        torch.ones(200, 320), E5M2, layout.granularity, scale_format=layout.scale_format
    )
    assert "e5m2" in layout.refuses(Layer("a", e5m2))
    assert "(2, 200, 320)" in layout.refuses(
        Layer(
            "a",
            Float8Tensor(data[None].repeat(2, 1, 1), scale[None, :1, :1].float(), (-1,) * 3, dtype),
        )
    )
    if not layout.scale_format.is_e8m0:
        bad = Float8Tensor(data, torch.full_like(scale, math.nan), block, dtype)
        assert "nan at [0, 0]" in layout.refuses(Layer("a", bad))
        as_bytes = Float8Tensor(data, torch.ones_like(scale).to(torch.float8_e8m0fnu), block, dtype)
        assert "float8_e8m0fnu" in layout.refuses(Layer("a", as_bytes))
    if layout.static_inputs:
        assert "no static scale" in layout.refuses(Layer("a", layer.weight))
        for wrong in (torch.ones(2), torch.tensor(1.0).double(), torch.tensor(-1.0)):
            assert "input scale" in layout.refuses(Layer("a", layer.weight, wrong))


def test_mx_needs_whole_blocks():
    layout = CompressedTensors(MX)
    assert layout.refuses(layer_of(layout, (5, 40))) == "in_features=40 is not a multiple of 32"


def test_a_layout_that_no_file_can_have_is_refused():
    with pytest.raises(ValueError, match=r"granularity must be one of .* got Blockwise"):
        CompressedTensors(Blockwise(3, 5))
    with pytest.raises(ValueError, match=r"static_inputs=True needs Tensorwise\(\) or Rowwise\(\)"):
        CompressedTensors(BLOCKS, static_inputs=True)
    with pytest.raises(ValueError, match="scale_format must be one of"):
        FineGrained(scale_format=ScaleFormat.E8M0_FLOOR)
    with pytest.raises(ValueError, match=r"block must be \(rows, columns\)"):
        FineGrained((128,))


def test_the_table_names_each_layout_once():
    assert {name: layout.name for name, layout in LAYOUTS.items()} == {n: n for n in LAYOUTS}
    assert {type(layout) for layout in LAYOUT_CASES.values()} == set(LAYOUTS.values())
    assert Tensorwise() == CompressedTensors().granularity == ModelOpt().granularity
