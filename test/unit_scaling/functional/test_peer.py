"""Beside the package unit-scaling: the same numbers where both follow the papers.

Skipped unless ``unit_scaling`` can be imported. Its names and signatures are ours, so users move
by changing an import; what else would change for them is the table `DIFFERENCES`, whose every row
is a test: should the other package come to agree, the row goes.
"""

import inspect
import math
import warnings

import pytest
import torch
from unit_scaling_claims import gradients

from float8.unit_scaling import functional as U

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # this folder answers to the name unit_scaling too, but has no core.functional
    peer_rules = pytest.importorskip("unit_scaling.core.functional")
    peer = pytest.importorskip("unit_scaling.functional")


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


ACTIVATION = [normal(7, 33)]
LINEAR = [normal(2, 5, 6), normal(9, 6, seed=1), normal(9, seed=2)]
QKV = [normal(2, 3, 17, 8, seed=i) for i in range(3)]
LOGITS = [normal(5, 7)]
TARGET = torch.tensor([0, 3, 6, 2, 2])

# name -> cases of (inputs that get gradients, call of either package's function)
SAME = {
    "gelu": [
        (ACTIVATION, lambda f, x, m=m, c=c, a=a: f(x, m, c, approximate=a))
        for m in (0.25, 1, 4)
        for c in (None, "gmean", "to_grad_input_scale")
        for a in ("none", "tanh")
    ],
    "silu": [
        (ACTIVATION, lambda f, x, m=m, c=c: f(x, m, c))
        for m in (0.25, 1, 4)
        for c in (None, "hmean", "to_output_scale")
    ],
    "silu_glu": [
        ([normal(7, 33), normal(7, 33, seed=1)], lambda f, x, g, m=m: f(x, g, m))
        for m in (0.5, 1, 3)
    ],
    "softmax": [
        (ACTIVATION, lambda f, x, m=m, d=d, c=c: f(x, d, constraint=c, mult=m))
        for m in (0.25, 1, 4)
        for d in (0, -1)
        for c in (None, "amean")
    ],
    "linear": [
        (LINEAR, lambda f, x, w, b, c=c: f(x, w, b, c, (0.5, 1.0, 0.25)))
        for c in (None, "gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale")
    ],
    "linear_readout": [(LINEAR, lambda f, x, w, b: f(x, w, b))],
    "matmul": [
        ([normal(3, 5, 6), normal(3, 6, 9, seed=1)], lambda f, a, b, c=c: f(a, b, c))
        for c in (None, "gmean", "to_left_grad_scale", "to_right_grad_scale")
    ],
    "conv1d": [
        ([normal(2, 6, 11), normal(8, 3, 1, seed=1), normal(8)], lambda f, *a: f(*a, groups=2))
    ],
    "layer_norm": [
        ([normal(5, 3, 8), normal(8, seed=1), normal(8, seed=2)],
         lambda f, x, w, b: f(x, (8,), w, b)),
        ([normal(5, 3, 8)], lambda f, x: f(x, (3, 8), eps=0.1)),
    ],
    "rms_norm": [
        ([normal(5, 3, 8), normal(8, seed=1)], lambda f, x, w: f(x, (8,), w)),
        ([normal(5, 3, 8)], lambda f, x: f(x, (3, 8), eps=0.1)),
    ],
    "add": [
        ([normal(5, 1, 8), normal(4, 8, seed=1)], lambda f, a, b, c=c: f(a, b, c))
        for c in (None, "gmean", "to_output_scale", "to_left_grad_scale")
    ]
    + [
        ([normal(4, 8), normal(1, seed=1)], lambda f, a, b: f(a, b)),
        (ACTIVATION, lambda f, x: f(x, 2.5)),
    ],
    "residual_apply": [
        (ACTIVATION, lambda f, x, t=t: f(torch.tanh, x, tau=t)) for t in (0.0, 0.3, 2)
    ],
    "embedding": [
        ([normal(9, 4)], lambda f, w: f(torch.tensor([[0, 3, 3], [8, 1, 3]]), w, padding_idx=1))
    ],
    "scaled_dot_product_attention": [
        (QKV, lambda f, *a, m=m, c=c: f(*a, is_causal=c, mult=m))
        for m in (0.5, 1, 4)
        for c in (False, True)
    ],
    "cross_entropy": [
        (LOGITS, lambda f, x, m=m, r=r: f(x, TARGET, mult=m, reduction=r))
        for m in (1, 2.5)
        for r in ("mean", "sum")
    ],
    "mse_loss": [
        ([normal(4, 5), normal(4, 5, seed=1)], lambda f, x, t, r=r: f(x, t, reduction=r))
        for r in ("mean", "sum")
    ],
}  # fmt: skip
SAME_CASES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name, cases in SAME.items()
    for i in range(len(cases))
]


@pytest.mark.parametrize(("name", "index"), SAME_CASES)
def test_the_numbers_are_the_same(name, index):
    inputs, call = SAME[name][index]
    found = gradients(lambda *a: call(getattr(U, name), *a), *inputs)
    theirs = gradients(lambda *a: call(getattr(peer, name), *a), *inputs)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=2e-6)


