"""Shape changes: they share memory, refuse what would split a block, and say which one.

That every one of them keeps values and metadata is tested in ``test_dispatch.py``.
"""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bitwise, assert_same_float8
from hypothesis import given
from hypothesis import strategies as st
from shapes import Case

from float8 import E4M3, Blockwise, Float8Tensor, Rowwise, Tensorwise

quantize = Float8Tensor.from_high_precision


def example(granularity, shape=(6, 24), seed=1, fmt=E4M3) -> Float8Tensor:
    return quantize(Case(shape, fill="wide", seed=seed).make(), fmt, granularity)


def test_a_view_shares_data_and_scale():
    q = example(Blockwise(1, 8))
    for view in (q.view(2, 3, 24), q.t(), q[2:4], q[:, :8], q[3], q.split(2)[1], q.detach()):
        before = view.dequantize()
        q.scale.mul_(2)
        assert_bitwise(view.dequantize(), before * 2)


def leading(block) -> Float8Tensor:
    scales = torch.ones(1 if block[0] == -1 else 3, 4, 5)
    return Float8Tensor(torch.randn(6, 4, 5).to(E4M3.dtype), scales, block, torch.float32)


REFUSED = [
    (Rowwise(), lambda q: q.view(-1), r"\(6, 24\).*\(1, -1\).*\(144,\).*dimensions 1 to 1"),
    (Blockwise(3, 4), lambda q: q.view(2, 3, 24), r"\(3, 4\).*\(2, 3, 24\).*dimensions 0 to 1"),
    (Blockwise(1, 8), lambda q: q[:, 4:], r"\[4:24:1\].*dim 1.*\(1, 8\).*multiples of 8"),
    (Blockwise(1, 8), lambda q: q[:, :4], r"\[0:4:1\].*multiples of 8"),
    (Blockwise(1, 8), lambda q: q[:, ::8], r"\[0:24:8\].*dequantize"),
    (Blockwise(3, 4), lambda q: q[2], r"\[2:3:1\].*dim 0.*\(3, 4\).*dequantize"),
    (Blockwise(3, 4), lambda q: q.split(2), r"\[0:2:1\].*dim 0.*dequantize"),
    (Rowwise(), lambda q: q.split([4, 4]), "sum"),  # of torch itself
    (Rowwise(), lambda q: q[6], "out of"),  # of torch itself
    *(
        (Rowwise(), lambda q, block=block, view=view: leading(block).view(view), "must stay")
        for block, view in (
            ((-1, 1, 1), (24, 5)),
            ((-1, 1, 1), (120,)),
            ((-1, 1, 1), (6, 20)),
            ((2, 1, 1), (3, 8, 5)),
        )
    ),
]


@pytest.mark.parametrize(("granularity", "run", "words"), REFUSED)
def test_a_refusal_says_what_the_block_forbids(granularity, run, words):
    with pytest.raises((ValueError, RuntimeError, IndexError), match=words):
        run(example(granularity))


@pytest.mark.parametrize("granularity", [Tensorwise(), Rowwise(), Blockwise(1, 8)], ids=str)
@given(
    start=st.integers(-8, 8),
    stop=st.integers(-8, 8) | st.none(),
    step=st.integers(1, 3),
)
def test_rows_are_sliced_as_python_slices(granularity, start, stop, step):
    q = example(granularity)
    actual = q[start:stop:step].dequantize()
    assert_bitwise(actual, q.dequantize()[start:stop:step], (granularity, start, stop, step))


@given(
    rows=st.lists(st.sampled_from([3, 6, 9]), min_size=1, max_size=4),
    last=st.integers(1, 7),
)
def test_blocks_of_rows_are_split_into_all_rows(rows, last):
    q = example(Blockwise(3, 5), (sum(rows) + last, 7))
    parts = q.split([*rows, last])
    assert [p.shape[0] for p in parts] == [*rows, last]
    assert_bitwise(torch.cat([p.dequantize() for p in parts]), q.dequantize(), (rows, last))


@pytest.mark.parametrize(
    ("shape", "block", "view"),
    [
        ((2, 3, 8, 5), (1, 1, 4, 5), (6, 8, 5)),
        ((6, 8, 5), (1, 4, 5), (2, 3, 8, 5)),
        ((6, 8, 5), (1, 4, 1), (1, 2, 3, 8, 5)),
        ((6, 4, 5), (1, 1, 1), (24, 5)),  # a scale for each element
        ((6, 20), (-1, 1), (1, 6, 20)),
        ((0, 4, 5), (1, -1, 1), (0, 2, 4, 5)),
    ],
)
def test_dimensions_before_the_blocks_merge_and_split(shape, block, view):
    torch.manual_seed(7)
    x = torch.randn(shape)
    extents = [size if extent == -1 else extent for size, extent in zip(shape, block, strict=True)]
    scales = [-(-s // e) if e else 1 for s, e in zip(shape, extents, strict=True)]
    data = x.to(torch.float8_e4m3fn)
    q = Float8Tensor(data, torch.rand(scales) + 0.5, block, torch.float32)
    assert_bitwise(q.view(view).dequantize(), q.dequantize().view(view))
    assert_same_float8(q.view(view).view(shape), q)
