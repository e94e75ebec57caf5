"""What nanochat-style scripts do with a float8 module, done with this one.

They build on the meta device, convert by a filter, count by type or by its name, train compiled,
and evaluate without float8: by `high_precision`, or by swapping layers by hand. Others pass the
product on as a function.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_from_float8_training,
    convert_to_float8_training,
    estimate,
    high_precision,
)
from float8.convert import register_linear_type
from float8.linear.module import MODULE_RULES


class Casting(nn.Linear):
    """Float32 weights; products in the dtype of the input."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Model(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.mlp = nn.Sequential(linear(32, 128), nn.ReLU(), linear(128, 32, bias=False))
        self.gate = linear(12, 32)
        self.head = linear(32, 16, bias=False)

    def forward(self, x):
        return self.head(x + self.mlp(x) + self.gate(x[..., :12]))


def large(module, fqn):
    """As their filters: by type, by shape, by name."""
    if not isinstance(module, nn.Linear) or fqn == "head":
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def converted(linear=nn.Linear, recipe="tensorwise"):
    model = Model(linear)
    config = Float8LinearConfig.from_recipe_name(recipe)
    assert convert_to_float8_training(model, config=config, module_filter_fn=large) is model
    return model


@pytest.fixture
def casting():
    register_linear_type(Casting)
    yield Casting
    del MODULE_RULES[Casting]


def test_a_model_on_the_meta_device_is_converted_and_then_initialised():
    with torch.device("meta"):
        model = converted(recipe="delayed")
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    model(torch.randn(4, 32)).backward(torch.randn(4, 16))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.mlp[0].cast_input.amax_history.eq(0).all()


def test_a_compiled_model_evaluates_without_float8_in_a_graph_of_its_own(casting):
    """Two graphs and no more, however often evaluation comes."""
    model, x, graphs = converted(casting), torch.randn(8, 32).bfloat16(), CompileCounter()
    plain = convert_from_float8_training(copy.deepcopy(model))
    compiled = torch.compile(model, backend=graphs, dynamic=False)
    in_float8 = compiled(x)
    in_float8.backward(torch.randn(8, 16).bfloat16())
    for _ in range(2):
        with torch.no_grad(), high_precision(compiled):
            assert torch.equal(compiled.eval()(x), plain(x))
        assert torch.equal(compiled.train()(x), in_float8)
    assert not torch.equal(in_float8, plain(x))
    assert graphs.frame_count == 2


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_a_layer_that_casts_its_weight_obeys_an_outer_autocast(casting, autocast):
    layer, x = casting(32, 16), torch.randn(8, 32).bfloat16()
    with torch.autocast("cpu", autocast):
        plain = layer(x)
        assert convert_to_float8_training(layer)(x).dtype is plain.dtype is autocast


def test_a_layer_that_casts_its_weight_is_left_alone_until_its_type_is_registered():
    model = Model(Casting)
    with pytest.warns(UserWarning, match=r"float8.convert.register_linear_type"):
        convert_to_float8_training(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_that_casts_its_weight_multiplies_in_its_inputs_dtype(casting, recipe, dtype):
    torch.manual_seed(0)
    model = converted(casting, recipe)
    like = convert_to_float8_training(
        copy.deepcopy(convert_from_float8_training(copy.deepcopy(model))).to(dtype),
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=large,
    )
    for m in like.modules():  # the plain float8 layer of a weight that was rounded before
        if isinstance(m, Float8Linear):
            m.__class__ = Float8Linear
    x, g = torch.randn(8, 32).to(dtype), torch.randn(8, 16).to(dtype)
    for each in (model, like):
        y = each(x)
        y.backward(g)
        each.y = y
    assert model.y.dtype == dtype
    assert torch.equal(model.y, like.y)
    for (name, p), q in zip(model.named_parameters(), like.parameters(), strict=True):
        if p.grad is not None:
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad.to(dtype), q.grad), name


def test_predictions_are_of_the_layers_that_conversion_takes(casting):
    register_linear_type(casting)  # again, as a cell of a notebook does
    rows = estimate(Model(casting), 1024).rows
    assert [row.layer for row in rows] == ["mlp.0", "mlp.2", "gate", "head"]
