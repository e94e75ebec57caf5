"""Saved folders, read back by safetensors and the layouts; casts against the float64 oracle."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
from assertions import assert_bitwise
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import float8
from float8 import E4M3, Float8LinearConfig, filters
from float8.checkpoints import (
    CompressedTensors,
    FineGrained,
    ModelOpt,
    plan_save,
    save_pretrained,
)
from float8.checkpoints.__main__ import main
from float8.checkpoints.casts import CAST_ANEW, TRAINING_CAST
from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Rowwise
from float8.linear.resident import to_resident

D = 160  # not a multiple of 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(D, D), nn.Linear(D, 32), nn.Linear(D, 32)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.k_proj(x).mean() + self.v_proj(x).mean())


class Model(nn.Module):
    """An embedding that is tied to the head, a shared layer, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.norm = nn.LayerNorm(D)
        self.attention = Attention()
        self.first = nn.Linear(D, D)
        self.again = self.first
        self.head = nn.Linear(D, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("dropped", torch.arange(3), persistent=False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        return self.head(self.again(self.first(self.attention(x))))


LAYERS = [f"attention.{name}_proj" for name in "qkvo"] + ["first"]


def model_of(recipe: str = "blockwise", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Model().to(dtype)
    with torch.no_grad():  # parts of one fused weight with scales of their own
        model.attention.q_proj.weight.mul_(3)
        model.attention.v_proj.weight[5, 7] = 40.0
    return convert(model, recipe)


def convert(model: nn.Module, recipe: str) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    filter_fn = filters.skip_names("head")
    return float8.convert_to_float8_training(model, config=config, module_filter_fn=filter_fn)


def step(model: nn.Module) -> None:
    model(torch.randint(0, 32, (4, 16))).sum().backward()
    float8.after_step(model)


def saved(model: nn.Module, folder: Path, *args, **options) -> dict[str, torch.Tensor]:
    save_pretrained(model, folder / "it", *args, **options)
    return load_file(folder / "it/model.safetensors")


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def quantized(weight, block, scale_format="float32"):
    return oracle.quantize(weight.detach(), block, E4M3.dtype, scale_format)


# --- bits

# recipe -> its layout, the block of a weight, the format and the key of its scales
OWN_LAYOUTS = {
    "blockwise": (FineGrained(scale_format=ScaleFormat.POWER_OF_TWO), (128, 128), "power_of_two"),
    "rowwise": (CompressedTensors(Rowwise()), (1, WHOLE), "power_of_two"),
    "tensorwise": (CompressedTensors(), (WHOLE, WHOLE), "float32"),
    "unit": (CompressedTensors(static_inputs=True), (WHOLE, WHOLE), None),  # scale 1
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", OWN_LAYOUTS)
def test_a_recipe_has_its_layout_and_the_bits_of_its_cast(recipe, dtype, tmp_path):
    layout, block, scale_format = OWN_LAYOUTS[recipe]
    model = model_of(recipe, dtype)
    found = saved(model, tmp_path)
    plan = plan_save(model)
    assert plan.layout == layout and list(plan.layers) == LAYERS
    for name in LAYERS:
        is_fused = layout.block == (WHOLE, WHOLE) and name[-6:] in ("q_proj", "k_proj", "v_proj")
        assert plan.layers[name].startswith(CAST_ANEW if is_fused else TRAINING_CAST)
        layer = model.get_submodule(name)
        its = layout.layer(name, found.__getitem__, found, dtype)[0]
        if is_fused:
            continue  # one scale, see below
        weight, scale = layer.weight.detach(), torch.ones(1, 1)
        if scale_format is not None:
            scale = oracle.scales(weight, block, E4M3.dtype, scale_format)
        data = oracle.cast(weight, scale, block, E4M3.dtype)
        assert_bitwise(its.float8_data, data, (recipe, name), "data")
        assert_bitwise(its.scale, scale, (recipe, name), "scale")
        trained = to_resident(layer.weight, layer.config)
        assert_bitwise(its.float8_data, trained.float8_data, (recipe, name), "training cast")
        assert_bitwise(found[f"{name}.weight"], trained.float8_data, (recipe, name))


@pytest.mark.parametrize("scale_format", [ScaleFormat.FLOAT32, ScaleFormat.E8M0])
def test_powers_of_two_fit_into_other_scale_formats(scale_format, tmp_path):
    model, layout = model_of("blockwise"), FineGrained(scale_format=scale_format)
    found = saved(model, tmp_path, layout)
    assert set(plan_save(model, layout).layers.values()) == {TRAINING_CAST}
    data, scale = quantized(model.first.weight, (128, 128), "power_of_two")
    assert_bitwise(found["first.weight"], data)
    assert found["first.weight_scale_inv"].dtype == scale_format.dtype
    assert found["first.weight_scale_inv"].float().tolist() == scale.tolist()


def test_projections_that_engines_fuse_share_the_largest_scale(tmp_path):
    model = model_of("tensorwise")
    found = saved(model, tmp_path)
    parts = [model.get_submodule(f"attention.{name}_proj").weight.detach() for name in "qkv"]
    data, scale = quantized(torch.cat(parts), (WHOLE, WHOLE))
    keys = [f"attention.{name}_proj.weight" for name in "qkv"]
    assert_bitwise(torch.cat([found[key] for key in keys]), data)
    for key in keys:
        assert found[f"{key}_scale"].tolist() == scale.flatten().tolist()
    assert found["attention.o_proj.weight_scale"] != scale


def test_delayed_scales_are_those_in_use(tmp_path):
    model = model_of("delayed")
    step(model)
    before = copy.deepcopy(model)
    with torch.no_grad():
        model.first.weight.mul_(0.5)  # its dynamic scale would be another
    found = saved(model, tmp_path, CompressedTensors(static_inputs=True))
    scale, weight = model.first.cast_weight.scale, model.first.weight.detach()
    assert found["first.weight_scale"].tolist() == [scale.item()]
    expected = oracle.cast(weight, scale.reshape(1, 1), (WHOLE, WHOLE), E4M3.dtype)
    assert_bitwise(found["first.weight"], expected)
    assert found["first.input_scale"].tolist() == [model.first.cast_input.scale.item()]
    largest = max(model.get_submodule(f"attention.{n}_proj").cast_weight.scale for n in "qkv")
    for name in "qkv":
        assert found[f"attention.{name}_proj.weight_scale"].item() == largest
    for name, buffer in model.named_buffers():
        assert_bitwise(buffer, before.get_buffer(name), name)


def test_resident_weights_of_another_granularity_are_cast_again_as_files(tmp_path):
    model = model_of("tensorwise")
    filter_fn = filters.skip_names("head")
    model = float8.convert_to_float8_inference(model, module_filter_fn=filter_fn)
    for call in (plan_save, lambda *args: save_pretrained(args[0], tmp_path / "it", *args[1:])):
        with pytest.raises(ValueError, match=r"checkpoints convert casts again") as error:
            call(model, "fine_grained")
        assert all(f"{name}: its weight is" in str(error.value) for name in LAYERS)
    assert entries(tmp_path) == []
    own, out = str(tmp_path / "own"), tmp_path / "out"
    save_pretrained(model, own)
    assert main(["convert", own, str(out), "--layout", "fine_grained"]) == 0
    found = load_file(out / "model.safetensors")
    weight = model.first.weight.dequantize(torch.float32)
    assert_bitwise(found["first.weight"], quantized(weight, (128, 128))[0])


# --- what is written


def test_all_else_is_written_as_it_is_and_once(tmp_path):
    model = model_of("delayed")
    step(model)
    found = saved(model, tmp_path)
    plain = {"embed.weight", "norm.weight", "norm.bias", "first.bias", "kept"}
    plain |= {f"attention.{name}_proj.bias" for name in "qkv"}
    in_float8 = {f"{name}.{part}" for name in LAYERS for part in ("weight", "weight_scale")}
    assert found.keys() == plain | in_float8
    for key in plain:
        assert_bitwise(found[key], model.state_dict()[key], key)
    assert entries(tmp_path / "it") == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "it/config.json").read_text())
    assert list(config) == ["quantization_config"]
    assert config["quantization_config"]["ignore"] == ["head"]


def test_a_weight_that_an_embedding_reads_stays_whoever_comes_first(tmp_path):
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(D, 32), nn.Linear(D, 32)
            self.embed = nn.Embedding(32, D)
            self.embed.weight = self.head.weight

    model = float8.convert_to_float8_training(HeadFirst())
    plan = plan_save(model)
    assert list(plan.layers) == ["other"]
    assert "its weight is also embed.weight (Embedding), which reads it" in plan.skipped["head"]
    found = saved(model, tmp_path)
    assert_bitwise(found["head.weight"], model.embed.weight)
    assert "embed.weight" not in found


COMPILE = partial(torch.compile, backend="eager")
WRAPPERS = {
    "compiled": COMPILE,
    "compiled parts": lambda m: _with_children(m, COMPILE),
    "checkpointed": lambda m: _with_children(m, checkpoint_wrapper),
    "DDP": DistributedDataParallel,
    "all": lambda m: DistributedDataParallel(COMPILE(_with_children(m, checkpoint_wrapper))),
}


def _with_children(model, wrap):
    for name in ("attention", "norm"):
        setattr(model, name, wrap(getattr(model, name)))
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_nothing(wrapper, tmp_path, one_rank):
    model = model_of("tensorwise")
    scales = {name: 0.5 + i for i, name in enumerate(LAYERS)}
    options = {"layout": "modelopt", "input_scales": scales}
    expected, plan = saved(model, tmp_path / "plain", **options), plan_save(model, **options)
    wrapped = WRAPPERS[wrapper](model)
    found = saved(wrapped, tmp_path / "wrapped", **options)
    assert plan_save(wrapped, **options) == plan
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert_bitwise(x, expected[key], key)


# --- static inputs


def test_a_scale_of_smooth_channels_is_none_of_the_input(tmp_path):
    """A delayed scale of x * s, within (0.5, 1], would saturate x in the engine that reads it."""
    delayed = float8.CastConfig(scaling_type=float8.ScalingType.DELAYED)
    config = Float8LinearConfig(cast_config_input=delayed, smooth_input=True)
    model = float8.convert_to_float8_training(
        Model(), config=config, module_filter_fn=filters.skip_names("head")
    )
    step(model)
    for layout in (ModelOpt(), CompressedTensors(static_inputs=True)):
        with pytest.raises(ValueError, match=r"first: it has no static input scale.*calibrate"):
            plan_save(model, layout)


def test_input_scales_come_from_the_user_or_from_constants(tmp_path):
    model = model_of("tensorwise")
    filter_fn = filters.skip_names("head")
    batches = [torch.randint(0, 32, (4, 16))]
    scales = float8.calibrate(model, batches, module_filter_fn=filter_fn).static_scales()
    with_head = scales | {"head": 1.0}  # of a layer that stays in high precision
    by_user = saved(model, tmp_path / "a", ModelOpt(), input_scales=with_head)
    static = float8.convert_to_float8_inference(model, scales, module_filter_fn=filter_fn)
    by_layer = saved(static, tmp_path / "b")
    assert plan_save(static).layout == CompressedTensors(static_inputs=True)
    for name in LAYERS:
        key = f"{name}.input_scale"
        assert by_user[key].shape == () and by_user[key].item() == pytest.approx(scales[name])
        assert by_layer[key].shape == (1,) and by_layer[key].item() == by_user[key].item()
    assert "hf_quant_config.json" in entries(tmp_path / "a/it")


# --- refusals


@pytest.mark.parametrize("recipe", ["tensorwise", "unit", "mxfp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_leaves_nothing(recipe, bad, tmp_path):
    """A given scale of 1, or one of E8M0, would make an inf a finite number."""
    model = model_of(recipe)
    with torch.no_grad():
        model.first.weight[3, 4] = bad
    with pytest.raises(ValueError, match="first: its weight has NaN or inf"):
        save_pretrained(model, tmp_path / "it")
    assert entries(tmp_path) == []


def mixed() -> nn.Module:
    return nn.Sequential(convert(Attention(), "rowwise"), convert(Attention(), "blockwise"))


def adapted() -> nn.Module:
    model = model_of()
    model.attention.o_proj = type("L", (nn.Module,), {"__module__": "peft.tuners.lora"})()
    return model


# (the model, the layout, input_scales, the message)
REFUSED = [
    (model_of, "modelopt", {}, "first: it has no static input scale, which this layout stores"),
    (model_of, "modelopt", {"fist": 1.0}, "fist: there is no layer of this name"),
    (model_of, "modelopt", {"first": 0.0}, "first: its input scale is 0.0; a scale is finite"),
    (model_of, "fine_grained", {"first": 1.0}, "first: it has an input scale, and FineGrained"),
    (Model, None, None, "no layer in float8: convert it"),
    (Model, "fine_grained", None, "no layer in float8: convert_to_float8_training"),
    (mixed, None, None, "the model has 128x128, rowwise"),
    (mixed, "fine_graned", None, "one of fine_grained.*; got 'fine_graned'"),
    (mixed, FineGrained, None, r"layout must be a Layout, such as FineGrained\(\)"),
    (adapted, None, None, "attention.o_proj is a L.*merge_and_unload"),
]


@pytest.mark.parametrize(("make", "layout", "scales", "message"), REFUSED)
def test_what_cannot_be_stored_is_refused(make, layout, scales, message):
    with pytest.raises(ValueError, match=message):
        plan_save(make(), layout, input_scales=scales)
