"""Modules with weights: initialisation, roles, and the unit-scaled functions that they call."""

from __future__ import annotations

import copy

import pytest
import torch
from scale_assertions import assert_unit_scaled
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])

# A layer, an input for it, its weight's role.
LAYERS = {
    "linear": (lambda: uu.Linear(96, 48), lambda: torch.randn(3, 5, 96), "weight"),
    "linear, bias": (lambda: uu.Linear(9, 7, bias=True), lambda: torch.randn(1, 9), "weight"),
    "readout": (lambda: uu.LinearReadout(33, 5, bias=True), lambda: torch.randn(9, 33), "output"),
    "conv": (lambda: uu.Conv1d(6, 8, 3, bias=True), lambda: torch.randn(2, 6, 11), "weight"),
    "conv of one": (
        lambda: uu.Conv1d(6, 4, 4, stride=2, padding=1, dilation=2, groups=2),
        lambda: torch.randn(6, 11),
        "weight",
    ),
    "conv, same": (
        lambda: uu.Conv1d(4, 6, 5, padding="same", padding_mode="reflect"),
        lambda: torch.randn(2, 4, 9),
        "weight",
    ),
    "embedding": (lambda: uu.Embedding(20, 6), lambda: torch.randint(20, (3, 7)), "weight"),
}
EVERY = pytest.mark.parametrize(("make", "take", "role"), LAYERS.values(), ids=LAYERS)


