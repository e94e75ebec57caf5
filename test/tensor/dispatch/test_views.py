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

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise

quantize = Float8Tensor.from_high_precision


def example(granularity, shape=(6, 24), seed=1, fmt=E4M3) -> Float8Tensor:
    return quantize(Case(shape, fill="wide", seed=seed).make(), fmt, granularity)


@pytest.mark.parametrize(
    "view",
    [
        lambda q: q.view(2, 3, 24),
        lambda q: q.t(),
        lambda q: q.transpose(0, 1),
        lambda q: q.permute(1, 0),
        lambda q: q[2:4],
        lambda q: q[:, :8],
        lambda q: q[3],
        lambda q: q.unsqueeze(0),
        lambda q: q.split(2)[1],
        lambda q: q.detach(),
    ],
)
def test_a_view_shares_data_and_scale(view):
    q = example(Blockwise(1, 8))
    part = view(q)
    assert (
        part.float8_data.untyped_storage().data_ptr() == q.float8_data.untyped_storage().data_ptr()
    )
    assert part.scale.untyped_storage().data_ptr() == q.scale.untyped_storage().data_ptr()
    before = part.dequantize()
    q.scale.mul_(2)
    assert_bitwise(part.dequantize(), before * 2)


@pytest.mark.parametrize(
    ("granularity", "run", "words"),
    [
        (Rowwise(), lambda q: q.view(-1), ["(6, 24)", "(1, -1)", "(144,)", "dimensions 1 to 1"]),
        (
            Blockwise(3, 4),
            lambda q: q.view(2, 3, 24),
            ["(3, 4)", "(2, 3, 24)", "dimensions 0 to 1"],
        ),
        (Blockwise(1, 8), lambda q: q[:, 4:], ["[4:24:1]", "dim 1", "(1, 8)", "multiples of 8"]),
        (Blockwise(1, 8), lambda q: q[:, :4], ["[0:4:1]", "multiples of 8"]),
        (Blockwise(1, 8), lambda q: q[:, ::8], ["[0:24:8]"]),
        (Blockwise(3, 4), lambda q: q[2], ["select", "dim 0", "(3, 4)"]),
        (Blockwise(3, 4), lambda q: q.split(2), ["[0:2:1]", "dim 0"]),
        (Blockwise(3, 4), lambda q: torch.cat([q[:, 20:], q[:4]], 0), []),
    ],
)
def test_a_refusal_says_what_the_block_forbids(granularity, run, words):
    with pytest.raises((ValueError, RuntimeError)) as error:
        run(example(granularity))
    text = str(error.value)
    assert [word for word in words if word not in text] == []
    assert "dequantize" in text


def test_sizes_that_do_not_sum_up_are_an_error():
    q = example(Rowwise())
    for sizes in ([1, 2], [4, 4]):
        with pytest.raises(ValueError, match="do not sum to 6, dim 0"):
            q.split(sizes)
    with pytest.raises(ValueError, match="split_size must be positive, got 0"):
        q.split(0)


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
def test_blocks_of_rows_are_split_and_put_together_again(rows, last):
    q = example(Blockwise(3, 5), (sum(rows) + last, 7))
    parts = q.split([*rows, last])
    assert [p.shape[0] for p in parts] == [*rows, last]
    assert_same_float8(torch.cat(parts), q, (rows, last))


# --- cat


def test_parts_of_one_scale_each_need_the_same_scale():
    x = Case((6, 24), seed=1).make()
    one, other = (quantize(x, E4M3, Tensorwise(), scale) for scale in (0.5, 0.25))
    joined = torch.cat([one, one.clone()])
    assert_bitwise(joined.dequantize(), torch.cat([one.dequantize()] * 2))
    assert_bitwise(joined.scale, one.scale)
    with pytest.raises(ValueError, match="cannot cat along dim 0, which shares one scale") as error:
        torch.cat([one, other])
    assert "0.5" in str(error.value)
    assert "0.25" in str(error.value)
    assert "dequantize" in str(error.value)


def test_rows_join_along_rows_with_their_scales_and_along_columns_with_equal_ones():
    q, other = example(Rowwise(), seed=1), example(Rowwise(), seed=2)
    joined = torch.cat([q, other])
    assert_bitwise(joined.scale, torch.cat([q.scale, other.scale]))
    assert_bitwise(joined.dequantize(), torch.cat([q.dequantize(), other.dequantize()]))
    assert_same_float8(torch.cat([q[:, :5], q[:, 5:]], 1), q)
    with pytest.raises(ValueError, match="cannot cat along dim 1"):
        torch.cat([q, other], 1)


def test_a_partial_block_can_only_be_the_last():
    q = example(Blockwise(4, 24))
    assert_same_float8(torch.cat([q[:4], q[4:]]), q)
    with pytest.raises(ValueError, match=r"\[2, 4\] are not multiples of the block 4"):
        torch.cat([q[4:], q[:4]])


@pytest.mark.parametrize(
    "other",
    [
        example(Tensorwise()),
        example(Rowwise(), fmt=E5M2),
        example(Rowwise()).to(torch.bfloat16),
    ],
    ids=["block", "format", "dtype"],
)
def test_different_kinds_are_not_joined(other):
    with pytest.raises(ValueError, match="cannot cat Float8Tensors of different kinds"):
        torch.cat([example(Rowwise()), other])


def test_a_plain_tensor_is_not_joined():
    q = example(Rowwise())
    for pair in ([q, torch.ones(6, 24)], [torch.ones(6, 24), q]):
        with pytest.raises(TypeError, match="cannot cat a Float8Tensor with a plain") as error:
            torch.cat(pair)
        assert "dequantize" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "block", "view"),
    [
        ((6, 4, 5), (-1, 1, 1), (6, 20)),  # scaled over dim 0, trailing dimensions merge
        ((6, 20), (-1, 1), (6, 4, 5)),  # and split
        ((6, 20), (-1, 1), (6, 2, 2, 5)),
        ((2, 3, 8, 5), (1, 1, 4, 1), (6, 8, 5)),  # blocks in the middle: both sides are free
        ((2, 3, 8, 4), (1, 1, 4, 1), (6, 8, 2, 2)),
        ((1, 20), (-1, 1), (1, 4, 5)),
        ((6, 4, 5), (1, 1, 1), (24, 5)),  # a scale for each element
        ((0, 4, 5), (-1, 1, 1), (0, 20)),
    ],
)
def test_dimensions_merge_and_split_on_both_sides_of_the_blocks(shape, block, view):
    torch.manual_seed(7)
    x = torch.randn(shape)
    extents = [size if extent == -1 else extent for size, extent in zip(shape, block, strict=True)]
    scales = [-(-s // e) if e else 1 for s, e in zip(shape, extents, strict=True)]
    data = x.to(torch.float8_e4m3fn)
    q = Float8Tensor(data, torch.rand(scales) + 0.5, block, torch.float32)
    assert_bitwise(q.view(view).dequantize(), q.dequantize().view(view))
    assert_same_float8(q.view(view).view(shape), q)


@pytest.mark.parametrize(
    ("block", "view"), [((-1, 1, 1), (24, 5)), ((-1, 1, 1), (120,)), ((2, 1, 1), (3, 8, 5))]
)
def test_a_blocked_leading_dimension_neither_merges_nor_splits(block, view):
    scales = (1 if block[0] == -1 else 3, 4, 5)
    q = Float8Tensor(
        torch.randn(6, 4, 5).to(torch.float8_e4m3fn), torch.ones(scales), block, torch.float32
    )
    with pytest.raises(ValueError, match="dimensions 0 to 0 share scales and must stay"):
        q.view(view)
