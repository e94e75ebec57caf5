"""`load`: what becomes of each tensor of a checkpoint, and what is refused before a change."""

from __future__ import annotations

import json
from dataclasses import replace

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from hand_written import (
    FINE,
    LAYERS,
    Block,
    compressed,
    dequantised,
    fine_grained,
    tensors_of,
    write,
)
from torch import nn

import float8
from float8 import Float8Linear, Float8LinearConfig, ScalingType, convert_to_float8_training
from float8.checkpoints.loading import load
from float8.linear.resident import to_resident

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
TOKENS = torch.randint(0, 40, (16,), generator=torch.Generator().manual_seed(3))


def trainable(config: Float8LinearConfig, seed: int = 0) -> nn.Module:
    return convert_to_float8_training(Block(seed=seed), config=config)


def config_of(recipe: str) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(recipe)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The tensors of a checkpoint, and its folder of three shards."""
    tensors = tensors_of(Block(seed=1))
    return tensors, write(tmp_path_factory.mktemp("fine"), tensors, shards=3)


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert_bitwise(after[key], value, replay=key)


# --- high precision


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_dequantised_in_place_and_all_else_is_copied(stored, dtype):
    tensors, folder = stored
    model = Block(dtype, seed=2)
    parameters = dict(model.named_parameters())
    places = {name: p.data_ptr() for name, p in parameters.items()}
    assert load(model, folder) is model
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]  # optimizers keep theirs
        assert parameter.data_ptr() == places[name]
        assert parameter.requires_grad
        layer = name.removesuffix(".weight")
        plain = tensors[name].to(dtype) if layer not in LAYERS or "bias" in name else None
        assert_bitwise(
            parameter.detach(), dequantised(tensors, layer, dtype) if plain is None else plain, name
        )
    assert model.head.weight is model.embed.weight
    assert model.steps == 1
    assert not any(isinstance(m, Float8Linear) for m in model.modules())


def test_a_model_on_meta_gets_memory_for_what_is_loaded(stored):
    tensors, folder = stored
    with torch.device("meta"):
        model = Block()
    model.up.weight.role, model.norm.bias.requires_grad = "first", False
    load(model, folder)
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert_bitwise(model.up.weight.detach(), dequantised(tensors, "up", torch.bfloat16))
    assert model.head.weight is model.embed.weight
    assert model.up.weight.role == "first"
    assert not model.norm.bias.requires_grad


def test_a_tied_weight_may_be_in_the_files_under_any_name_or_under_both(tmp_path):
    source = Block(seed=1)
    tensors = tensors_of(source)
    embed = tensors.pop("embed.weight")
    folder = write(tmp_path / "other", tensors | {"head.weight": embed})
    assert_bitwise(load(Block(seed=2), folder).embed.weight.detach(), embed)
    both = tensors | {"head.weight": embed.clone(), "embed.weight": embed}
    folder = write(tmp_path / "both", both)
    assert_bitwise(load(Block(seed=2), folder).embed.weight.detach(), embed)
    both["head.weight"] = embed + 1
    with pytest.raises(ValueError, match=r"head\.weight differs from embed\.weight.*untie them"):
        load(Block(seed=2), write(tmp_path / "differ", both))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_a_converted_model_loads_and_starts_new_histories(stored, recipe):
    tensors, folder = stored
    model = convert_to_float8_training(Block(seed=2), config=config_of(recipe))
    model(TOKENS).sum().backward()
    float8.after_step(model)
    load(model, folder)
    assert_bitwise(model.up.weight.detach(), dequantised(tensors, "up", torch.bfloat16))
    fresh = convert_to_float8_training(load(Block(), folder), config=config_of(recipe))
    assert_bitwise(model(TOKENS), fresh(TOKENS))


# --- float8


@pytest.mark.parametrize(("dtype", "meta"), [*((d, False) for d in DTYPES), (DTYPES[0], True)])
def test_float8_weights_stay_as_they_are_in_the_files(stored, dtype, meta):
    tensors, folder = stored
    with torch.device("meta" if meta else "cpu"):
        model = Block(dtype, seed=2)
    assert load(model, folder, "float8") is model
    for name in LAYERS:
        weight = model.get_submodule(name).weight
        assert_bitwise(weight.float8_data, tensors[f"{name}.weight"])
        assert weight.float8_data.untyped_storage().nbytes() == weight.numel()
        assert not weight.requires_grad
    assert_bitwise(model.up.bias.detach(), tensors["up.bias"].to(dtype))
    assert model.float8_conversion.converted == list(LAYERS)
    why = "the checkpoint has its weight in high precision"
    assert model.float8_conversion.skipped["gate"] == why
    hidden = model._ddp_params_and_buffers_to_ignore  # DDP broadcasts no float8
    assert sorted(hidden) == sorted(f"{name}.weight" for name in LAYERS)
    assert model.head.weight is model.embed.weight
    plain = load(Block(dtype, seed=3), folder)
    # Inputs are rounded to E4M3, about 32 dB, in two layers and beside a residual.
    assert_sqnr_at_least(model(TOKENS), plain(TOKENS), 28)


def test_a_float8_weight_that_an_embedding_reads_is_dequantised(tmp_path):
    tensors = tensors_of(Block(seed=1), [*LAYERS, "embed"])
    model = load(Block(seed=2), write(tmp_path, tensors), "float8")
    assert "dequantised: another module has it too" in model.float8_conversion.skipped["head"]
    wanted = dequantised(tensors, "embed", torch.bfloat16)
    assert_bitwise(model.embed.weight.detach(), wanted)


# --- inputs are cast as the config says

MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["gate"]}
BLOCKS = {"tensor": (-1, -1), "channel": (1, -1), "block": (128, 128)}
INPUT_SCALES = {"up": 0.01, "down": 0.02}


def by_strategy(strategy: str, static: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in the form of llm-compressor."""
    tensors = {k: v for k, v in Block(seed=1).state_dict().items() if k != "head.weight"}
    for name in LAYERS:
        data, scale = oracle.quantize(tensors[f"{name}.weight"], BLOCKS[strategy], E4M3, "float32")
        tensors[f"{name}.weight"] = data.view(E4M3)
        tensors[f"{name}.weight_scale"] = scale.reshape(1) if strategy == "tensor" else scale
        if static:
            tensors[f"{name}.input_scale"] = torch.tensor([INPUT_SCALES[name]])
    return tensors


