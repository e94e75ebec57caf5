"""Copies, moves, casts and creation: what is shared, what is new, and what is refused.

That every one of them keeps values and metadata is tested in ``test_dispatch.py``.
"""

from __future__ import annotations

import copy
import pickle

import oracle
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
from float8.tensor.tensor import OP_TABLE

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
def test_to_another_dtype_keeps_the_bytes(granularity):
    q = example(granularity)
    for dtype in (torch.float32, torch.float16):
        other = q.to(dtype)
        assert_bitwise(other.float8_data, q.float8_data)
        assert_bitwise(other.scale, q.scale)
        exact = oracle.values(q.float8_data, q.scale, q.block).float().to(dtype)
        assert_bitwise(other.dequantize(), exact)


@KINDS
def test_to_another_device_moves_data_and_scale(granularity):
    q = example(granularity)
    moved = q.to("meta", torch.float32)
    assert moved.device.type == moved.float8_data.device.type == moved.scale.device.type == "meta"
    assert (moved.dtype, moved.block, moved.format) == (torch.float32, q.block, q.format)


@pytest.mark.cuda
@KINDS
def test_to_a_gpu_and_back_changes_nothing(granularity):
    q = example(granularity)
    assert q.cuda().device.type == "cuda"
    assert_same_float8(q.cuda().cpu(), q)


def test_without_a_gpu_it_is_not_pinned_and_pins_as_other_tensors_do():
    q = example()
    assert not q.is_pinned()
    pin = OP_TABLE[torch.ops.aten._pin_memory.default]
    pinned = pin(lambda part, device: part.clone(), q, None)
    assert_same_float8(pinned, q)
    assert pinned.float8_data.data_ptr() != q.float8_data.data_ptr()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Cannot access accelerator"):
            q.pin_memory()


