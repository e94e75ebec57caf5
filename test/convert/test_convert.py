"""Conversion shares parameters, changes all or nothing, reports what it did, and can be undone."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_from_float8_training,
    convert_to_float8_inference,
    convert_to_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

DELAYED = RECIPES["delayed"]


def _mlp(dtype=torch.float32, device=None):
    return nn.Sequential(
        nn.Linear(32, 64, dtype=dtype, device=device),
        nn.GELU(),
        nn.Linear(64, 32, bias=False, dtype=dtype, device=device),
    )


def _train_step(model, x):
    model(x).square().mean().backward()
    sync_float8_amax_and_scale_history(model)


def test_parameters_mode_and_attributes_are_those_of_the_plain_layer():
    model = _mlp(torch.bfloat16).eval()
    model[0].weight.requires_grad_(False)
    model[0].note, calls = "kept", []
    handle = model[0].register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    converted = convert_to_float8_training(model)
    assert converted is model
    assert isinstance(model[0], Float8Linear) and isinstance(model[0], nn.Linear)
    after = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    assert after.keys() == before.keys()
    assert all(after[k][0] is before[k][0] and after[k][1] == before[k][1] for k in before)
    assert not any(m.training for m in model.modules())
    assert model[0].note == "kept" and not model[0].weight.requires_grad
    x = torch.randn(4, 32).bfloat16()
    model(x)
    handle.remove()
    model(x)
    assert calls == ["hook"]


def test_meta_models_convert_and_stay_on_meta():
    model = convert_to_float8_training(_mlp(device="meta"), config=DELAYED)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_tied_weights_stay_tied_and_a_shared_layer_stays_one_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embed.weight
            self.also_head = self.head

    model = convert_to_float8_training(Tied())
    assert isinstance(model.head, Float8Linear)
    assert model.head is model.also_head
    assert model.head.weight is model.embed.weight


def test_the_root_itself_may_be_a_linear():
    linear = nn.Linear(16, 16)
    converted = convert_to_float8_training(linear)
    assert isinstance(converted, Float8Linear) and converted.weight is linear.weight
    assert type(convert_from_float8_training(converted)) is nn.Linear


def test_converting_twice_changes_nothing():
    model = convert_to_float8_training(_mlp())
    layers = list(model.modules())
    with pytest.warns(UserWarning, match="converted no layer:\n  0: .* with another config"):
        convert_to_float8_training(model, config=RECIPES["rowwise"])
    assert list(model.modules()) == layers
    assert model[0].config == RECIPES["tensorwise"]
    assert "with another config" in model.float8_conversion.skipped["0"]
    convert_to_float8_training(model, config=RECIPES["tensorwise"])
    assert model.float8_conversion.skipped["0"] == "it is a Float8Linear already"
    other = convert_to_float8_training(_mlp(), config=RECIPES["rowwise"])
    convert_to_float8_training(other)  # no config is asked for: nothing to warn of


def test_only_filtered_layers_convert_and_the_report_says_why(caplog):
    class MyLinear(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "a": nn.Linear(16, 16),
            "head": nn.Linear(16, 16),
            "mine": MyLinear(16, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "encoder": nn.TransformerEncoderLayer(16, 2, 32),
        }
    )
    with caplog.at_level(logging.INFO, logger="float8"):
        convert_to_float8_training(model, module_filter_fn=lambda m, fqn: fqn != "head")
    report = model.float8_conversion
    assert report.converted == ["a", "encoder.linear1", "encoder.linear2"]
    assert "module_filter_fn" in report.skipped["head"]
    assert "MyLinear" in report.skipped["mine"]
    assert "weights itself" in report.skipped["attention"]
    assert "MultiheadAttention does not call it" in report.skipped["attention.out_proj"]
    assert "set_fastpath_enabled" in report.skipped["encoder"]
    assert type(model["head"]) is nn.Linear and type(model["mine"]) is MyLinear
    assert len(caplog.records) == 1 and "head: module_filter_fn" in caplog.records[0].getMessage()


@pytest.mark.parametrize("convert", [convert_to_float8_training, convert_to_float8_inference])
def test_recipe_unit_warns_of_layers_that_are_not_unit_scaled(convert):
    mixed = nn.Sequential(uu.Linear(32, 32), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=r"1 of 2 layers \(first: 1\) are not unit-scaled"):
        convert(mixed, config="unit")
    convert(nn.Sequential(uu.Linear(32, 32)), config="unit")
    convert(nn.Sequential(nn.Linear(32, 32)), config="tensorwise")


def test_converting_no_layer_warns():
    with pytest.warns(UserWarning, match="module_filter_fn returned False"):
        convert_to_float8_training(_mlp(), module_filter_fn=lambda m, fqn: False)
    with pytest.warns(UserWarning, match=r"has no nn\.Linear"):
        convert_to_float8_training(nn.ReLU())
    with pytest.warns(UserWarning, match="convert_to_float8_inference converted no layer"):
        convert_to_float8_inference(nn.ReLU())


@pytest.mark.parametrize("recipe", RECIPES)
def test_converting_back_gives_the_plain_model(recipe):
    model = _mlp()
    reference, keys, x = copy.deepcopy(model), list(model.state_dict()), torch.randn(4, 32)
    convert_to_float8_training(model, config=RECIPES[recipe])
    _train_step(model, x)
    parameters = list(model.parameters())
    model = convert_from_float8_training(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), reference(x))
    assert not hasattr(model, "float8_conversion")


@pytest.mark.parametrize("kind", ["gathered in float8", "stored in float8"])
def test_converting_back_refuses_a_replaced_forward_and_changes_nothing(kind):
    model = _mlp()
    if kind == "stored in float8":
        convert_to_float8_inference(model)
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config)
    parameters, modules = list(model.parameters()), list(model.modules())
    model[2].forward = model[2].forward  # as a wrapper leaves it, which calls the float8 layer
    with pytest.raises(ValueError, match="2: its forward was replaced after the conversion"):
        convert_from_float8_training(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.modules()) == modules
    del model[2].forward
    weights = [model[0].weight, model[2].weight]
    convert_from_float8_training(model)
    for plain, before in zip([model[0].weight, model[2].weight], weights, strict=True):
        assert type(plain) is nn.Parameter and type(plain.data) is torch.Tensor
        assert torch.equal(plain, before.dequantize())


def test_high_precision_runs_the_plain_layer_and_saves_plain_keys():
    plain = _mlp()
    model = convert_to_float8_training(copy.deepcopy(plain), config=DELAYED)
    x = torch.randn(4, 32)
    _train_step(model, x)
    scales = [c.scale.clone() for c in model[0].casts]
    float8_out = model(x)
    with high_precision(model) as inside:
        assert inside is model
        assert torch.equal(model(x), plain(x))
        assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(x), float8_out)
    first, second = high_precision(model), high_precision(model)  # which may overlap
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(model(x), plain(x))
    second.__exit__(None, None, None)
    assert torch.equal(model(x), float8_out)
    assert all(torch.equal(a, c.scale) for a, c in zip(scales, model[0].casts, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_checkpoints_load_strictly_both_ways(recipe):
    plain = _mlp()
    model = convert_to_float8_training(_mlp(), config=RECIPES[recipe])
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)
    with high_precision(model):
        _mlp().load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_trained_delayed_model_compute_the_same(how):
    model = convert_to_float8_training(_mlp(), config=DELAYED)
    x = torch.randn(4, 32)
    _train_step(model, x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = convert_to_float8_training(_mlp(), config=DELAYED)
        other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))
    assert other[0].cast_input.history_ready
