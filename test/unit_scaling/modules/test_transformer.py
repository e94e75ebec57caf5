"""Transformers: scales in all layers, attention by loops, rotary pairs, stacks and their depth."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

import pytest
import torch
from scale_assertions import scale_of
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling.modules.transformer import rotary

SMALL = {"hidden_size": 16, "vocab_size": 24, "layers": 2, "heads": 2}
VARIANTS = [
    {"norm": norm, "attention": attention}
    for norm, attention in itertools.product(("pre", "res-post"), ("softmax", "sqrt_softmax"))
]
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))


def scales(model, ids):
    """The scale of every activation, activation gradient, weight gradient, by name."""
    found = {}

    def hook(name):
        def after(module, inputs, output):
            found[f"{name}, output"] = scale_of(output)
            output.register_hook(lambda g: found.__setitem__(f"{name}, gradient", scale_of(g)))

        return after

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if n]
    model.loss(ids).backward()
    for handle in handles:
        handle.remove()
    for name, p in model.named_parameters():
        found[f"{name}, gradient"] = scale_of(p.grad)
    return found


def worst_attention(attention, positions):
    """The most that causal attention can amplify: values that all positions share.

    Its factor is derived for independent values. Flat weights add up to 1, times sqrt(S / log S);
    roots of flat weights add up to sqrt(i) at position i.
    """
    if attention == "softmax":
        return (positions / math.log(positions)) ** 0.5
    return ((positions + 1) / 2) ** 0.5


@EVERY_VARIANT
def test_every_activation_and_gradient_stays_within_what_attention_can_amplify(variant):
    # Attention makes positions of 4 layers similar, and so amplifies more than independent values;
    # the gradients of qkv are small because those of q and k are at the start.
    torch.manual_seed(0)
    width, positions = 128, 64
    model = uu.TransformerDecoder(width, 256, 4, 4, **variant)
    found = scales(model, torch.randint(256, (4, positions)))
    # The readout's output is meant to be small: width ** -0.5.
    found["projection, output"] *= width**0.5
    assert len(found) > 80
    worst = worst_attention(variant["attention"], positions)
    outside = {name: s for name, s in found.items() if not 1 / worst < s < worst}
    assert outside == {}
    # and most are within a factor of 1.6
    assert sum(1 / 1.6 < s < 1.6 for s in found.values()) > 0.6 * len(found)


def residual_layer_oracle(layer, x, norm):
    """A layer by its formula: (tau f(x) + x) / sqrt(1 + tau**2), twice."""
    for branch, rms, tau in (
        (layer.mhsa, layer.mhsa_norm, layer.mhsa_tau),
        (layer.mlp, layer.mlp_norm, layer.mlp_tau),
    ):
        f = branch(rms(x)) if norm == "pre" else rms(branch(x))
        x = (tau * f + x) / (1 + tau**2) ** 0.5
    return x


@pytest.mark.parametrize("norm", ["pre", "res-post"])
def test_a_layer_weights_branches_by_tau_with_the_norm_in_its_place(norm):
    layer = uu.TransformerLayer(12, 3, mhsa_tau=0.7, mlp_tau=0.3, is_causal=True, norm=norm)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), residual_layer_oracle(layer, x, norm))
    other = "pre" if norm == "res-post" else "res-post"
    assert not torch.allclose(layer(x), residual_layer_oracle(layer, x, other))


def test_taus_follow_from_the_rule():
    rule = uu.transformer_residual_scaling_rule()
    stack = uu.TransformerStack(3, hidden_size=8, heads=2, is_causal=True)
    assert [t for layer in stack for t in (layer.mhsa_tau, layer.mlp_tau)] == [
        rule(i, 6) for i in range(6)
    ]
    stack = uu.TransformerStack(
        2, residual_scaling=lambda i, n: i / n, hidden_size=8, heads=2, is_causal=True
    )
    assert [t for layer in stack for t in (layer.mhsa_tau, layer.mlp_tau)] == [0, 0.25, 0.5, 0.75]


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token():
    model, ids = uu.TransformerDecoder(**SMALL).bfloat16(), torch.randint(24, (3, 9))
    logits = model(ids)
    assert logits.shape == (3, 9, 24)
    loss = model.loss(ids)
    assert loss.dtype == torch.float32
    chosen = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    torch.testing.assert_close(loss.double(), -chosen.mean(), rtol=1e-5, atol=1e-5)


# --- attention


def oracle(module, x):
    """By loops over batch and heads in float64; without the factor of attention's own scale."""
    h = module.heads
    out = []
    for x_SH in x.double():
        qkv = x_SH @ module.linear_qkv.weight.double().T / x_SH.shape[-1] ** 0.5
        q, k, v = qkv.chunk(3, dim=-1)
        heads = []
        for q_SD, k_SD, v_SD in zip(q.chunk(h, -1), k.chunk(h, -1), v.chunk(h, -1), strict=True):
            turned = (q_SD, k_SD)
            if module.rotary_base is not None:
                turned = tuple(rotary(t, module.rotary_base) for t in turned)
            logits = module.mult * turned[0] @ turned[1].T / q_SD.shape[-1]
            if module.is_causal:
                future = torch.ones_like(logits, dtype=torch.bool).triu(1)
                logits = logits.masked_fill(future, -math.inf)
            weights = logits.softmax(-1)
            weights = weights.sqrt() if module.attention == "sqrt_softmax" else weights
            heads.append(weights @ v_SD)
        joined = torch.cat(heads, -1)
        out.append(joined @ module.linear_o.weight.double().T / joined.shape[-1] ** 0.5)
    return torch.stack(out)


