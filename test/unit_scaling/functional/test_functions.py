"""Every function is torch's, times one factor for each result, and its results have unit scale.

A row of `ROWS` is a call, torch's call of the same inputs, and the scale that the docstring claims
for the output and for the gradient of each input: 1 unless a constraint ties factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from scale_assertions import assert_unit_scaled, gradients, independent, normal
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling.core.functional import rms
from float8.unit_scaling.functional import products

CONSTRAINTS = {
    None: lambda a: a,
    "gmean": lambda a: (math.prod(a) ** (1 / len(a)),) * len(a),
    "hmean": lambda a: (len(a) / sum(1 / x for x in a),) * len(a),
    "amean": lambda a: (sum(a) / len(a),) * len(a),
    "to_output_scale": lambda a: (a[0],) * len(a),
    "to_grad_input_scale": lambda a: (a[1],) * len(a),
    "to_left_grad_scale": lambda a: (a[1],) * len(a),
    "to_right_grad_scale": lambda a: (a[2],) * len(a),
}


class Row(NamedTuple):
    """``scales``: of the output and of gradients; None claims nothing, and so does what is missing.

    ``inputs``: shapes of normal numbers, or tensors.
    """

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    scales: tuple[float | None, ...] = (1.0,) * 4
    band: float = 0.0
    samples: int | None = None

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        made = enumerate(self.inputs)
        made = (x if isinstance(x, Tensor) else normal(*x, seed=2 * i) for i, x in made)
        return [x.to(dtype) for x in made]


def tied(constraint, ideal):
    """The scales that results have if their factors were ``ideal`` before the constraint."""
    return tuple(a / b for a, b in zip(CONSTRAINTS[constraint](ideal), ideal, strict=True))


def linear(constraint, batch, k, n):
    return Row(
        lambda *a: U.linear(*a, constraint=constraint),
        F.linear,
        ((*batch, k), (n, k), torch.zeros(n)),
        (*tied(constraint, (k**-0.5, n**-0.5)), 1.0, 1.0),
    )


def conv1d(constraint=None, batch=(12,), **options):
    x, w = (*batch, 24, 47), (32, 24 // options.get("groups", 1), 5)
    ones = [torch.ones(shape).requires_grad_() for shape in (x, w)]
    counts = F.conv1d(*ones, **options)  # of the terms of each output; its gradients, of theirs
    grads = torch.autograd.grad(counts, ones, torch.ones_like(counts))
    kept = math.sqrt(float(counts.detach().mean()) / (w[1] * w[2]))  # the share that is not padding
    y, gx = tied(constraint, ((w[1] * w[2]) ** -0.5, float(grads[0].mean()) ** -0.5))
    return Row(
        lambda *a: U.conv1d(*a, **options, constraint=constraint),
        lambda *a: F.conv1d(*a, **options),
        (x, w, torch.zeros(32)),
        (kept * y, gx, 1.0, 1.0),
    )


def matmul(left, right, constraint=None, ideal=(1.0, 1.0, 1.0)):
    scales = tied(constraint, ideal)
    return Row(lambda a, b: U.matmul(a, b, constraint), torch.matmul, (left, right), scales)


def add(left, right, alpha=1):
    return Row(
        lambda a, b: U.add(a, b, None, alpha),
        lambda a, b: torch.add(a, b, alpha=alpha),
        (left, right),
        # broadcast terms: as many independent numbers as the smaller has
        samples=min(math.prod(left), math.prod(right)),
    )


def tied_sum(constraint):
    ideal = 0.5**0.5, 1.0, 160**-0.5  # the right gradient sums over 160 copies
    scales = tied(constraint, ideal)
    return Row(lambda a, b: U.add(a, b, constraint), torch.add, ((160, 500), (500,)), scales)


def attention(length, mult, is_causal, band, keys=None, groups=1):
    heads = max(4096 // length, 40)
    q, k = (heads, groups, length, 64), (heads, 1, keys or length, 64)
    options = {"is_causal": is_causal, "enable_gqa": groups > 1}
    values = (length * groups / (keys or length)) ** 0.5
    return Row(
        lambda *a: U.scaled_dot_product_attention(*a, mult=mult, **options),
        lambda *a: F.scaled_dot_product_attention(*a, scale=mult / 64, **options),
        (q, k, k),
        (1.0, None, None, values),
        band,
        heads * 64,  # flat attention: as many independent outputs as sequences, times the depth
    )


def softmax(mult, dim):
    shape = [60, 70, 50]
    shape[dim] = 256
    return Row(
        lambda x: U.softmax(x, dim, constraint=None, mult=mult),
        lambda x: torch.softmax(x * mult, dim),
        (shape,),
        band=0.05 if mult <= 1 / 4 else 0.3,
    )


def silu_glu(mult):
    return Row(
        lambda x, g: U.silu_glu(x, g, mult),
        lambda x, g: x * F.silu(g * mult),
        ((60000,), (60000,)),
        band=0.04,
    )


def norm(ours, torchs, batch, shape, scale=1.0, bias=True):
    # a norm undoes the scale of its input, and its gradient with it; two directions of n have none
    return Row(
        lambda x, *w: ours(x, shape, *w),
        lambda x, *w: torchs(x, shape, *w),
        (normal(*batch, *shape) * scale, torch.ones(shape), *[torch.zeros(shape)] * bias),
        (1.0, 1 / scale, 1.0, 1.0),
        band=1 / math.prod(shape),
    )


def rms_norm(x, shape, weight):
    return F.rms_norm(x, shape, weight, 1e-5)


def embedding(tokens, rows):
    indices = torch.randint(rows, tokens, generator=torch.Generator().manual_seed(0))
    # rows are chosen a random number of times: few rows, or few tokens, are few samples
    samples = min(rows, indices.numel()) * 64
    call = [lambda w, f=f: f(indices, w) for f in (U.embedding, F.embedding)]
    return Row(*call, ((rows, 64),), band=0.03, samples=samples)


MATMULS = [
    ((130, 70), (70, 310)),
    ((3, 4, 50, 60), (3, 4, 60, 70)),
    ((90, 50), (7, 50, 60)),  # broadcast: the left gradient sums over 7 copies
    ((5, 1, 40, 50), (6, 50, 30)),
    ((2000, 70), (70,)),
    ((70,), (70, 2000)),
]
CONVOLUTIONS = [
    {"stride": 3},
    {"dilation": 4},
    {"padding": "same", "dilation": 3},
    {"padding": "valid", "batch": ()},
    {"padding": 9, "stride": 2, "dilation": 2},
    {"groups": 4, "stride": (2,), "padding": (3,), "dilation": (1,), "batch": ()},
]
ATTENTIONS = [
    (1, 1, False, 0.0),
    (1, 1, True, 0.0),
    (3, 1, True, 0.30),
    (16, 0.25, True, 0.12),
    (64, 4, True, 0.12),
    (64, 4, False, 0.05),
    (64, 16, False, 0.16),
    (16, 1, True, 0.12, 256),  # more keys than queries
    (256, 1, True, 0.12, 16),
    (6, 1, False, 0.05, None, 3),  # heads that share keys and values
]
ROWS = {
    **{f"linear {c}": linear(c, (3, 41), 129, 77) for c in list(CONSTRAINTS)[:6]},
    "linear, wide": linear(None, (2, 3, 33), 300, 50),
    "readout": Row(U.linear_readout, F.linear, ((50, 6, 400), (90, 400)), (1 / 20, 1.0, 1.0)),
    **{f"matmul {shapes}": matmul(*shapes) for shapes in MATMULS},
    **{
        f"matmul {c}": matmul((90, 400), (400, 1500), c, (400**-0.5, 1500**-0.5, 90**-0.5))
        for c in ("to_output_scale", "to_left_grad_scale", "to_right_grad_scale", "gmean")
    },
    **{f"conv1d {o}": conv1d(**o) for o in CONVOLUTIONS},
    **{f"conv1d {c}": conv1d(c) for c in ("to_output_scale", "to_grad_input_scale", "gmean")},
    "add": add((70, 90), (70, 90), -3),
    "add, broadcast": add((60, 1, 50), (40, 50), 0.25),
    **{f"add {c}": tied_sum(c) for c in ("to_output_scale", "to_right_grad_scale", "gmean")},
    "add, both broadcast": add((1, 999), (999, 1)),
    **{f"attention {row}": attention(*row) for row in ATTENTIONS},
    **{f"softmax {m} {d}": softmax(m, d) for m, d in ((1 / 8, 0), (1 / 4, 1), (1, -1), (4, 0))},
    **{f"silu_glu {mult}": silu_glu(mult) for mult in (1 / 16, 0.5, 1, 4)},
    "layer_norm": norm(U.layer_norm, F.layer_norm, (600,), (200,)),
    "layer_norm, small": norm(U.layer_norm, F.layer_norm, (3, 71), (5, 60), 1 / 16),
    "layer_norm, one row": norm(U.layer_norm, F.layer_norm, (), (9000,)),
    "rms_norm": norm(U.rms_norm, rms_norm, (3, 71), (5, 60), bias=False),
    "embedding": embedding((40, 50), 37),
    "embedding, many rows": embedding((100,), 2000),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_result_is_torchs_times_one_factor(name):
    row = ROWS[name]
    inputs = row.tensors(torch.float64)
    for found, plain in zip(
        gradients(row.ours, *inputs), gradients(row.torchs, *inputs), strict=True
    ):
        factor = found.norm() / plain.norm()
        torch.testing.assert_close(found, plain * factor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_each_result_has_the_scale_that_is_documented(name, dtype):
    row = ROWS[name]
    inputs = row.tensors(dtype)
    results = gradients(row.ours, *inputs)
    # of what is random; the incoming gradient has the output's shape
    random = [x for x in (*inputs, results[0]) if x.numel() == 1 or float(x.std()) > 0]
    samples = row.samples or independent(*random)
    for number, result in enumerate(results):
        assert result.dtype == dtype
        if (scale := row.scales[number]) is not None:
            what = f"result {number}"
            assert_unit_scaled(result, scale, row.band, samples=samples, replay=name, what=what)


def test_an_exponent_for_each_count_and_a_factor_for_each_product():
    x, w, b = (normal(*s, seed=i).double() for i, s in enumerate([(6, 4, 9), (16, 9), (16,)]))
    cases = [
        (lambda *a: U.linear(*a, None, (1.0, 0.0, 2.0)), F.linear, (1 / 9, 1, 24**-2, 24**-2)),
        (lambda *a: products.scaled_linear(*a, (2.0, 3.0, 5.0)), F.linear, (2, 3, 5, 5)),
        (lambda x, w, b: U.matmul(x, w.t(), lambda *_: (2.0, 3.0, 5.0)) + 0 * b,
         lambda x, w, b: x @ w.t() + 0 * b, (2, 3, 5, 0)),
        (lambda x, w, b: U.conv1d(x.mT, w[..., None], b, 1, 0, 1, 1, None, (1.0, 0.0, 2.0)),
         lambda x, w, b: F.conv1d(x.mT, w[..., None], b), (1 / 9, 1, 24**-2, 24**-2)),
        # one input position of four is read: its gradient has a quarter of a term on average
        (lambda x, w, b: U.conv1d(x.mT, w[:1, :, None], b[:1], 4, constraint=None),
         lambda x, w, b: F.conv1d(x.mT, w[:1, :, None], b[:1], 4), (1 / 3, 1, 6**-0.5, 6**-0.5)),
    ]  # fmt: skip
    for ours, torchs, factors in cases:
        found, plain = gradients(ours, x, w, b), gradients(torchs, x, w, b)
        torch.testing.assert_close(found, tuple(g * f for g, f in zip(plain, factors, strict=True)))


EMPTY = {
    "linear": (U.linear, [(2, 0, 7), (5, 7)], (2, 0, 5)),
    "linear of one row": (U.linear, [(7,), (5, 7)], (5,)),
    "matmul": (U.matmul, [(0, 4), (4, 3)], (0, 3)),
    "matmul of no terms": (U.matmul, [(3, 0), (0, 4)], (3, 4)),
    "dot product": (U.matmul, [(5,), (5,)], ()),
    "conv1d": (U.conv1d, [(0, 4, 9), (6, 4, 3)], (0, 6, 7)),
    "layer_norm": (lambda x, w: U.layer_norm(x, (3,), w), [(0, 3), (3,)], (0, 3)),
    "rms_norm": (lambda x, w: U.rms_norm(x, (3,), w), [(0, 3), (3,)], (0, 3)),
    "embedding": (lambda w: U.embedding(torch.tensor([], dtype=torch.long), w), [(5, 3)], (0, 3)),
    "add": (U.add, [(0, 3), (3,)], (0, 3)),
    "softmax": (lambda x: U.softmax(x, 0), [(0, 4)], (0, 4)),
    "attention": (U.scaled_dot_product_attention, [(2, 4, 8), (2, 0, 8), (2, 0, 3)], (2, 4, 3)),
    "root attention": (U.sqrt_softmax_attention, [(2, 4, 8), (2, 0, 8), (2, 0, 3)], (2, 4, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_rows_and_one_row_are_taken(name):
    call, shapes, shape = EMPTY[name]
    y, *grads = gradients(call, *(normal(*s) for s in shapes))
    assert y.shape == shape
    assert [g.shape for g in grads] == [torch.Size(s) for s in shapes]
    assert all(g.isfinite().all() for g in (y, *grads))


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_an_embedding_takes_torchs_options(norm_type):
    weight, indices = normal(5, 3), torch.tensor([[0, 1], [1, 4]]).t()  # not contiguous
    results = []
    for function in (U.embedding, F.embedding):
        table = weight.clone().requires_grad_()
        y = function(indices, table, padding_idx=4, max_norm=0.5, norm_type=norm_type)
        (grad,) = torch.autograd.grad(y.sum(), table)
        results.append((y, table, grad))
    (y, table, grad), (plain_y, plain_table, plain_grad) = results
    torch.testing.assert_close((y, table), (plain_y, plain_table))
    torch.testing.assert_close(grad, plain_grad * (5 / 4) ** 0.5)
    assert torch.equal(table[2:4], weight[2:4]), "rows that are not read stay"
    assert not torch.equal(table[:2], weight[:2]), "these rows are too short for the test"
    _, sparse = gradients(lambda w: U.embedding(input=indices, weight=w, sparse=True), weight)
    assert sparse.is_sparse
    _, dense = gradients(lambda w: U.embedding(indices, w), weight)
    torch.testing.assert_close(sparse.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rms_is_the_root_of_the_mean_square(dtype):
    x = normal(3, 4, 5, dtype=dtype)
    expected = (x.double().square().mean((0, 2), keepdim=True) + 0.5).sqrt().to(dtype)
    torch.testing.assert_close(rms(x, (0, 2), keepdim=True, eps=0.5), expected)
