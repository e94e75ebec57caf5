"""A transformer keeps unit scale through all its layers, forward and backward."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scale_assertions import scale_of

import float8.unit_scaling as uu

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
