"""`float8.unit_scaling.functional.norms`: gradients of the weights of norms and embeddings."""

import pytest
import torch
from scale_assertions import assert_unit_scaled, gradients, normal
from torch.nn import functional as F

from float8.unit_scaling import functional as U

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "shape"), [((600,), (200,)), ((3, 71), (5, 60)), ((), (9000,))])
@pytest.mark.parametrize("scale", [1.0, 1 / 16])
def test_layer_norm_has_unit_scale(batch, shape, dtype, scale):
    x, w, b = normal(*batch, *shape, dtype=dtype), torch.ones(shape), torch.zeros(shape)
    y, gx, gw, gb = gradients(
        lambda x, w, b: U.layer_norm(x, shape, w, b), x * scale, w.to(dtype), b.to(dtype)
    )
    assert_unit_scaled(y)
    # a norm undoes the scale of its input, and its gradient with it; two directions of n have none
    assert_unit_scaled(gx, 1 / scale, band=1 / w.numel())
    assert_unit_scaled(gw)
    assert_unit_scaled(gb)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "shape"), [((600,), (200,)), ((3, 71), (5, 60))])
def test_rms_norm_has_unit_scale(batch, shape, dtype):
    x, w = normal(*batch, *shape, dtype=dtype), torch.ones(shape, dtype=dtype)
    y, gx, gw = gradients(lambda x, w: U.rms_norm(x, shape, w), x, w)
    assert_unit_scaled(y)
    assert_unit_scaled(gx, band=1 / w.numel())
    assert_unit_scaled(gw)


def test_norms_without_weights_are_torchs():
    x = normal(4, 7)
    torch.testing.assert_close(U.layer_norm(x, (7,)), F.layer_norm(x, (7,)))
    torch.testing.assert_close(U.layer_norm(x, [7], eps=0.1), F.layer_norm(x, (7,), eps=0.1))
    torch.testing.assert_close(U.rms_norm(x, (7,), eps=None), F.rms_norm(x, (7,)))
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(U.rms_norm(x, [7]), expected.float())


def test_norms_take_no_rows():
    for norm in (U.layer_norm, U.rms_norm):
        y, _, gw = gradients(lambda x, w, f=norm: f(x, (3,), w), normal(0, 3), torch.ones(3))
        assert y.shape == (0, 3) and not gw.any()


@pytest.mark.parametrize(("tokens", "rows"), [((40, 50), 37), ((100,), 2000), ((3, 4, 600), 11)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_embedding_has_unit_scale(tokens, rows, dtype):
    torch.manual_seed(0)
    indices = torch.randint(rows, tokens)
    weight = normal(rows, 64, dtype=dtype)
    y, gw = gradients(lambda w: U.embedding(indices, w), weight)
    assert torch.equal(y, weight[indices])
    # rows are chosen a random number of times: few rows, or few tokens, are few samples
    assert_unit_scaled(gw, samples=min(rows, indices.numel()) * 64, band=0.03)


def test_an_embedding_takes_torchs_arguments():
    weight, indices = normal(5, 3), torch.tensor([0, 1, 1, 4])
    _, gw = gradients(lambda w: U.embedding(indices, w, padding_idx=1), weight)
    _, plain = gradients(lambda w: F.embedding(indices, w, padding_idx=1), weight)
    torch.testing.assert_close(gw, plain * (5 / 4) ** 0.5)
    assert not gw[1].any()
    _, sparse = gradients(lambda w: U.embedding(input=indices, weight=w, sparse=True), weight)
    _, dense = gradients(lambda w: U.embedding(indices, w), weight)
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert U.embedding(indices[:0], weight).shape == (0, 3)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_an_embedding_shrinks_the_long_rows_that_it_reads_and_trains_them(norm_type):
    weight, indices = normal(5, 3), torch.tensor([[0, 1], [1, 4]]).t()  # not contiguous
    results = []
    for embedding in (U.embedding, F.embedding):
        table = weight.clone().requires_grad_()
        y = embedding(indices, table, padding_idx=4, max_norm=0.5, norm_type=norm_type)
        (grad,) = torch.autograd.grad(y.sum(), table)
        results.append((y, table, grad))
    (y, table, grad), (plain_y, plain_table, plain_grad) = results
    torch.testing.assert_close((y, table), (plain_y, plain_table))
    torch.testing.assert_close(grad, plain_grad * (5 / 4) ** 0.5)
    assert torch.equal(table[2:4], weight[2:4]), "rows that are not read stay"
    assert not torch.equal(table[:2], weight[:2]), "these rows are too short for the test"
