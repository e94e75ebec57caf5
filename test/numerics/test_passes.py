"""Passes of a model with a chosen few layers in float8, and what watches them."""

from __future__ import annotations

import math

import pytest
import torch
from assertions import assert_bitwise, assert_sqnr_at_least, sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8.convert.convert import convert_to_float8_training, high_precision
from float8.fusion.producers import RMSNormCast
from float8.granularity import Tensorwise
from float8.numerics.passes import Noise, Watch, only_in_float8, run_pass, tapped
from float8.tensor import Float8Tensor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def test_noise_is_the_signal_to_noise_ratio_of_all_that_was_added():
    a, b = torch.randn(300, dtype=torch.float64), torch.randn(7, 5)
    c, d = a + 1e-3 * torch.randn_like(a), b.bfloat16()
    noise = Noise()
    noise.add(a, c)
    noise.add(b, d)
    exact = sqnr(torch.cat([c, d.flatten().double()]), torch.cat([a, b.flatten().double()]))
    assert noise.decibels == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        (torch.ones(3), torch.ones(3), math.inf),
        (torch.ones(3), torch.tensor([1.0, math.nan, 1.0]), -math.inf),
        (torch.ones(3), torch.tensor([1.0, math.inf, 1.0]), -math.inf),
        (torch.ones(3), None, 0.0),
        (torch.zeros(3), torch.zeros(3), None),
        (None, torch.ones(3), None),
        (None, None, None),
        (torch.ones(3), torch.ones(4), None),
        (torch.full((3,), 1e30), torch.full((3,), 1e30), math.inf),
        (torch.full((2,), 1e30), torch.full((2,), 0.9e30), pytest.approx(20, rel=1e-5)),
    ],
)
def test_noise_at_its_edges(reference, other, expected):
    noise = Noise()
    noise.add(reference, other)
    assert noise.decibels == expected


def test_only_the_chosen_layers_are_in_float8():
    model = convert_to_float8_training(mlp())
    x = torch.randn(8, 16)
    with only_in_float8(model, {model[2]}):
        found = model(x)
    with high_precision(model):
        hidden = model[1](model[0](x))
    assert_bitwise(found.detach(), model[2](hidden).detach())
    with only_in_float8(model, None):
        assert_bitwise(model(x).detach(), model[2](model[1](model[0](x))).detach())
    assert not any(layer.high_precision for layer in (model[0], model[2]))


def test_a_norm_that_writes_float8_is_switched_off_too():
    model = convert_to_float8_training(nn.Sequential(RMSNormCast(16), nn.Linear(16, 16)))
    with only_in_float8(model, {model[1]}):
        assert type(model[0](torch.randn(4, 16))) is torch.Tensor
    assert not model[0].high_precision


class Shared(nn.Module):
    """A layer called twice, and an input that two layers read; recomputed on request."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def inner(self, x):
        return self.b(self.a(x)) + self.b(x)

    def forward(self, x):
        x = x * 1
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_a_watch_sees_every_call_once_and_the_share_of_its_own_layer(how):
    model = Shared(how).double()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    seen = {}
    layers = {"a": model.a, "b": model.b}
    watch = Watch(layers, lambda name, kind, t: seen.setdefault((name, kind), []).append(t))
    g = torch.randn(4, 16, dtype=torch.float64)
    with watch.open():
        found = run_pass(model, x, lambda out: (out * g).sum(), 0, watch)
    a, b = model.a.weight.detach(), model.b.weight.detach()
    assert [len(seen[key]) for key in (("a", "output"), ("b", "output"))] == [1, 2]
    assert len(seen["a", "grad_input"]) == 1
    assert_sqnr_at_least(seen["a", "grad_input"][0], g @ b @ a, 250, how)  # in float64
    for gradient in seen["b", "grad_input"]:
        assert_sqnr_at_least(gradient, g @ b, 250, how)
    assert_sqnr_at_least(found.gradients["input 0"], g @ b @ a + g @ b, 250, how)
    assert not model.a._forward_hooks
    assert not model.a._forward_pre_hooks


@pytest.mark.parametrize("in_float8", [False, True])
def test_a_tap_has_the_gradient_of_its_own_reader_alone(in_float8):
    x = torch.randn(2, 4, 16, requires_grad=True)
    t = (
        Float8Tensor.from_high_precision(x, torch.float8_e4m3fn, Tensorwise())
        if in_float8
        else x * 1
    )
    seen = []
    (first, (again,)), kwargs = tapped((t, (t,)), {"other": t}, seen.append)
    assert first is again is kwargs["other"] is not t
    read = (lambda t: t.dequantize()) if in_float8 else (lambda t: t)
    (2 * read(first) + 3 * read(t)).sum().backward()
    (gradient,) = seen
    assert_bitwise(gradient, torch.full_like(x, 2.0).detach())
    assert_bitwise(x.grad, torch.full_like(x, 5.0).detach())


def test_what_a_callee_may_write_to_stays_what_it_is():
    leaf, seen = nn.Parameter(torch.ones(2)), []
    held, state = [leaf * 1, leaf], {"x": leaf * 1}
    args, kwargs = tapped((held,), {"state": state}, seen.append)
    assert args[0] is held
    assert kwargs["state"] is state
    (2 * held[0] + 3 * state["x"] + leaf).sum().backward()
    assert sorted(float(g[0]) for g in seen) == [2.0, 3.0]
    assert not leaf._backward_hooks


def test_sparse_gradients_are_gradients():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    ids = torch.tensor([1, 1, 3])
    found = run_pass(model, ids, None, 0)
    model[0].sparse = False
    assert found.is_finite
    assert found.sqnr_of_gradients(run_pass(model, ids, None, 0)) == math.inf


def test_a_pass_collects_loss_output_and_gradients():
    model, x = mlp(), torch.randn(8, 16)
    found = run_pass(model, x, lambda out: out.square().mean(), 0)
    loss = model(x).square().mean()
    loss.backward()
    assert found.loss == float(loss.detach())
    assert_bitwise(found.output, model(x).detach())
    for parameter in model.parameters():
        assert_bitwise(found.gradients[id(parameter)], parameter.grad)
    assert found.is_finite
    with torch.no_grad():
        model[2].bias[0] = math.nan
    assert not run_pass(model, x, None, 0).is_finite


def test_a_pass_without_gradients_has_none():
    model = mlp().requires_grad_(False)
    assert run_pass(model, torch.randn(8, 16), None, 0).gradients == {}
