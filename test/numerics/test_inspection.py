"""`inspect` measures the casts that layers make, and changes no result."""

from __future__ import annotations

import copy
import math

import oracle
import pytest
import torch
from assertions import assert_bitwise
from layer_check import EMULATED
from recompute import KINDS, Checkpointed
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    RMSNormCast,
    convert_to_float8_inference,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.numerics import inspect

FORWARD = {"input": "output", "weight": "output"}


def mlp(recipe="tensorwise", width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
    return convert_to_float8_training(model, config=RECIPES[recipe])


def rows(report):
    return {row.key: row for row in report._rows}


def by_hand(x, cast):
    """The SQNR of a dynamic cast by the oracle."""
    x = x.detach().float()
    data, scale = oracle.quantize(x, cast.block, cast.format.dtype, cast.scale_format)
    values = oracle.values(data, scale, cast.block, cast.format.dtype)
    noise = float(((x.double() - values) ** 2).sum())
    return 10 * math.log10(float((x.double() ** 2).sum()) / noise)


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_are_those_of_the_three_products(recipe, autocast):
    layer = Float8Linear.from_float(nn.Linear(24, 40), RECIPES[recipe])
    plan = layer.config.gemms
    x, g = torch.randn(3, 10, 24, requires_grad=True), torch.randn(3, 10, 40)
    dtype = torch.bfloat16 if autocast else torch.float32
    with inspect(layer) as report, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x).backward(g.to(dtype))
    x_MK, w_NK, g_MN = (t.detach().reshape(-1, t.shape[-1]).to(dtype) for t in (x, layer.weight, g))
    expected = {
        ("input", "output"): by_hand(x_MK, plan.output.a),
        ("weight", "output"): by_hand(w_NK, plan.output.b),
        ("grad_output", "grad_input"): by_hand(g_MN, plan.grad_input.a),
    }
    if plan.output.b.transposed() != plan.grad_input.b:
        expected["weight", "grad_input"] = by_hand(w_NK.t(), plan.grad_input.b)
    if plan.grad_weight.a is not None and plan.output.a.transposed() != plan.grad_weight.b:
        expected["input", "grad_weight"] = by_hand(x_MK.t(), plan.grad_weight.b)
        expected["grad_output", "grad_weight"] = by_hand(g_MN.t(), plan.grad_weight.a)
    found = rows(report)
    assert {key[1:]: pytest.approx(row.sqnr) for key, row in found.items()} == expected
    for (_, operand, gemm), row in found.items():
        product = getattr(plan, gemm)
        side = {"input": "ab", "weight": "bb", "grad_output": "aa"}[operand]
        cast = getattr(product, side[gemm != "output"] if operand == "input" else side[0])
        assert (row.format, row.scaling, row.calls) == (cast.format.name, "dynamic", 1)
        names = {(-1, -1): "tensorwise", (1, -1): "rowwise"}
        assert row.granularity == names.get(cast.block, "x".join(map(str, cast.block)))


@pytest.mark.parametrize("name", ["weight only", "input only", "gradient only"])
def test_an_operand_that_is_alone_in_float8_has_rows(name):
    layer = Float8Linear.from_float(nn.Linear(24, 40), EMULATED[name])
    plan, w = layer.config.gemms, layer.weight
    x, g = torch.randn(30, 24, requires_grad=True), torch.randn(30, 40)
    with inspect(layer) as report:
        layer(x).backward(g)
    casts = {
        ("input", "output"): (x, plan.output.a),
        ("weight", "output"): (w, plan.output.b),
        ("grad_output", "grad_input"): (g, plan.grad_input.a),
        ("weight", "grad_input"): (w.t(), plan.grad_input.b),
        ("input", "grad_weight"): (x.t(), plan.grad_weight.b),
        ("grad_output", "grad_weight"): (g.t(), plan.grad_weight.a),
    }
    expected = {key: by_hand(matrix, cast) for key, (matrix, cast) in casts.items() if cast}
    assert {key[1:]: pytest.approx(row.sqnr) for key, row in rows(report).items()} == expected


