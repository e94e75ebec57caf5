"""Parameters kept in float8: the float16 master is the truth, the codes follow it."""

import copy

import pytest
import torch
from assertions import assert_bitwise, sqnr
from torch import nn

from float8 import E4M3, E5M2, Float8Tensor
from float8.kernels import amax, cast, scale_from_amax
from float8.optim import SGD, AdamW


def parameter(x, fmt=E4M3):
    return nn.Parameter(Float8Tensor.from_high_precision(x, fmt))


def follows(p, master):
    """Whether the codes and the scale are those of the master's values, cast anew."""
    values = master.dequantize()
    scale = scale_from_amax(amax(values, (-1, -1)), 448.0)
    data, mine = p.data_and_scale
    assert_bitwise(mine.reshape(1, 1), scale)
    assert_bitwise(data, cast(values, scale, (-1, -1), data.dtype))


@pytest.mark.parametrize("lr", [1e-3, 1e-4])
def test_small_updates_add_up_in_the_master(lr):
    """A hundred steps of a tenth of a code's distance each, or of a tenth of a float16's."""
    value = torch.rand(64, 96) + 1
    p, q = parameter(value), nn.Parameter(value.clone())
    kept = {"first_moment": "float32", "second_moment": "float32"}  # so that all noise is its own
    ours, exact = AdamW([p], lr=lr, **kept), torch.optim.AdamW([q], lr=lr)
    ours.start_master(p, value)
    where = p.data_and_scale[0].data_ptr()
    for _ in range(100):
        g = torch.randn(64, 96) * 0.1 + 1
        p.grad, q.grad = g, g.clone()
        ours.step()
        exact.step()
        follows(p, ours.state[p]["master"])
    assert p.data_and_scale[0].data_ptr() == where, "the model and its wrappers hold this memory"
    assert sqnr(ours.state[p]["master"].dequantize(), q) > 50
    moved = q.detach() - value
    master = ours.state[p]["master"].dequantize()
    assert float((master - value).mean()) == pytest.approx(float(moved.mean()), rel=0.02)
    assert float((p.detach().dequantize() - value).mean()) == pytest.approx(-100 * lr, rel=0.3)


def test_a_master_that_is_not_updated_is_seen():
    """The claim above fails where an update goes to the codes alone: it is below half a code."""
    value = torch.rand(64, 96) + 1
    p = parameter(value)
    optimizer = AdamW([p], lr=1e-3)
    optimizer.start_master(p, value)
    stale = copy.deepcopy(optimizer.state[p]["master"])
    for _ in range(100):
        p.grad = torch.ones(64, 96)
        optimizer.step()
        optimizer.state[p]["master"].copy_(stale)
    assert abs(float((p.detach().dequantize() - value).mean())) < 0.02


def test_the_first_value_counts_or_else_what_the_codes_hold():
    value = torch.randn(40, 130)
    p = parameter(value)
    optimizer = AdamW([p], lr=0.0, weight_decay=0.0)
    p.grad = torch.zeros(40, 130)
    optimizer.step()
    assert sqnr(optimizer.state[p]["master"].dequantize(), p.dequantize()) > 65
    optimizer.start_master(p, value)
    assert sqnr(optimizer.state[p]["master"].dequantize(), value) > 65
    follows(p, optimizer.state[p]["master"])


def test_float8_gradients_are_decoded():
    """With one scale tile by tile, otherwise at once; for plain parameters too."""
    value, g = torch.randn(40, 130), torch.randn(40, 130)
    coded = Float8Tensor.from_high_precision(g, E5M2)
    results = []
    for grad in (coded, coded.dequantize()):
        p, q = parameter(value), nn.Parameter(value.clone())
        optimizer = SGD([p, q], lr=0.1, min_size=0)
        p.grad, q.grad = grad, grad
        optimizer.step()
        results.append((p.dequantize(), q.detach().clone()))
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise(mine, theirs)


@pytest.mark.parametrize("shape", [(0, 8), (), (5,), (3, 4, 5)])
def test_weird_shapes(shape):
    p = parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    before = p.dequantize()
    AdamW([p], lr=0.1).step()
    assert p.shape == before.shape
    assert bool((p.dequantize() != before).all())


def test_transposed_codes_are_written_too():
    value = torch.randn(64, 48)
    plain = Float8Tensor.from_high_precision(value, E4M3)
    p = nn.Parameter(plain.t())
    assert not p.data_and_scale[0].is_contiguous()
    optimizer = AdamW([p], lr=0.5)
    optimizer.start_master(p, value.t())
    p.grad = torch.ones(48, 64)
    optimizer.step()
    follows(p, optimizer.state[p]["master"])
    assert bool((p.dequantize() != value.t()).all())


def test_one_nan_is_one_weight():
    p = parameter(torch.randn(16, 64))
    optimizer = AdamW([p], lr=0.01)
    p.grad = torch.randn(16, 64)
    p.grad[2, 3] = float("nan")
    optimizer.step()
    bad = p.dequantize().isnan()
    assert bool(bad[2, 3])
    assert int(bad.sum()) == 1


def test_what_has_no_master_cannot_start_one():
    p, q = parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    optimizer = AdamW([p, q])
    with pytest.raises(TypeError, match="only a Float8Tensor parameter has a master"):
        optimizer.start_master(q, q)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) cannot start .* shape \(2, 2\)"):
        optimizer.start_master(p, torch.ones(2, 2))
    with pytest.raises(ValueError, match="not in this optimizer"):
        optimizer.start_master(parameter(torch.randn(8, 8)), torch.ones(8, 8))


def test_codes_of_the_transpose_are_refused():
    data, scale = Float8Tensor.from_high_precision(torch.randn(8, 16), E4M3).data_and_scale
    both = Float8Tensor(data, scale, (-1, -1), torch.float32, data.t().contiguous())
    with pytest.raises(TypeError, match="leave stale"):
        AdamW([both])
