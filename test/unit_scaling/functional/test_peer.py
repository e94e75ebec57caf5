"""Functions of the package unit-scaling give the same numbers where both follow the papers.

Skipped unless ``unit_scaling`` can be imported. Where the two differ on purpose is in
docs/migrating/unit_scaling.md and ``test_differences.py``.
"""

import warnings

import pytest
import torch
from scale_assertions import gradients, normal

from float8.unit_scaling import functional as U

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # this directory can be imported as unit_scaling too, but has no core.functional
    peer_rules = pytest.importorskip("unit_scaling.core.functional")
    peer = pytest.importorskip("unit_scaling.functional")


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


def test_the_depth_rule_is_the_same():
    from float8.unit_scaling.core.functional import transformer_residual_scaling_rule

    for arguments in ((1.0, 1.0), (0.5, 2.0)):
        ours = transformer_residual_scaling_rule(*arguments)
        theirs = peer_rules.transformer_residual_scaling_rule(*arguments)
        for index in range(8):
            assert ours(index, 8) == pytest.approx(theirs(index, 8))