@pytest.mark.parametrize("attention", ["softmax", "sqrt_softmax"])
@pytest.mark.parametrize("rotary_base", [10000.0, None])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("hidden", "heads", "mult"), [(12, 3, 1.0), (6, 1, 2.0), (8, 4, 0.5)])
def test_the_output_is_attention_times_a_scale(
    attention, rotary_base, is_causal, hidden, heads, mult
):
    module = uu.MHSA(
        hidden, heads, is_causal, mult=mult, rotary_base=rotary_base, attention=attention
    )
    x = torch.randn(2, 9, hidden)
    with torch.no_grad():
        y, exact = module(x).double(), oracle(module, x)
    scale = float((y * exact).sum() / exact.square().sum())
    torch.testing.assert_close(y, scale * exact, rtol=1e-4, atol=1e-5)
    assert scale == pytest.approx(1) if attention == "sqrt_softmax" else scale > 1


# --- rotary embedding


def rotary_oracle(x, base):
    """One complex number per pair, in float64, a position at a time."""
    *_, positions, d = x.shape
    out = torch.empty_like(x, dtype=torch.float64)
    for s in range(positions):
        for i in range(d // 2):
            angle = s * base ** (-2 * i / d)
            z = torch.complex(x[..., s, i].double(), x[..., s, i + d // 2].double())
            z = z * complex(math.cos(angle), math.sin(angle))
            out[..., s, i], out[..., s, i + d // 2] = z.real, z.imag
    return out


@pytest.mark.parametrize("shape", [(1, 2), (9, 6), (2, 3, 17, 8), (2, 0, 4), (5, 0)])
@pytest.mark.parametrize("base", [10000.0, 7.5])
def test_pairs_rotate_by_their_angle(shape, base):
    x = torch.randn(shape)
    y = rotary(x, base)
    torch.testing.assert_close(y.double(), rotary_oracle(x, base), rtol=1e-5, atol=1e-5)


# --- stacks

STACKS = {
    "list": lambda *layers: uu.DepthModuleList(layers),
    "generator": lambda *layers: uu.DepthModuleList(layer for layer in layers),
    "sequential": uu.DepthSequential,
    "named": lambda *layers: uu.DepthSequential(OrderedDict(zip("abc", layers, strict=False))),
}
EVERY = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)


def depths(model):
    return [p.mup_scaling_depth for p in model.parameters()]


def three():
    return [uu.Linear(4, 4, bias=True), uu.MLP(4, 2), uu.RMSNorm(4, elementwise_affine=True)]


@EVERY
def test_every_parameter_gets_the_number_of_layers(stack):
    assert depths(stack(*three())) == [3] * 6
    assert depths(stack(three()[0])) == [1, 1]


@EVERY
def test_a_parameter_without_a_role_is_named_and_nothing_is_set(stack):
    layers = [uu.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ValueError, match=r"weight of shape \(4, 4\) has no mup_type"):
        stack(*layers)
    assert depths(layers[0]) == [None]