@pytest.mark.parametrize(
    ("strategy", "static"),
    [("tensor", False), ("tensor", True), ("channel", False), ("channel", True), ("block", False)],
)
def test_inputs_are_cast_as_the_config_says(tmp_path, strategy, static):
    """The product of the oracle's cast of the input and of the values of the files."""
    tensors = by_strategy(strategy, static)
    config = compressed(strategy, static)
    if strategy == "block":
        config = FINE
        tensors |= {f"{n}.weight_scale_inv": tensors.pop(f"{n}.weight_scale") for n in LAYERS}
    folder = write(tmp_path, tensors, config)
    model = load(Block(torch.float32, seed=2), folder, "float8")
    x = torch.randn(24, 144, generator=torch.Generator().manual_seed(1))
    block = (-1, -1) if static else (1, 128) if strategy == "block" else (1, -1)
    scale = torch.full((1, 1), INPUT_SCALES["up"])
    scale = scale if static else oracle.scales(x, block, E4M3)
    x8 = oracle.values(oracle.cast(x, scale, block, E4M3).view(E4M3), scale, block)
    scale = model.up.weight.scale
    w = oracle.values(tensors["up.weight"], scale, BLOCKS[strategy])
    assert_sqnr_at_least(model.up(x), x8 @ w.t() + tensors["up.bias"].double(), 100)
    model.up(x.requires_grad_()).sum().backward()  # gradients pass to inputs
    assert x.grad is not None
    assert (model.up.input_scale is not None) == static
    again = load(Block(torch.float32, seed=5), folder, "float8")
    again.load_state_dict(model.state_dict())
    assert_bitwise(again(TOKENS), model(TOKENS))


