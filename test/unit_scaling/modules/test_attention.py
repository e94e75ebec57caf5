"""Attention: heads, positions, dropout, outputs of unit scale; rotary embedding rotates pairs."""

from __future__ import annotations

import math

import pytest
import torch

import float8.unit_scaling as uu
from float8.unit_scaling.modules.transformer import rotary


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


@pytest.mark.parametrize("attention", ["softmax", "sqrt_softmax"])
def test_dropout_ends_with_training(attention):
    # That of the package unit-scaling drops in evaluation too.
    module = uu.MHSA(8, 2, is_causal=True, dropout_p=0.5, attention=attention)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    plain = uu.MHSA(8, 2, is_causal=True, attention=attention)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))


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
