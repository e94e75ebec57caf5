"""Weights that live in float8 and train: gradients, dtypes, leaves, saved tensors."""

from __future__ import annotations

import copy
import re

import oracle
import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from shapes import pairs
from torch import Tensor, nn

from float8 import (
    Blockwise,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Rowwise,
    ScaleFormat,
    ScalingType,
)
from float8.linear.resident import is_resident, make_plain, reason_against_resident, to_resident

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer_of(dtype: torch.dtype = torch.float32, recipe: str = "tensorwise") -> Float8Linear:
    torch.manual_seed(0)
    layer = Float8Linear(48, 40, dtype=dtype, config=Float8LinearConfig.from_recipe_name(recipe))
    layer.weight = nn.Parameter(to_resident(layer.weight, layer.config))
    return layer


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(24, 48, generator=generator), torch.randn(24, 40, generator=generator)
    return x.to(dtype).requires_grad_(), g


@pairs(recipe=["tensorwise", "delayed", "unit"], stored=DTYPES, computed=[None, *DTYPES[1:]])
def test_one_set_of_codes_serves_every_compute_dtype(recipe, stored, computed):
    """The gradient is an ordinary tensor in the dtype that the weight stands for."""
    layer = layer_of(stored, recipe)
    x, g = batch(stored)
    with torch.autocast("cpu", computed or torch.bfloat16, enabled=computed is not None):
        out = layer(x)
    assert out.dtype == (computed or stored)
    out.backward(g.to(out.dtype))
    w = oracle.values(layer.weight.float8_data, layer.weight.scale, (-1, -1))
    assert_sqnr_at_least(out, x.double() @ w.t() + layer.bias.double(), 25)
    assert_sqnr_at_least(x.grad, g.double() @ w, 20)
    assert type(layer.weight.grad) is Tensor
    assert layer.weight.grad.dtype == stored
    assert_sqnr_at_least(layer.weight.grad, g.double().t() @ x.detach().double(), 20)


def test_a_leaf_in_float8_accumulates_gradients_as_another_leaf_does():
    layer, plain = layer_of(), Float8Linear(48, 40)
    plain.load_state_dict(copy.deepcopy(layer).state_dict())  # dequantised: casts to the same codes
    for _ in range(2):
        for model in (layer, plain):
            x, g = batch()
            model(x).backward(g)
    assert_bitwise(layer.weight.grad, plain.weight.grad)
    assert is_resident(layer.weight)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"Float8Tensor|float8"):
        torch.optim.SGD([layer.weight], lr=1.0, foreach=False).step()


ROWS, DELAYED = CastConfig(granularity=Rowwise()), CastConfig(ScalingType.DELAYED)
ONE = CastConfig(ScalingType.STATIC, static_scale=1.0)
MX = CastConfig(granularity=Blockwise(1, 32), scale_format=ScaleFormat.E8M0)
MIXED = Float8LinearConfig(ROWS, ROWS, MX, cast_config_weight_for_grad_input=MX, emulate=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Float8LinearConfig(ROWS, ROWS, ROWS), "^None$"),
        (Float8LinearConfig(ROWS, ROWS, DELAYED), "cast_config_grad_output is delayed"),
        (Float8LinearConfig(ROWS, ROWS, ONE), "cast_config_grad_output is static"),
        (MIXED, "its weight has rowwise scales, which grad_input cannot use"),
    ],
)
def test_a_gradient_with_a_scale_of_another_reason_against_resident_rows(config, words):
    """The scales of a weight's rows multiply grad_output, whose own scale must follow."""
    assert re.search(words, str(reason_against_resident(config)))


def test_float16_gradients_underflow_only_where_the_parameter_wants_float16():
    """``grad_dtype`` of a float16 weight lets a small bfloat16 gradient through."""
    x, g = batch()
    for wanted in (None, torch.float32):
        layer = Float8Linear(48, 40, bias=False, dtype=torch.float16)
        if wanted is not None:
            layer.weight.grad_dtype = wanted
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.backward((g * 1e-12).bfloat16())
        assert layer.weight.grad.dtype == (wanted or torch.float16)
        assert bool(layer.weight.grad.any()) == (wanted is not None)


def test_a_compiled_layer_accumulates_onto_a_leaf_in_float8():
    layer = layer_of()
    twin, compiled = copy.deepcopy(layer), torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for model in (compiled, twin):
            x, g = batch()
            model(x).backward(g)
    assert_bitwise(layer.weight.grad, twin.weight.grad)
    layer.weight.data.copy_(torch.randn(40, 48))  # new codes and another scale, no new graph
    with torch.compiler.set_stance("fail_on_recompile"):
        out = compiled(batch()[0])
    assert_bitwise(out, layer(batch()[0]))


def test_only_tensorwise_weights_train():
    frozen = layer_of(recipe="rowwise")
    frozen.weight.requires_grad_(False)
    x, g = batch()
    (grad,) = torch.autograd.grad(frozen(x), x, g)
    w = oracle.values(frozen.weight.float8_data, frozen.weight.scale, (1, -1))
    assert_sqnr_at_least(grad, g.double() @ w, 20)
    frozen.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="only tensorwise"):
        frozen(x)


def test_dequantising_a_model_leaves_its_other_parameters():
    model = nn.Sequential(layer_of(), nn.LayerNorm(40))
    norm, wanted = model[1].weight, model[0].weight.dequantize()
    model[0].weight.role = "head"
    make_plain(model)
    assert_bitwise(model[0].weight, wanted)
    assert model[0].weight.role == "head"
    assert model[0].weight.requires_grad
    assert model[1].weight is norm
