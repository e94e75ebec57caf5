"""Unit-scaled layers in float8: their products, factors, and conversion back."""

from __future__ import annotations

import copy
import warnings

import oracle
import pytest
import torch
from assertions import sqnr
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import float8.unit_scaling as uu
from float8 import (
    Float8LinearConfig,
    Float8Tensor,
    convert_to_float8_training,
)
from float8.config import RECIPES
from float8.unit_scaling.modules.layers import Float8UnitLinear, Float8UnitLinearReadout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def in_float8(model, recipe="unit"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def rounded(x, dtype):
    """The nearest float8 values of x in float64, by the table."""
    codes = oracle.encode(x.detach().double(), dtype)
    return oracle.table(dtype)[codes.long()]


@pytest.mark.parametrize("make", [uu.Linear, uu.LinearReadout])
@pytest.mark.parametrize("constraint", ["to_output_scale", "gmean", None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48,), (3, 5), (1,), (0,)])
def test_each_product_is_that_of_the_rounded_operands_times_its_own_factor(
    make, constraint, bias, shape
):
    K, N = 64, 16
    layer = make(K, N, bias=bias, constraint=constraint)
    if bias:
        nn.init.normal_(layer.bias)
    x, g = torch.randn(*shape, K, requires_grad=True), torch.randn(*shape, N)
    model = in_float8(nn.Sequential(layer))
    out = model(x)
    out.backward(g)

    rows = max(int(torch.tensor(shape).prod()), 1)
    power = 1.0 if make is uu.LinearReadout else 0.5
    output, grad_input = K**-power, N**-0.5
    if constraint == "to_output_scale":
        grad_input = output
    elif constraint == "gmean":
        output = grad_input = (output * grad_input) ** 0.5
    x64, w64 = rounded(x, E4M3).reshape(-1, K), rounded(model[0].weight, E4M3)
    g64 = rounded(g, E5M2).reshape(-1, N)
    offset = model[0].bias.detach().double() if bias else 0.0
    expected = {
        "output": (out, (x64 @ w64.t() + offset) * output),
        "grad_input": (x.grad, g64 @ w64 * grad_input),
        "grad_weight": (model[0].weight.grad, g64.t() @ x64 * rows**-0.5),
    }
    if bias:
        exact = g.double().reshape(-1, N).sum(0) * rows**-0.5
        expected["grad_bias"] = (model[0].bias.grad, exact)
    for name, (found, exact) in expected.items():
        error = (found.double().reshape(exact.shape) - exact).abs().max() if exact.numel() else 0
        assert error <= 1e-5 * (1 + (exact.abs().max() if exact.numel() else 0)), name


def test_the_float8_layers_keep_roles_depths_and_options():
    model = uu.DepthSequential(uu.Linear(16, 16, constraint=None), uu.LinearReadout(16, 16))
    parameters = dict(model.named_parameters())
    converted = in_float8(model)
    assert [type(m) for m in converted] == [Float8UnitLinear, Float8UnitLinearReadout]
    assert dict(converted.named_parameters()) == parameters
    assert converted[0].constraint is None and converted[1].scale_power == (1.0, 0.5, 0.5)
    assert [p.mup_type for p in converted.parameters()] == ["weight", "output"]
    for duplicate in (copy.deepcopy(converted), converted.to(torch.bfloat16)):
        assert [p.mup_type for p in duplicate.parameters()] == ["weight", "output"]
        assert [p.mup_scaling_depth for p in duplicate.parameters()] == [2, 2]
    assert uu.optim.AdamW(converted.parameters(), lr=1.0).param_groups[0]["lr"] > 0


def test_only_layers_that_are_not_unit_scaled_are_warned_of():
    model = nn.Sequential(uu.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=r'"unit".*2 of 3 layers \(first: 1\)'):
        convert_to_float8_training(model, config=RECIPES["unit"])


def test_compiled_in_one_graph_with_the_results_of_eager():
    model = in_float8(nn.Sequential(uu.Linear(32, 48), uu.GELU(), uu.LinearReadout(48, 16)))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in (40, 7):
        x, g = torch.randn(batch, 32), torch.randn(batch, 16)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        grads = []
        for run in (model, compiled):
            model.zero_grad()
            x.grad = None
            out = run(x.requires_grad_())
            out.backward(g)
            grads.append([out, x.grad, *(p.grad for p in model.parameters())])
        for mine, theirs in zip(*grads, strict=True):
            assert sqnr(mine, theirs) > 30  # GELU rounds differently, and so does its cast
    assert counter.frame_count == 1


def test_an_input_in_float8_keeps_its_own_scale_beside_a_static_cast():
    x = 5 * torch.randn(12, 64)
    x8 = Float8Tensor.from_high_precision(x, E4M3)
    layer = in_float8(nn.Sequential(uu.Linear(64, 16)))[0]
    exact = x8.dequantize().double() @ rounded(layer.weight, E4M3).t() * 64**-0.5
    assert sqnr(layer(x8), exact) > 100