def test_dropout_in_training_is_the_same():
    results = []
    for dropout in (U.dropout, peer.dropout):
        torch.manual_seed(5)
        results.append(gradients(lambda x, f=dropout: f(x, 0.3), normal(9, 9)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", sorted(set(U.__all__) & set(dir(peer)) - {"torch_map"}))
def test_a_call_written_for_the_other_package_binds_to_ours(name):
    theirs = list(inspect.signature(getattr(peer, name)).parameters)
    assert list(inspect.signature(getattr(U, name)).parameters)[: len(theirs)] == theirs


def test_the_depth_rule_is_the_same():
    from float8.unit_scaling.rules import transformer_residual_scaling_rule

    for arguments in ((1.0, 1.0), (0.5, 2.0)):
        ours = transformer_residual_scaling_rule(*arguments)
        theirs = peer_rules.transformer_residual_scaling_rule(*arguments)
        for index in range(8):
            assert ours(index, 8) == pytest.approx(theirs(index, 8))


# --- what differs, and why


def grad_of(function, *inputs):
    return gradients(function, *inputs)[1:]


def bf16_gradient(m):
    x, w = normal(300, 8, dtype=torch.bfloat16), normal(8, 8, dtype=torch.bfloat16, seed=1)
    return grad_of(lambda x, w: m.linear(x, w, None), x, w)[1]


# reason -> what shows it, called with either package's functions
DIFFERENCES = {
    "a gradient's factor is not rounded to bfloat16": bf16_gradient,
    "dropout is the identity in evaluation": lambda m: m.dropout(normal(9), 0.5, False),
    "the mean of a cross entropy is over the tokens that count": lambda m: m.cross_entropy(
        LOGITS[0], TARGET.clone().index_fill_(0, torch.tensor([1]), -100)
    ),
    "a broadcast matmul's gradient sums over the copies": lambda m: grad_of(
        lambda a, b: m.matmul(a, b, constraint=None), normal(5, 6), normal(7, 6, 4, seed=1)
    )[0],
    "a convolution's input gradient counts the edges": lambda m: grad_of(
        lambda x, w: m.conv1d(x, w, constraint=None), normal(2, 3, 9), normal(4, 3, 5, seed=1)
    )[0],
    "causal attention of few queries to many keys sees few of them": lambda m: (
        m.scaled_dot_product_attention(QKV[0][..., :5, :], *QKV[1:], is_causal=True)
    ),
    "attention of two causal positions divides by sqrt(1/2), not by sqrt(log(2)/2)": lambda m: (
        m.scaled_dot_product_attention(*(x[..., :2, :] for x in QKV), is_causal=True)
    ),
}
# reason -> what one package refuses (or fails at) and ours computes
EXTENSIONS = {
    "cross entropy of (N, C, L)": lambda m: m.cross_entropy(
        normal(2, 7, 3), torch.zeros(2, 3, dtype=torch.long)
    ),
    "cross entropy without reduction": lambda m: m.cross_entropy(
        LOGITS[0], TARGET, reduction="none"
    ),
    "cross entropy with smoothing": lambda m: m.cross_entropy(
        LOGITS[0], TARGET, label_smoothing=0.1
    ),
    "cross entropy with class weights": lambda m: m.cross_entropy(
        LOGITS[0], TARGET, weight=torch.arange(1.0, 8)
    ),
    "cross entropy of no tokens": lambda m: m.cross_entropy(
        normal(0, 7), torch.zeros(0, dtype=torch.long)
    ),
    "a sum with alpha": lambda m: m.add(normal(3), normal(3, seed=1), alpha=2),
    "a linear layer of no rows": lambda m: m.linear(normal(0, 3), normal(4, 3), None),
    "a convolution with padding by name": lambda m: m.conv1d(
        normal(2, 3, 9), normal(4, 3, 3), padding="same"
    ),
    "a matmul with a vector": lambda m: m.matmul(normal(3), normal(3, 4)),
    "attention of one causal position": lambda m: m.scaled_dot_product_attention(
        *(x[..., :1, :] for x in QKV), is_causal=True
    ),
    "attention with grouped heads": lambda m: m.scaled_dot_product_attention(
        QKV[0], QKV[1][:, :1], QKV[2][:, :1], enable_gqa=True
    ),
    "a constraint that is a function": lambda m: m.gelu(normal(3), constraint=max),
}


@pytest.mark.parametrize("reason", DIFFERENCES)
def test_a_difference_is_one(reason):
    ours, theirs = DIFFERENCES[reason](U), DIFFERENCES[reason](peer)
    assert ours.shape == theirs.shape
    relative = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    assert relative > 1e-4, f"no difference any more: {reason}"
    assert math.isfinite(relative)


@pytest.mark.parametrize("reason", EXTENSIONS)
def test_what_the_other_package_cannot_do_is_done(reason):
    EXTENSIONS[reason](U)
    refusals = (AssertionError, ArithmeticError, IndexError, RuntimeError, TypeError, ValueError)
    with pytest.raises(refusals):
        EXTENSIONS[reason](peer)
