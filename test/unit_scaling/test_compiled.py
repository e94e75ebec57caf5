"""One compiled graph serves all lengths: factors that are made from sizes stay symbolic."""

from __future__ import annotations

import pytest
import torch
from scale_assertions import LENGTHS, graphs_compiled, normal

from float8.unit_scaling import functional as U
from float8.unit_scaling.core.functional import logarithmic_interpolation
from float8.unit_scaling.functional.attention import _std_of_flat_attention
from float8.unit_scaling.modules.transformer import rotary
from float8.unit_scaling.scale import scale_bwd, scale_fwd


def all_constraints(a, b):
    return sum(U.matmul(a, b, c) for c in ("gmean", "hmean", "amean", "to_right_grad_scale"))


def linear_layers(x, w, b):
    return U.linear_readout(U.linear(x, w, b, "gmean"), w, b, "hmean")


def both_kinds(attention):
    return lambda *a: attention(*a, is_causal=False) + attention(*a, is_causal=True)


def qkv(n):
    return tuple(normal(2, n, 8, seed=i) for i in range(3))


def factors_of_a_size(x):
    n = x.shape[0]
    return scale_fwd(x, logarithmic_interpolation(0.3, _std_of_flat_attention(n, n, True), n**0.5))


def gelu_and_softmax(x):
    return U.softmax(U.gelu(x, 2.0), 0, constraint="gmean")


# name -> (function, its inputs of length n)
FUNCTIONS = {
    "linear": (linear_layers, lambda n: (normal(2, n, 8), normal(8, 8), normal(8))),
    "matmul": (U.matmul, lambda n: (normal(2, n, 8), normal(2, 8, n))),
    "matmul, broadcast": (U.matmul, lambda n: (normal(n, 8), normal(3, 8, n + 1))),
    "constraints": (all_constraints, lambda n: (normal(2, n, 8), normal(2, 8, n))),
    "conv1d": (
        lambda x, w: U.conv1d(x, w, padding=2, stride=2, constraint="gmean"),
        lambda n: (normal(2, 3, n), normal(4, 3, 3)),
    ),
    "activations": (gelu_and_softmax, lambda n: (normal(n, 5),)),
    "norms": (
        lambda x, w: U.layer_norm(U.rms_norm(x, (6,), w), (6,), w),
        lambda n: (normal(2, n, 6), torch.ones(6)),
    ),
    "attention": (both_kinds(U.scaled_dot_product_attention), qkv),
    "square-root attention": (both_kinds(U.sqrt_softmax_attention), qkv),
    "cross entropy": (U.cross_entropy, lambda n: (normal(n, 6), torch.arange(n) % 6)),
    "mse_loss": (U.mse_loss, lambda n: (normal(n, 3), normal(n, 3))),
    "add": (U.add, lambda n: (normal(2, n, 6), normal(n, 6))),
    "residual": (lambda x: U.residual_apply(torch.tanh, x, 0.5), lambda n: (normal(n, 6),)),
    "interpolation and causal attention": (factors_of_a_size, lambda n: (torch.ones(n, 3),)),
    "rotary": (rotary, lambda n: (normal(2, n, 8),)),
}


@pytest.mark.parametrize(
    "names", [["linear", "attention"], pytest.param([*FUNCTIONS], marks=pytest.mark.slow)]
)
def test_all_lengths_share_a_graph(names):
    functions = [FUNCTIONS[name] for name in names]
    calls = [[inputs(n) for _, inputs in functions] for n in LENGTHS]
    sizes = [len(inputs) for inputs in calls[0]]

    def every(*flat):
        given = iter(flat)
        groups = [[next(given) for _ in range(size)] for size in sizes]
        return [f(*group) for (f, _), group in zip(functions, groups, strict=True)]

    assert (
        graphs_compiled(every, [tuple(x for group in call for x in group) for call in calls]) == 1
    )


@pytest.mark.slow
def test_inductor_generates_code_for_a_factor_of_a_size():
    def scaled(x):
        return scale_fwd(scale_bwd(x, 1 / x.shape[0] ** 0.5), 2 / x.shape[0])

    assert graphs_compiled(scaled, [(normal(n, 3),) for n in LENGTHS], "inductor") == 1
