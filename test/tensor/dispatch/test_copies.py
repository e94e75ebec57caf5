"""Copies, moves, casts and creation: what is shared, what is new, and what is refused.

That every one of them keeps values and metadata is tested in ``test_dispatch.py``.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from shapes import Case

from float8 import (
    E4M3,
    E5M2,
    Blockwise,
    Float8Tensor,
    Rowwise,
    ScaleFormat,
    Tensorwise,
    kernels,
)

quantize = Float8Tensor.from_high_precision
KINDS = pytest.mark.parametrize(
    "granularity", [Tensorwise(), Rowwise(), Blockwise(1, 8), Blockwise(4, 5)], ids=str
)


def example(granularity=None, seed=1, fmt=E5M2, shape=(6, 24)) -> Float8Tensor:
    x = Case(shape, torch.bfloat16, fill="wide", seed=seed).make()
    return quantize(x, fmt, granularity)


@KINDS
@pytest.mark.parametrize(
    "copied",
    [lambda q: q.clone(), lambda q: q.to(torch.bfloat16, copy=True), lambda q: q.t().contiguous()],
)
def test_a_copy_shares_nothing(granularity, copied):
    q = example(granularity)
    twin = copied(q)
    before = twin.dequantize()
    q.float8_data.view(torch.uint8).zero_()
    q.scale.fill_(7.0)
    assert_bitwise(twin.dequantize(), before)


@KINDS
def test_zeros_are_zeros_under_scales_of_one_of_their_own(granularity):
    q = example(granularity)
    before = q.dequantize()
    for zeros in (torch.zeros_like(q), q.new_zeros(7, 9), q.new_zeros(0, 9)):
        assert zeros.dequantize().count_nonzero() == 0
        assert (zeros.scale == 1).all()
        zeros.scale.fill_(9.0)
    assert_bitwise(q.dequantize(), before)


DELTA = torch.ones(6, 24)
REFUSED = [
    *(
        (run, "one of .*, not torch.float64")
        for run in (
            lambda q: q.to(torch.float64),
            lambda q: torch.zeros_like(q, dtype=torch.float64),
            lambda q: q.new_zeros(3, 3, dtype=torch.float64),
            lambda q: q.copy_(DELTA.double()),
        )
    ),
    (lambda q: q.new_zeros(5, 7, 2), "one extent per"),
    (lambda q: q.copy_(DELTA[:5]), "expanded size"),
]


@pytest.mark.parametrize(("run", "words"), REFUSED)
def test_what_it_cannot_be_or_hold_is_refused(run, words):
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError), match=words):
        run(example())


# --- copy_


@KINDS
def test_copy_casts_with_new_scales_copies_bytes_or_dequantises(granularity):
    destination, x = example(granularity), Case((6, 24), torch.bfloat16, exponent=9, seed=2).make()
    assert destination.copy_(x) is destination
    assert_same_float8(destination, quantize(x, E5M2, granularity))
    destination.copy_(x[0].float())  # broadcasts and converts
    row = quantize(x[0].float().expand(6, 24), E5M2, granularity).to(torch.bfloat16)
    assert_same_float8(destination, row)
    source = example(granularity, seed=2)
    destination.copy_(source)
    assert_same_float8(destination, source)
    source.scale.mul_(2)
    assert not torch.equal(destination.scale, source.scale)
    assert_bitwise(torch.empty(6, 24).copy_(source), source.dequantize().float())


@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_scales_are_computed_in_their_format_copied_and_pickled(scale_format):
    mx = {"granularity": Blockwise(1, 8), "scale_format": scale_format}
    x, other = (Case((6, 24), exponent=e, fill="wide", seed=2).make() for e in (9, -9))
    q, expected = quantize(x, E5M2, **mx), quantize(other, E5M2, **mx)
    assert_same_float8(copy.deepcopy(q).copy_(other), expected)
    assert_same_float8(copy.deepcopy(q).copy_(expected), expected)
    assert_same_float8(pickle.loads(pickle.dumps(q)), q)
    part = q.clone()
    part[2:4].copy_(other[2:4])  # under the scales that are there
    assert_bitwise(part.scale, q.scale)
    under = kernels.cast_by_scale(other, q.scale, (1, 8), E5M2.dtype)
    assert_bitwise(part.float8_data[2:4], under[2:4])
    assert_same_float8(torch.zeros_like(q.t()).copy_(other.t()), expected.t())
    one = quantize(x, E5M2, scale_format=scale_format)
    tripled = one.dequantize() * 3
    if scale_format is not ScaleFormat.FLOAT32:  # of which the scale alone changes
        assert_same_float8(one.mul_(3), quantize(tripled, E5M2, scale_format=scale_format))


@pytest.mark.parametrize(
    "source",
    [example(Rowwise()), example(Tensorwise(), fmt=E4M3), example(Blockwise(1, 8))],
    ids=["rowwise", "format", "1x8"],
)
def test_a_copy_of_another_kind_is_cast(source):
    destination = example(Tensorwise())
    destination.copy_(source)
    assert_same_float8(destination, example(Tensorwise()).copy_(source.dequantize()))


# --- equal


def test_equal_compares_values():
    q = example()
    assert torch.equal(q, q.clone()) and not q.is_pinned()
    assert torch.equal(q, q.view(2, 3, 24).view(6, 24))
    assert not torch.equal(q, example(seed=2))
    assert not torch.equal(q, q[:3])
    doubled = q._replace(scale=q.scale * 2)
    assert not torch.equal(q, doubled)
    assert torch.equal(q, q.dequantize()) and not torch.equal(q.dequantize(), doubled)
    assert q.is_same_size(torch.empty(6, 24)) and torch.empty(6, 24).is_same_size(q)
    assert not q.is_same_size(q[:5])
