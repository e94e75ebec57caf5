"""Every module is its function, of parameters that start with unit scale and have a role."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from scale_assertions import assert_unit_scaled
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U

ODD = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
# name -> (module, shape of its input, the function that it calls)
MODULES = {
    "linear": (partial(uu.Linear, 96, 48), (3, 5, 96), lambda m, x: U.linear(x, m.weight)),
    "linear, bias": (
        partial(uu.Linear, 9, 7, bias=True, constraint=None),
        (1, 9),
        lambda m, x: U.linear(x, m.weight, m.bias, None),
    ),
    "readout": (
        partial(uu.LinearReadout, 33, 5, bias=True),
        (9, 33),
        lambda m, x: U.linear_readout(x, m.weight, m.bias),
    ),
    "conv": (
        partial(uu.Conv1d, 6, 8, 3, bias=True, constraint="gmean"),
        (2, 6, 11),
        lambda m, x: U.conv1d(x, m.weight, m.bias, constraint="gmean"),
    ),
    "conv of one": (
        partial(uu.Conv1d, 6, 4, 4, **ODD),
        (6, 11),
        lambda m, x: U.conv1d(x, m.weight, **ODD),
    ),
    "embedding": (
        partial(uu.Embedding, 20, 6, padding_idx=3),
        None,
        lambda m, x: U.embedding(x, m.weight, padding_idx=3),
    ),
    "layer norm": (
        partial(uu.LayerNorm, [3, 7], eps=1e-3, elementwise_affine=True),
        (5, 3, 7),
        lambda m, x: U.layer_norm(x, (3, 7), m.weight, m.bias, 1e-3),
    ),
    "layer norm, plain": (partial(uu.LayerNorm, 7), (5, 7), lambda m, x: U.layer_norm(x, (7,))),
    "rms norm": (
        partial(uu.RMSNorm, 7, eps=1e-3, elementwise_affine=True),
        (5, 3, 7),
        lambda m, x: U.rms_norm(x, (7,), m.weight, 1e-3),
    ),
    "rms norm, plain": (partial(uu.RMSNorm, [7]), (5, 7), lambda m, x: U.rms_norm(x, (7,))),
    "gelu": (
        partial(uu.GELU, mult=0.5, constraint=None, approximate="tanh"),
        (7, 13),
        lambda m, x: U.gelu(x, mult=0.5, constraint=None, approximate="tanh"),
    ),
    "silu": (partial(uu.SiLU, 2.0, "gmean"), (7, 13), lambda m, x: U.silu(x, 2.0, "gmean")),
    "softmax": (
        partial(uu.Softmax, 0, mult=3.0, constraint=None),
        (7, 13),
        lambda m, x: U.softmax(x, 0, constraint=None, mult=3.0),
    ),
    "dropout": (partial(uu.Dropout, 0.5), (40, 30), lambda m, x: U.dropout(x, 0.5, m.training)),
    "no dropout": (lambda: uu.Dropout(0.5).eval(), (40, 30), lambda m, x: x * 1),
    "loss": (
        lambda: uu.CrossEntropyLoss(2.0, torch.rand(11) + 0.5, ignore_index=7, reduction="sum",
                                    label_smoothing=0.1),
        (40, 11),
        lambda m, x: U.cross_entropy(x, m.target, m.weight, ignore_index=7, reduction="sum",
                                     label_smoothing=0.1, mult=2.0),
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", MODULES)


def made(name):
    """A module whose parameters are random, biases too."""
    module = MODULES[name][0]()
    for p in module.parameters():
        nn.init.normal_(p)
    if name == "loss":  # the second input
        module.target = torch.arange(40) % 11
    return module


def run(module, x, function=None):
    """Output, input gradient and parameter gradients; ``function`` instead of the forward."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    module.zero_grad()
    torch.manual_seed(1)
    given = (x, module.target) if hasattr(module, "target") else (x,)
    y = module(*given) if function is None else function(module, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def input_of(name, dtype=torch.float32):
    shape = MODULES[name][1]
    return torch.randint(20, (3, 7)) if shape is None else torch.randn(shape).to(dtype)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_is_its_function_forward_and_backward(name, dtype):
    module, x = made(name).to(dtype), input_of(name, dtype)
    found, expected = run(module, x), run(module, x, MODULES[name][2])
    assert found[0].dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert isinstance(module, getattr(nn, type(module).__name__.replace("Readout", "")))


@EVERY
def test_parameters_start_at_unit_scale_with_a_role_on_meta_too(name):
    with torch.device("meta"):
        module = MODULES[name][0]()
    for p in module.parameters():
        assert p.is_meta
    module.to_empty(device="cpu")
    for m in (module, plain := MODULES[name][0]()):
        torch.manual_seed(5)
        if list(m.parameters()):
            m.reset_parameters()
    roles = {"weight": "norm" if "norm" in name else "output" if name == "readout" else "weight"}
    for (key, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        for each in (p, q):
            assert (each.mup_type, each.mup_scaling_depth) == (roles.get(key, "bias"), None)
        if key == "bias":
            assert not p.any()
        elif "norm" in name:
            assert (p == 1).all()
        elif name == "embedding":
            assert not p[3].any()
        else:
            assert_unit_scaled(p)
            assert abs(float(p.detach().mean())) < 5 * p.numel() ** -0.5