def test_modelopt_is_read_from_either_of_its_files(tmp_path):
    tensors = by_strategy("tensor", static=True)
    scales = {k: v.reshape(()) for k, v in tensors.items() if k.endswith("_scale")}
    folder = write(tmp_path / "a", tensors | scales, MODELOPT)
    model = load(Block(seed=2), folder, "float8")
    assert model.up.input_scale == torch.tensor(0.01)
    (folder / "config.json").unlink()
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    other = load(Block(seed=3), folder, "float8")
    assert_bitwise(other(TOKENS), model(TOKENS))
    own["quantization"]["exclude_modules"] = ["d*n"]
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match=r"down\.weight is in float8, and hf_quant_c.* 'd\*n'"):
        load(Block(seed=3), folder, "float8")


# --- training


@pytest.mark.parametrize("has_trained", [False, True])
def test_delayed_casts_start_anew(tmp_path, has_trained):
    delayed = float8.CastConfig(ScalingType.DELAYED)
    config = Float8LinearConfig(delayed, delayed, delayed)
    tensors = by_strategy("tensor", static=True)
    folder = write(tmp_path, tensors, compressed("tensor", static=True))
    model = trainable(config, seed=2)
    if has_trained:
        for _ in range(17):
            model(TOKENS).sum().backward()
            float8.after_step(model)
        assert model.up.cast_weight.history_ready
    up = load(model, folder).up
    for cast in (up.cast_input, up.cast_weight, up.cast_grad_output):
        assert not cast.history_ready and not cast.scale.any() and not cast.amax_history.any()
    cast = to_resident(up.weight, up.config, up.cast_weight.state)
    assert_bitwise(cast.float8_data, tensors["up.weight"])
    model(TOKENS).sum().backward()
    float8.after_step(model)
    amax = up.weight.detach().abs().amax()
    assert_sqnr_at_least(up.cast_weight.amax_history[0], amax, 60)


def test_a_converted_model_gets_the_values_of_the_files_from_the_meta_device_too(stored):
    _, folder = stored
    model = load(trainable(config_of("blockwise"), seed=2), folder)
    model(TOKENS).sum().backward()
    assert model.up.weight.grad is not None
    with torch.device("meta"):
        empty = trainable(config_of("delayed"))
    empty = load(empty, folder)
    assert_bitwise(empty.up.weight, model.up.weight)
    assert empty.up.cast_weight.scale.device.type == "cpu"
    empty(TOKENS).sum().backward()


def test_the_first_dynamic_cast_finds_the_data_and_the_scale_of_the_file(tmp_path):
    """As the docstring of `load` says: the scale to the rounding of the parameter's dtype.

    Powers of two come back exactly where the largest value is above 224.
    """
    state = {k: v for k, v in Block(seed=1).state_dict().items() if k != "head.weight"}
    state["up.weight"] *= torch.logspace(-3, 2, 272).unsqueeze(1)
    recipe = config_of("blockwise")
    casts = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
    for form in ("float32", "power_of_two"):
        scales = float8.ScaleFormat(form)
        own = {name: replace(getattr(recipe, name), scale_format=scales) for name in casts}
        tensors = fine_grained(state, LAYERS, scale_format=form)
        config = FINE | ({} if form == "float32" else {"scale_fmt": "ue8m0"})
        folder = write(tmp_path / form, tensors, config)
        model = load(trainable(replace(recipe, **own)), folder)
        for name in LAYERS:
            layer = model.get_submodule(name)
            found = to_resident(layer.weight, layer.config)
            data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
            if form == "float32":
                assert_bitwise(found.float8_data, data)
                error = ((found.scale - scale) / scale).abs().max()
                assert float(error) <= torch.finfo(torch.bfloat16).eps
            else:
                values = oracle.values(found.float8_data, found.scale, (128, 128))
                assert torch.equal(values, oracle.values(data, scale, (128, 128)))
                large = oracle.amax(data.double(), (128, 128)) > 224
                assert bool(large.any())
                assert torch.equal(found.scale[large], scale[large])