def train(model, watched, steps=3, accumulate=2):
    """Parameters, buffers and outputs of a short training."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with inspect(model) if watched else torch.enable_grad() as report:
            for i in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(torch.randn(8, 16) * 2.0**i)
                out.backward(torch.randn_like(out))
                found.append(out.detach())
        if watched:
            assert len(report) >= 6 and {row.calls for row in report._rows} == {accumulate}
        optimizer.step()
        sync_float8_amax_and_scale_history(model)
    found.append(torch.rand(3))  # the state of the random generator
    return found + [t.detach() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_watched_training_is_the_same_to_the_bit(recipe, kind):
    model = mlp(recipe)
    model = model if kind is None else Checkpointed(model, kind)
    twin = copy.deepcopy(model)
    for mine, theirs in zip(train(model, True), train(twin, False), strict=True):
        assert_bitwise(mine, theirs, (recipe, kind))


def test_a_layer_called_twice_and_one_with_two_names_have_one_set_of_rows():
    layer = nn.Linear(16, 16)
    model = convert_to_float8_training(nn.ModuleDict({"a": layer, "b": layer}))
    x = torch.randn(4, 16)
    with inspect(model) as report:
        model["b"](model["a"](x)).sum().backward()
    found = rows(report)
    assert {key[0] for key in found} == {"a"}
    assert found["a", "input", "output"].calls == 2
    assert found["a", "input", "output"].elements == 128
    # The first call's input wants no gradient: its cast feeds grad_weight alone.
    assert found["a", "grad_output", "grad_input"].calls == 1
    assert found["a", "grad_output", "grad_weight"].calls == 1


def test_only_what_runs_has_rows():
    model, x = mlp("blockwise"), torch.randn(4, 16)
    for scope in (torch.no_grad, torch.inference_mode):
        with inspect(model) as report, scope():
            model(x)
        assert {key[1:] for key in rows(report)} == set(FORWARD.items())
    with inspect(model) as report:
        model(x)  # no backward comes
    assert {key[1:] for key in rows(report)} == set(FORWARD.items())
    model.requires_grad_(False)
    with inspect(model) as report:
        model(x.requires_grad_()).sum().backward()
    assert {key[1:] for key in rows(report)} == {*FORWARD.items(), ("grad_output", "grad_input")}


def _planted(module, grad_output):
    raise RuntimeError("planted")


def test_hooks_go_whatever_happens_and_nested_watchers_see_the_same():
    model, x = mlp(), torch.randn(4, 16)
    model[2].register_full_backward_pre_hook(_planted)
    planted = pytest.raises(RuntimeError, match="planted")
    with inspect(model) as outer, planted, inspect(model) as inner:
        model(x).sum().backward()
    assert inner.rows() == outer.rows() != []
    assert all(not layer._forward_hooks for layer in model.modules())


def test_names_are_those_that_the_model_itself_has():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, x = mlp(), torch.randn(4, 16)
    model[0] = torch.compile(model[0], backend="eager")
    model[2] = checkpoint_wrapper(model[2])
    with inspect(torch.compile(model, backend="eager")) as report:
        model(x).sum().backward()
    assert {row.layer for row in report._rows} == {"0", "2"}
    with inspect(model[0]) as report:
        model(x)
    assert (report.model, {row.layer for row in report._rows}) == ("Float8Linear", {""})


def test_operands_that_come_in_float8_have_no_error():
    norm, layer = RMSNormCast(32, config=Float8LinearConfig()), nn.Linear(32, 16)
    model = nn.Sequential(norm, Float8Linear.from_float(layer))
    with inspect(model) as report:
        model(torch.randn(2, 4, 32)).sum().backward()
    found = rows(report)
    x = found["1", "input", "output"]
    assert (x.scaling, x.sqnr, x.flushed, x.elements) == ("float8", None, None, 256)
    assert x.amax > 1
    assert found["1", "weight", "output"].sqnr > 30


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_weights_that_live_in_float8(recipe):
    """Under rowwise scales grad_output is multiplied by them before its cast; that is measured."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128, bias=False)
    with torch.no_grad():
        layer.weight[:64] *= 2.0**12
    model = convert_to_float8_inference(nn.Sequential(layer), config=RECIPES[recipe])
    x, g = torch.randn(4, 128, requires_grad=True), torch.randn(4, 128)
    with inspect(model) as report:
        model(x).backward(g)
    found = rows(report)
    assert found["0", "weight", "output"].scaling == "float8"
    assert found["0", "weight", "output"].sqnr is None
    seen, folded = found["0", "grad_output", "grad_input"].amax, recipe == "rowwise"
    scale = model[0].weight.scale.t() if folded else torch.ones(1)
    assert seen == float((g * scale).abs().max())


def test_a_compiled_model_is_watched_eagerly_and_runs_its_graphs_again():
    model = mlp("delayed")
    x, g = torch.randn(8, 16), torch.randn(8, 16)

    def step(run, module):
        run(x).backward(g)
        sync_float8_amax_and_scale_history(module)

    step(model, model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(compiled, model)
    step(twin, twin)
    with inspect(twin) as eager:
        step(twin, twin)
    with inspect(compiled) as report:
        step(compiled, model)
    assert report.model == "Sequential"
    assert report.rows() == eager.rows() != []
    with torch.compiler.set_stance("fail_on_recompile"):
        step(compiled, model)
    step(twin, twin)
    state, expected = (dict(m.named_buffers()) for m in (model, twin))
    for name, buffer in state.items():
        assert_bitwise(buffer, expected[name], name)