@pytest.mark.cuda
@KINDS
def test_pinned_memory_holds_data_and_scale(granularity):
    q = example(granularity)
    pinned = q.pin_memory()
    assert pinned.is_pinned() and pinned.float8_data.is_pinned() and pinned.scale.is_pinned()
    assert_same_float8(pinned, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize(
    "run",
    [
        lambda q, dtype: q.to(dtype),
        lambda q, dtype: torch.zeros_like(q, dtype=dtype),
        lambda q, dtype: torch.empty_like(q, dtype=dtype),
        lambda q, dtype: q.new_zeros(3, 3, dtype=dtype),
    ],
    ids=["to", "zeros_like", "empty_like", "new_zeros"],
)
def test_it_stands_for_a_high_precision_dtype_only(run, dtype):
    with pytest.raises(TypeError, match=f"not {dtype}; for another dtype call .dequantize"):
        run(example(), dtype)


@KINDS
def test_zeros_are_zeros_under_scales_of_one(granularity):
    q = example(granularity)
    for zeros in (torch.zeros_like(q), q.new_zeros(7, 9), q.new_zeros(0, 9)):
        assert zeros.dequantize().count_nonzero() == 0
        assert (zeros.scale == 1).all()


def test_what_is_made_like_it_does_not_share_its_scale():
    q = example()
    torch.zeros_like(q).scale.fill_(9.0)
    q.new_zeros(2, 2).scale.fill_(9.0)
    assert q.scale.item() != 9.0


def test_a_new_tensor_has_as_many_dimensions_as_its_block():
    with pytest.raises(ValueError, match=r"\(5, 7, 2\).*the number of dimensions must stay"):
        example().new_zeros(5, 7, 2)


# --- copy_


@KINDS
def test_copy_from_high_precision_casts_with_new_scales(granularity):
    destination, x = example(granularity), Case((6, 24), torch.bfloat16, exponent=9, seed=2).make()
    returned = destination.copy_(x)
    assert returned is destination
    assert_same_float8(destination, quantize(x, E5M2, granularity))


def test_e8m0_scales_are_computed_copied_and_pickled():
    mx = {"granularity": Blockwise(1, 8), "scale_format": ScaleFormat.E8M0}
    x, other = (Case((6, 24), exponent=e, fill="wide", seed=2).make() for e in (9, -9))
    q, expected = quantize(x, E5M2, **mx), quantize(other, E5M2, **mx)
    assert_same_float8(copy.deepcopy(q).copy_(other), expected)
    assert_same_float8(copy.deepcopy(q).copy_(expected), expected)
    assert_same_float8(pickle.loads(pickle.dumps(q)), q)
    part = q.clone()
    part[2:4].copy_(other[2:4])  # under the scales that are there
    assert_bitwise(part.scale, q.scale)
    assert_bitwise(part.float8_data[2:4], kernels.cast(other, q.scale, (1, 8), E5M2.dtype)[2:4])
    one = quantize(x, E5M2, scale_format=ScaleFormat.E8M0)
    tripled = one.dequantize() * 3
    assert_same_float8(one.mul_(3), quantize(tripled, E5M2, scale_format=ScaleFormat.E8M0))


@KINDS
def test_copy_of_the_same_kind_copies_bytes(granularity):
    destination, source = example(granularity), example(granularity, seed=2)
    destination.copy_(source)
    assert_same_float8(destination, source)
    source.scale.mul_(2)
    assert not torch.equal(destination.scale, source.scale)


@KINDS
def test_copy_into_high_precision_dequantises(granularity):
    source = example(granularity)
    destination = torch.empty(6, 24)
    destination.copy_(source)
    assert_bitwise(destination, source.dequantize().float())


def test_copy_broadcasts_and_converts_like_any_copy():
    destination = example(Rowwise())
    row = Case((24,), seed=3).make()
    destination.copy_(row)
    assert_same_float8(destination, quantize(row.expand(6, 24), E5M2, Rowwise()).to(torch.bfloat16))


@pytest.mark.parametrize(
    "source",
    [example(Rowwise()), example(Tensorwise(), fmt=E4M3), example(Blockwise(1, 8))],
    ids=["rowwise", "format", "1x8"],
)
def test_copy_of_another_kind_is_refused(source):
    destination = example(Tensorwise())
    before = destination.clone()
    with pytest.raises(ValueError, match="cannot copy a Float8Tensor of") as error:
        destination.copy_(source)
    assert "source.dequantize()" in str(error.value)
    assert_same_float8(destination, before)
    destination.copy_(source.dequantize())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
def test_copy_from_what_is_not_high_precision_is_refused(dtype):
    with pytest.raises(TypeError, match=f"cannot copy {dtype} into a Float8Tensor"):
        example().copy_(torch.ones(6, 24).to(dtype))


def test_copy_of_another_shape_is_an_error():
    with pytest.raises(RuntimeError, match="expanded size"):
        example().copy_(torch.ones(5, 24))


# --- equal


def test_equal_compares_values():
    q = example()
    assert torch.equal(q, q.clone())
    assert torch.equal(q, q.view(2, 3, 24).view(6, 24))
    assert not torch.equal(q, example(seed=2))
    assert not torch.equal(q, q[:3])
    doubled = q._replace(scale=q.scale * 2)
    assert not torch.equal(q, doubled)


def test_equal_to_a_plain_tensor_is_an_error():
    for pair in ((example(), torch.ones(6, 24)), (torch.ones(6, 24), example())):
        with pytest.raises(TypeError, match="dequantize"):
            torch.equal(*pair)


# --- writing by indices


INDICES = {
    "rows": (torch.tensor([4, 0]),),
    "elements": (torch.tensor([0, 5, 2]), torch.tensor([3, 3, 23])),
    "columns": (slice(None), torch.tensor([1, 20])),
    "a mask": (torch.arange(6 * 24).view(6, 24) % 7 == 0,),
}


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize(
    "granularity", [Tensorwise(), Rowwise(), Blockwise(1, 8), Blockwise(4, 16)], ids=str
)
@pytest.mark.parametrize("in_float8", [False, True])
def test_index_put_casts_with_the_scales_that_are_there(kind, granularity, in_float8):
    x = Case((6, 24), fill="wide", seed=3).make()
    q, indices = Float8Tensor.from_high_precision(x, E4M3, granularity), INDICES[kind]
    before, scale = q.dequantize(), q.scale.clone()
    where = torch.zeros(6, 24, dtype=torch.bool)
    where[indices] = True
    values = torch.randn(before[indices].shape)
    if in_float8:
        values = Float8Tensor.from_high_precision(values, E5M2, Tensorwise())
    q[indices] = values
    assert torch.equal(q.scale, scale)
    assert_bitwise(q.dequantize()[~where], before[~where])
    # The oracle: each number that was written is the code nearest to value / scale, in float64.
    plain = values.dequantize() if in_float8 else values
    written = torch.zeros(6, 24)
    written[indices] = plain
    each = oracle.spread(scale, (6, 24), q.block).double()
    codes = oracle.encode((written.double() / each).clamp(-448, 448), torch.float8_e4m3fn)
    assert torch.equal(q.float8_data.view(torch.uint8)[where], codes[where])


def test_a_mask_may_set_elements_to_a_number():
    q = Float8Tensor.from_high_precision(torch.randn(6, 24), E4M3, Rowwise())
    mask = q.dequantize() < 0
    q[mask] = 0.0
    assert bool((q.dequantize() >= 0).all()) and bool((q.dequantize()[mask] == 0).all())


def test_masked_fill_writes_what_an_assignment_does():
    q = Float8Tensor.from_high_precision(torch.randn(6, 24), E4M3, Rowwise())
    columns, other = torch.arange(24) % 3 == 0, q.clone()
    assert q.masked_fill_(columns, -0.3) is q
    other[columns.expand(6, 24).nonzero(as_tuple=True)] = torch.tensor(-0.3)
    assert torch.equal(q.float8_data.view(torch.uint8), other.float8_data.view(torch.uint8))
    assert torch.equal(q.scale, other.scale)


def test_index_put_of_a_float8_tensor_into_a_plain_one():
    q = Float8Tensor.from_high_precision(torch.randn(2, 24), E4M3)
    plain = torch.zeros(6, 24).index_put_((torch.tensor([5, 1]),), q)
    assert_bitwise(plain[torch.tensor([5, 1])], q.dequantize())


def test_index_put_refuses_what_it_cannot_do():
    q = Float8Tensor.from_high_precision(torch.randn(6, 24), E4M3)
    rows = (torch.tensor([0]),)
    with pytest.raises(NotImplementedError, match=r"accumulate=True .* x\.copy_\(sums\)"):
        q.index_put_(rows, torch.ones(24), accumulate=True)
    with pytest.raises(TypeError, match=r"cannot write torch\.float64 into a Float8Tensor"):
        q.index_put_(rows, torch.ones(24, dtype=torch.float64))


def test_is_same_size_compares_shapes():
    q = Float8Tensor.from_high_precision(torch.randn(6, 24), E4M3, Rowwise())
    assert q.is_same_size(torch.empty(6, 24)) and torch.empty(6, 24).is_same_size(q)
    assert not q.is_same_size(q[:5])