def backward(layer, x, g=None):
    """Output, input gradient and parameter gradients for a gradient of N(0, 1)."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x)
    y.backward(torch.randn_like(y) if g is None else g)
    return y.detach(), x.grad, *[p.grad for p in layer.parameters()]


@EVERY
def test_weights_start_from_the_normal_distribution_and_biases_from_zero(make, take, role):
    layer = make()
    assert (layer.weight.mup_type, layer.weight.mup_scaling_depth) == (role, None)
    weights = torch.cat([make().weight.detach().flatten() for _ in range(40)])
    assert_unit_scaled(weights)
    assert abs(float(weights.mean())) < 5 * weights.numel() ** -0.5
    if getattr(layer, "bias", None) is not None:
        assert layer.bias.mup_type == "bias"
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias))


@EVERY
def test_a_layer_made_on_meta_starts_like_any_other(make, take, role):
    with torch.device("meta"):
        layer = make()
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    for p, q in zip(layer.parameters(), make().parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p.mup_type, p.mup_scaling_depth) == (q.mup_type, q.mup_scaling_depth)
    layer(take())


@EVERY
@DTYPES
def test_a_layer_copied_or_loaded_computes_the_same(make, take, role, dtype):
    layer, x = make().to(dtype), take()
    x = x.to(dtype) if x.is_floating_point() else x
    g = torch.randn_like(layer(x))
    expected = backward(layer, x, g)
    assert expected[0].dtype == dtype
    loaded = make().to(dtype)
    loaded.load_state_dict(layer.state_dict())
    layer.zero_grad()
    for other in (copy.deepcopy(layer), loaded):
        torch.testing.assert_close(backward(other, x, g), expected)


@pytest.mark.parametrize("name", ["readout", "conv, same", "embedding"])
def test_a_compiled_layer_computes_the_same(name):
    """In bfloat16, which a factor of another dtype would change."""
    make, take, _ = LAYERS[name]
    layer, x = make().bfloat16(), take()
    x = x.bfloat16() if x.is_floating_point() else x
    g = torch.randn_like(layer(x))
    expected = backward(layer, x, g)
    layer.zero_grad()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(backward(compiled, x, g), expected)


def test_the_state_dict_is_that_of_torch():
    assert list(uu.Linear(3, 4, bias=True).state_dict()) == ["weight", "bias"]
    uu.Linear(3, 4).load_state_dict(nn.Linear(3, 4, bias=False).state_dict())


def test_forward_reads_constraint_and_scale_power_from_the_layer():
    layer, x = uu.Linear(6, 4), torch.randn(5, 6)
    layer.scale_power = (1.0, 0.25, 0.0)
    layer.constraint = None
    g = torch.randn(5, 4)
    _, gx, gw = backward(layer, x, g)
    torch.testing.assert_close(layer(x), x @ layer.weight.T / 6)
    torch.testing.assert_close(gx, g @ layer.weight / 4**0.25)
    torch.testing.assert_close(gw, g.T @ x)
    assert uu.Linear.scale_power == (0.5, 0.5, 0.5)
    assert uu.LinearReadout(6, 4).scale_power == (1.0, 0.5, 0.5)


@pytest.mark.parametrize("constraint", [None, "gmean"])
def test_a_convolution_obeys_its_constraint(constraint):
    layer, x = uu.Conv1d(8, 64, 3, constraint=constraint), torch.randn(6, 8, 50)
    g = torch.randn(6, 64, 48)
    _, gx, _ = backward(layer, x, g)
    leaf = x.clone().requires_grad_()
    U.conv1d(leaf, layer.weight, constraint=constraint).backward(g)
    assert torch.equal(gx, leaf.grad)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 2, "same", "valid"])
def test_a_convolution_pads_once_and_as_torch(mode, padding):
    options = {"padding": padding, "padding_mode": mode, "dilation": 2, "bias": True}
    layer = uu.Conv1d(4, 6, 3, **options)
    theirs = nn.Conv1d(4, 6, 3, **options)
    with torch.no_grad():
        layer.bias.normal_()
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 13)
    torch.testing.assert_close(layer(x), theirs(x) / 12**0.5)


def test_a_frozen_embedding_stays_frozen():
    table = torch.randn(5, 3)
    layer = uu.Embedding.from_pretrained(table, freeze=True)
    assert not layer.weight.requires_grad
    assert layer.weight.mup_type == "weight"
    assert torch.equal(layer(torch.tensor([4, 0])), table[[4, 0]])


def test_an_embeddings_gradient_has_unit_scale():
    layer = uu.Embedding(50, 64, padding_idx=3)
    assert not layer.weight[3].any()
    _, _, gw = backward(layer, torch.randint(50, (40, 30)))
    assert not gw[3].any()
    assert_unit_scaled(torch.cat((gw[:3], gw[4:])), band=0.05)


def test_the_repr_of_a_layer():
    assert repr(uu.Linear(3, 4)) == (
        "Linear(in_features=3, out_features=4, bias=False, constraint='to_output_scale')"
    )
    assert "constraint=None" in repr(uu.Conv1d(3, 4, 2, constraint=None))


# --- norms

NORMS = [(uu.LayerNorm, nn.LayerNorm), (uu.RMSNorm, nn.RMSNorm)]
EVERY_NORM = pytest.mark.parametrize(("ours", "theirs"), NORMS)


@EVERY_NORM
@pytest.mark.parametrize("shape", [7, (7,), [3, 7]])
@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_computes_what_torchs_computes(ours, theirs, shape, affine):
    mine = ours(shape, eps=1e-3, elementwise_affine=affine)
    other = theirs(shape, eps=1e-3, elementwise_affine=affine)
    for p in mine.parameters():
        nn.init.normal_(p)
    other.load_state_dict(mine.state_dict())
    x, g = torch.randn(5, 3, 7), torch.randn(5, 3, 7)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = mine(x1), other(x2)
    y1.backward(g)
    y2.backward(g)
    torch.testing.assert_close(y1, y2)
    torch.testing.assert_close(x1.grad, x2.grad)
    rows = x.numel() / (21 if isinstance(shape, list) else 7)
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad * rows**-0.5)


@EVERY_NORM
def test_a_norm_has_no_weight_by_default(ours, theirs):
    assert list(ours(7).parameters()) == []
    assert ours(7).state_dict() == {}


def test_weights_of_norms_start_at_one_and_have_roles():
    layer, rms = uu.LayerNorm(5, elementwise_affine=True), uu.RMSNorm(5, elementwise_affine=True)
    assert torch.equal(layer.weight, torch.ones(5)) and torch.equal(rms.weight, torch.ones(5))
    assert torch.equal(layer.bias, torch.zeros(5))
    assert [p.mup_type for p in (layer.weight, layer.bias, rms.weight)] == ["norm", "bias", "norm"]
    assert uu.LayerNorm(5, elementwise_affine=True, bias=False).bias is None


@EVERY_NORM
def test_a_norm_made_on_meta_or_in_another_dtype_works(ours, theirs):
    with torch.device("meta"):
        norm = ours(8, elementwise_affine=True)
    norm.to_empty(device="cpu").reset_parameters()
    assert norm.weight.mup_type == "norm"
    x = torch.randn(4, 8)
    torch.testing.assert_close(norm(x), theirs(8, eps=1e-5)(x))
    half = ours(8, elementwise_affine=True, dtype=torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16


@EVERY_NORM
def test_a_compiled_norm_computes_the_same(ours, theirs):
    norm = ours((3, 4), elementwise_affine=True)
    compiled = torch.compile(copy.deepcopy(norm), fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(compiled(x), norm(x))
