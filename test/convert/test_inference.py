"""Layers that keep only the float8 copy of a frozen weight: bits, bytes, checkpoints, adapters."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import weakref

import oracle
import pytest
import torch
from assertions import (
    assert_bitwise,
    assert_error_within_baseline,
    assert_same_float8,
    assert_sqnr_at_least,
)
from shapes import pairs
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_from_float8_training,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.convert.inference import convert_to_float8_inference, reason_against_inference
from float8.kernels import products

# recipe -> the block and the scale format of a weight
BLOCKS = {"tensorwise": (-1, -1), "rowwise": (1, -1), "blockwise": (128, 128), "mxfp8": (1, 32)}
BLOCKS["mxfp8_2d"] = (32, 32)
SCALES = dict(zip(BLOCKS, ("float32", "power_of_two", "power_of_two", "e8m0", "e8m0"), strict=True))
SHAPES = [(48, 160, 96), (1, 16, 16), (5, 123, 7), (130, 257, 131), (3, 1, 1)]


def config_of(recipe: str) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(recipe)


def padding(recipe: str) -> Float8LinearConfig:
    """Converts layers of any sizes."""
    return dataclasses.replace(config_of(recipe), pad_inner_dim=True)


def mlp(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 32)).to(dtype)


def resident(recipe: str = "tensorwise", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return convert_to_float8_inference(mlp(dtype), config=config_of(recipe))


def example(rows: int = 24, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


@pairs(recipe=list(BLOCKS), shape=SHAPES, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_oracles_and_both_gemms_read_them(recipe, shape, dtype):
    """grad_input is ``g @ (codes * scale)`` but for g's own cast: no second rounding of w."""
    m, k, n = shape
    torch.manual_seed(2)
    layer = nn.Linear(k, n).to(dtype)
    sizes = torch.logspace(-2, 1, n).unsqueeze(1)  # rows of different sizes: scales must matter
    layer.weight.data *= sizes.to(dtype)
    w = layer.weight.detach().clone()
    layer = convert_to_float8_inference(layer, config=padding(recipe))
    codes, _ = oracle.quantize(w, BLOCKS[recipe], torch.float8_e4m3fn, SCALES[recipe])
    assert_bitwise(layer.weight.float8_data, codes)
    exact_w = oracle.values(layer.weight.float8_data, layer.weight.scale, BLOCKS[recipe])
    x = torch.randn(m, k).to(dtype).requires_grad_()
    g = torch.randn(m, n).to(dtype)
    out = layer(x)
    out.backward(g)
    assert layer.weight.grad is None
    assert x.grad.dtype == dtype
    # 28 dB: a cast to E4M3 with three mantissa bits is near 31.5, to E5M2 near 25.
    exact_out = x.detach().double() @ exact_w.t() + layer.bias.detach().double()
    if m * k > 100:
        assert_sqnr_at_least(out, exact_out, 28, (recipe, shape, dtype))
        assert_sqnr_at_least(x.grad, g.double() @ exact_w, 23, (recipe, shape, dtype))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_along_the_contraction_join_grad_output(recipe):
    """``g * scale`` cast along its rows, times the codes, to float32's error."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    layer.weight.data[:20] *= 1000
    layer = convert_to_float8_inference(layer, config=config_of(recipe))
    x, g = torch.randn(12, 64, requires_grad=True), torch.randn(12, 48)
    layer(x).backward(g)
    folded = g * layer.weight.scale.t()
    g8, g_scale = oracle.quantize(folded, (1, -1), torch.float8_e4m3fn, "power_of_two")
    values = oracle.table(torch.float8_e4m3fn)[g8.long()]
    codes = layer.weight.float8_data.double()
    exact = (values @ codes) * g_scale.double()
    baseline = (values.float() @ codes.float()) * g_scale
    assert_error_within_baseline(x.grad, exact, baseline)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "unit", "blockwise"])
def test_the_output_and_the_gradient_are_those_of_the_training_layer(recipe):
    model = convert_to_float8_training(mlp(), config=config_of(recipe))
    if recipe == "delayed":
        model(example()).sum().backward()
        sync_float8_amax_and_scale_history(model)
    model.eval()
    x, g = example().requires_grad_(), torch.randn(24, 32).bfloat16()
    out = model(x)
    (grad,) = torch.autograd.grad(out, x, g)
    assert convert_to_float8_inference(model) is model
    assert model.float8_conversion.converted == ["0", "2"]
    assert_bitwise(model(x), out)
    assert_bitwise(torch.autograd.grad(model(x), x, g)[0], grad)
    model.train()
    model(x).backward(g)  # a mode like any other: the weight stays frozen
    assert model[0].weight.grad is None


@pytest.mark.parametrize("recipe", BLOCKS)
def test_the_high_precision_weight_is_freed_and_half_of_the_bytes_remain(recipe):
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))
    model = model.bfloat16()
    plain = sum(w.untyped_storage().nbytes() for w in model.parameters())
    gone = [weakref.ref(layer.weight.untyped_storage()) for layer in model]
    old = [weakref.ref(w) for w in model.parameters()]
    model = convert_to_float8_inference(model, config=config_of(recipe))
    assert all(ref() is None for ref in (*old, *gone))
    parts = [part for w in model.parameters() for part in (w.float8_data, w.scale)]
    assert sum(part.untyped_storage().nbytes() for part in parts) <= 0.516 * plain
    known = (torch.float8_e4m3fn, torch.float32, torch.float8_e8m0fnu)
    assert all(part.dtype in known for part in parts)
    assert not any(isinstance(b, Tensor) for b in model.buffers())


def test_static_scales_are_used_and_checked_by_name():
    scales = {"0": 0.02, "2": torch.tensor(0.005)}
    model = convert_to_float8_inference(mlp(torch.float32), scales)
    with torch.no_grad():
        x = example(dtype=torch.float32)
        codes = oracle.cast(x, torch.full((1, 1), 0.02), (-1, -1), torch.float8_e4m3fn)
        x8 = oracle.table(torch.float8_e4m3fn)[codes.long()] * float(torch.tensor(0.02))
        exact = x8 @ model[0].weight.dequantize().double().t() + model[0].bias.double()
        assert_sqnr_at_least(model[0](x), exact, 100)
    assert model[0].config.cast_config_input.static_scale == 0.02
    kept = convert_to_float8_inference(convert_to_float8_training(mlp()), scales)
    assert kept[2].config.cast_config_input.scaling_type is ScalingType.STATIC


@pytest.mark.parametrize("amax_init", [True, False])
def test_delayed_casts_without_a_history_are_dynamic(amax_init):
    """A scale of 1, with which they may start in a training, would stay: nothing updates it."""
    config = dataclasses.replace(config_of("delayed"), enable_amax_init=amax_init)
    model, x = convert_to_float8_inference(mlp(), config=config), 1000 * example()
    assert_bitwise(model(x), resident("tensorwise")(x))


@pytest.mark.parametrize("recipe", BLOCKS)
def test_what_no_gpu_multiplies_is_refused_while_the_weight_is_still_there(recipe, monkeypatch):
    gpu, weight, config = torch.device("cuda"), torch.zeros(250, 128), config_of(recipe)
    arch = "sm_100" if "mxfp8" in recipe else "sm_90"
    monkeypatch.setattr(products, "architecture", lambda index=None: arch)
    assert "out_features=250" in reason_against_inference(weight, config, gpu)
    assert reason_against_inference(torch.zeros(256, 128), config, gpu) is None
    assert reason_against_inference(weight, padding(recipe), gpu) is None
    assert reason_against_inference(weight, config, torch.device("cpu")) is None


def test_a_weight_that_an_embedding_reads_too_stays_and_is_reported():
    model = nn.ModuleDict({"embed": nn.Embedding(64, 48), "head": nn.Linear(48, 64, bias=False)})
    model["body"] = nn.Linear(48, 48)
    model["head"].weight = model["embed"].weight
    convert_to_float8_inference(model)
    assert model.float8_conversion.converted == ["body"]
    assert "also embed.weight (Embedding)" in model.float8_conversion.skipped["head"]
    assert model["head"].weight is model["embed"].weight
    with pytest.raises(ValueError, match=r"head: static_scales has a scale for it, and .*embed"):
        convert_to_float8_inference(model, {"body": 1.0, "head": 1.0})


def test_two_layers_of_one_weight_and_one_layer_under_two_names_stay_shared():
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    model[1].weight = model[0].weight
    model.append(model[0])
    convert_to_float8_inference(model)
    assert model[0] is model[2]
    assert model[0].weight is model[1].weight
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert twin[0].weight is twin[1].weight
    plain = convert_from_float8_training(twin)
    assert plain[0].weight is plain[1].weight
    assert type(plain[0].weight) is nn.Parameter


def test_converting_again_changes_nothing_and_a_filter_leaves_layers_alone():
    model = resident()
    weights = list(model.parameters())
    convert_to_float8_inference(model)
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    model = convert_to_float8_inference(mlp(), module_filter_fn=lambda _, name: name != "2")
    assert type(model[2]) is nn.Linear
    assert model.float8_conversion.skipped == {"2": "module_filter_fn returned False"}
    root = convert_to_float8_inference(nn.Linear(32, 16))
    assert isinstance(root, Float8Linear)


def test_unit_scaled_layers_keep_their_factors_and_attributes():
    import float8.unit_scaling as uu

    torch.manual_seed(0)
    layer = uu.Linear(64, 32)
    trained = convert_to_float8_training(copy.deepcopy(layer))
    x, g = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    expected = torch.autograd.grad(trained(x), x, g)[0]
    layer = convert_to_float8_inference(layer)
    assert layer.weight.mup_type == "weight"
    assert_bitwise(layer(x), trained(x))
    assert_bitwise(torch.autograd.grad(layer(x), x, g)[0], expected)


# --- checkpoints, copies, moves


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_holds_plain_codes_and_loads_strictly(recipe, assign):
    model, x = resident(recipe), example()
    state = model.state_dict()
    assert set(state) == {f"{i}.{n}" for i in (0, 2) for n in ("weight", "weight_scale", "bias")}
    assert all(type(value) is Tensor for value in state.values())
    assert state["0.weight"].dtype == torch.float8_e4m3fn
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    # As earlier versions wrote them.
    old = {k: v.squeeze(-1) if v.dtype == torch.float8_e4m3fn else v for k, v in state.items()}
    assert old["0.weight"].shape == (160, 48)
    for each in (loaded, old):
        other = convert_to_float8_inference(mlp(seed=5), config=config_of(recipe))
        assert not torch.equal(other(x), model(x))
        other.load_state_dict(each, strict=True, assign=assign)
        assert_bitwise(other(x), model(x))
        assert isinstance(other[0].weight, nn.Parameter)
        assert not other[0].weight.requires_grad
        trained = convert_to_float8_training(mlp(seed=5), config=config_of(recipe))
        trained.load_state_dict(each, assign=assign)
        assert_bitwise(trained[0].weight, model[0].weight.dequantize())
        new = mlp(seed=9)
        with torch.no_grad():  # a cast by the recipe
            other[0].weight.copy_(new[0].weight)
        converted = convert_to_float8_inference(new, config=config_of(recipe))
        assert_same_float8(other[0].weight, converted[0].weight)
    for strict in (False, True):  # which would copy the float8 data and drop the scales
        plain = mlp(seed=5)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: .*\[160, 48, 1\]"):
            plain.load_state_dict(state, strict=strict, assign=assign)
        assert_bitwise(plain[0].weight, mlp(seed=5)[0].weight)


@pytest.mark.parametrize("assign", [False, True])
def test_static_scales_are_in_the_checkpoint(assign):
    """They replace those of the loading model, and make dynamic inputs static."""
    scales, x = {"0": 0.02, "2": 0.005}, example()
    model = convert_to_float8_inference(mlp(), scales)
    state = model.state_dict()
    assert state["0.input_scale"].item() == torch.tensor(0.02).item()
    assert state["0.input_scale"].shape == ()
    for others in (None, {"0": 3.0, "2": 4.0}, scales):
        other = convert_to_float8_inference(mlp(seed=5), others).eval()
        other.load_state_dict(state, assign=assign)
        assert_bitwise(other(x), model(x))
        assert other[0].input_scale.item() == model[0].input_scale.item()
    assert other[0].config == model[0].config  # nothing to compile again
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 32)).bfloat16()
    convert_to_float8_inference(empty)
    empty.load_state_dict(state, assign=True)
    assert_bitwise(empty(x), model(x))


def without_scale(state):
    return {k: v for k, v in state.items() if k != "0.weight_scale"}


def in_float32(state):
    return {k: v.float() if "scale" in k else v for k, v in state.items()}


def input_scale(value):
    return lambda state: state | {"0.input_scale": torch.as_tensor(value)}


# recipe, what is wrong with its checkpoint, what the error says
MISFITS = [
    ("tensorwise", without_scale, r"0\.weight: .*no weight_scale for it"),
    ("tensorwise", lambda _: resident("rowwise").state_dict(), r"0\.weight: .*shape \(1, 1\)"),
    ("tensorwise", lambda _: mlp().double().state_dict(), r"0\.weight: it is torch\.float64"),
    ("tensorwise", lambda _: {"0.weight": torch.zeros(3, 3)}, r"size mismatch for 0\.weight"),
    ("mxfp8", in_float32, r"weight_scale is torch\.float32, .*E8M0"),
    ("rowwise", input_scale(0.1), r"0\.input_scale: .*\(1, -1\)"),
    ("static", input_scale(0.0), r"0\.input_scale: .*> 0, got 0.0"),
    ("static", input_scale(torch.nan), r"0\.input_scale: .*got nan"),
    ("static", input_scale([1.0, 1.0]), r"0\.input_scale: .*one static scale, got .*\(2,\)"),
]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("recipe", "change", "words"), MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(recipe, change, words, assign):
    scales = {"0": 0.02, "2": 0.005} if recipe == "static" else None
    config = config_of("tensorwise" if scales else recipe)
    model = convert_to_float8_inference(mlp(), scales, config=config)
    before = model(example())
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(change(model.state_dict()), strict=False, assign=assign)
    assert_bitwise(model(example()), before)


def test_copies_and_dtypes_keep_the_bytes():
    model, x = resident("rowwise"), example()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_bitwise(twin(x), model(x))
    assert not twin[0].weight.requires_grad
    codes = model[0].weight.float8_data.view(torch.uint8).clone()
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        assert model.to(dtype)(x.to(dtype)).dtype == dtype
        assert_bitwise(model[0].weight.float8_data.view(torch.uint8), codes)


def test_meta_models_convert_and_take_a_checkpoint():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 32)).bfloat16()
    convert_to_float8_inference(model)
    assert model[0].weight.device.type == "meta"
    assert model(example().to("meta")).shape == (24, 32)
    state = resident().state_dict()
    model.load_state_dict(state, assign=True)
    assert_bitwise(model(example()), resident()(example()))
    with torch.device("meta"):
        other = nn.Linear(48, 160).bfloat16()
    other = convert_to_float8_inference(other).to_empty(device="cpu")
    other.load_state_dict(mlp()[0].state_dict())
    assert_bitwise(other(example()), resident()[0](example()))


def test_autocast_reads_the_same_codes():
    model = resident(dtype=torch.float32)
    x = example(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        out = model[0](x)
    expected = resident(dtype=torch.float32)
    expected[0].bias.data = expected[0].bias.data.bfloat16()
    expected[0].weight.data = expected[0].weight.data.to(torch.bfloat16)
    assert_bitwise(out, expected[0](x.bfloat16()))
    with pytest.raises(TypeError, match=r"input is torch.bfloat16 and weight torch.float32"):
        model(x.bfloat16())


def test_an_encoder_layer_s_fast_path_never_meets_float8():
    def model() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        return nn.Sequential(layer).eval()

    x = torch.randn(2, 5, 32)
    left = convert_to_float8_inference(nn.Sequential(model(), nn.Linear(32, 32)))
    assert left.float8_conversion.converted == ["1"]
    assert "set_fastpath_enabled(False)" in left.float8_conversion.skipped["0.0.linear1"]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        converted = convert_to_float8_inference(model())
        with torch.no_grad():
            assert converted.float8_conversion.converted == ["0.linear1", "0.linear2"]
            assert_sqnr_at_least(converted(x), model()(x), 20)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