# --- what is refused

MISFITS = [
    ({"norm.bias": None}, r"norm\.bias of the model is missing"),
    ({"other.weight": torch.zeros(2, 2)}, r"model\.safetensors: other\.weight is not in the model"),
    (
        {"gate.weight": torch.zeros(4, 144)},
        r"of shape \(4, 144\), and the model's .* of \(3, 144\)",
    ),
    ({"steps": torch.tensor(1.5)}, r"steps is torch\.float32 of .* the model's torch\.int64"),
]


@pytest.mark.parametrize(("changed", "says"), MISFITS)
def test_files_that_do_not_fit_the_model_change_nothing(stored, changed, says, tmp_path):
    tensors = {k: x for k, x in (stored[0] | changed).items() if x is not None}
    folder, trained = write(tmp_path, tensors), trainable(config_of("delayed"), seed=2)
    plain = Block(seed=2)
    for weights, model in (
        ("high_precision", plain),
        ("float8", plain),
        ("high_precision", trained),
    ):
        before = bits_of(model)
        with pytest.raises(ValueError, match=says):
            load(model, folder, weights)
        assert_unchanged(model, before)
    assert not any(isinstance(m, Float8Linear) for m in plain.modules())


def test_keys_are_ignored_by_name_or_pattern(stored, tmp_path):
    tensors, _ = stored
    kv = {f"up.{name}_scale": torch.ones(()) for name in ("k", "v", "kv")}  # read past
    extra = tensors | kv | {"mtp.0.weight": torch.zeros(2, 2)}
    del extra["norm.bias"]
    model = Block(seed=2)
    kept = model.gate.weight.detach().clone()
    folder = write(tmp_path, extra)
    load(model, folder, ignore=["mtp.*", "norm.b*", "gate.weight"])
    assert_bitwise(model.gate.weight.detach(), kept)
    assert_bitwise(model.up.weight.detach(), dequantised(tensors, "up", torch.bfloat16))
    with torch.device("meta"):
        empty = Block()
    with pytest.raises(
        ValueError, match=r"norm\.bias of the model is missing, and on the meta device"
    ):
        load(empty, folder, ignore=["mtp.*", "norm.bias"])


def other_types() -> nn.Module:
    model = Block(seed=2)
    model.up.__class__ = model.down.__class__ = type("Other", (nn.Linear,), {})
    return model


def converted() -> nn.Module:
    return convert_to_float8_training(Block())


# (the model, weights=, the message)
UNFIT = [
    (converted, "float8", r"up is in float8 already.*convert_from_float8_training"),
    (Block, "bfloat16", r"weights must be 'high_precision' or 'float8', got 'bfloat16'"),
    (other_types, "float8", r"(?s)no layer .*up: its type is Other, not nn\.Lin"),
]


@pytest.mark.parametrize(("make", "weights", "says"), UNFIT)
def test_models_that_do_not_fit_the_mode_are_refused(stored, make, weights, says):
    model = make()
    before = bits_of(model)
    with pytest.raises(ValueError, match=says):
        load(model, stored[1], weights)
    after = bits_of(model)
    assert list(after) == list(before)
    assert all(torch.equal(after[key], x) for key, x in before.items())


def test_blocks_that_no_device_multiplies_are_refused_for_float8_alone(tmp_path):
    state = {k: v for k, v in Block(seed=1).state_dict().items() if k != "head.weight"}
    tensors = fine_grained(state, LAYERS, (64, 64))
    folder = write(tmp_path, tensors, FINE | {"weight_block_size": [64, 64]})
    model = Block(seed=2)
    before = bits_of(model)
    with pytest.raises(ValueError, match=r"up: .*multiplies"):
        load(model, folder, "float8")
    assert_unchanged(model, before)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    load(model, folder)
    values = oracle.values(tensors["up.weight"], tensors["up.weight_scale_inv"], (64, 64))
    assert_bitwise(model.up.weight.detach(), values.bfloat16())
