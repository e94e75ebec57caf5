"""Granularity is one block; the number of scales and the transpose follow from it."""

from __future__ import annotations

import oracle
import pytest
import shapes
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.sizevars import SizeVarAllocator
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CeilDiv

from float8.granularity import (
    Blockwise,
    Granularity,
    Rowwise,
    Tensorwise,
    scale_shape,
    transpose_block,
)


@pytest.mark.parametrize(
    ("granularity", "shape", "block"),
    [
        (Tensorwise(), (), ()),
        (Tensorwise(), (7,), (-1,)),
        (Tensorwise(), (5, 123), (-1, -1)),
        (Tensorwise(), (2, 3, 4), (-1, -1, -1)),
        (Rowwise(), (7,), (-1,)),
        (Rowwise(), (5, 123), (1, -1)),
        (Rowwise(), (2, 3, 4), (1, 1, -1)),
        (Blockwise(1, 128), (5, 123), (1, 128)),
        (Blockwise(128, 128), (2, 5, 123), (1, 128, 128)),
    ],
)
def test_block_of(granularity, shape, block):
    assert granularity.block_of(shape) == block


@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((5, 123), (-1, -1), (1, 1)),
        ((5, 123), (1, -1), (5, 1)),
        ((5, 123), (1, 128), (5, 1)),
        ((130, 257), (128, 128), (2, 3)),
        ((128, 256), (128, 128), (1, 2)),
        ((0, 16), (1, -1), (0, 1)),
        ((0, 16), (-1, -1), (1, 1)),
        ((0, 16), (128, 128), (0, 1)),
        ((16, 0), (1, 128), (16, 0)),
        ((), (), ()),
    ],
)
def test_scale_shape(shape, block, scales):
    assert scale_shape(shape, block) == scales


@given(
    st.tuples(st.integers(0, 300), st.integers(0, 300)),
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
)
def test_every_element_has_a_scale_and_every_scale_an_element(shape, block):
    for size, extent, count in zip(shape, block, scale_shape(shape, block), strict=True):
        assert len({i // extent for i in range(size)}) == count


@pytest.mark.parametrize("granularity", shapes.GRANULARITIES.values(), ids=shapes.GRANULARITIES)
@pytest.mark.parametrize("shape", shapes.WEIRD_SHAPES, ids=str)
def test_a_transpose_swaps_block_and_scales(granularity, shape):
    block = granularity.block_of(shape)
    swapped = scale_shape(shape[::-1], transpose_block(block))
    assert swapped == scale_shape(shape, block)[::-1]
    assert transpose_block(transpose_block(block)) == block
    assert scale_shape(shape, block) == oracle.scale_shape(shape, block)


@pytest.mark.parametrize("extents", [(0, 128), (128, 0), (-1, 128), (1, -1)])
def test_a_block_has_positive_extents(extents):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        Blockwise(*extents)


def test_rowwise_needs_a_row():
    with pytest.raises(ValueError, match="use Tensorwise"):
        Rowwise().block_of(())


@pytest.mark.parametrize("shape", [(), (128,)])
def test_blockwise_needs_a_matrix(shape):
    with pytest.raises(ValueError, match="at least two dimensions"):
        Blockwise(1, 128).block_of(shape)


def test_a_block_has_one_extent_per_dimension():
    with pytest.raises(ValueError, match="zip"):
        scale_shape((5, 123), (1, 1, -1))


def test_granularity_itself_is_abstract():
    with pytest.raises(NotImplementedError, match="Granularity is abstract"):
        Granularity().block_of((2, 2))


def test_equal_granularities_are_one_key():
    assert {Tensorwise(), Tensorwise(), Rowwise(), Blockwise(1, 32), Blockwise(1, 32)} == {
        Tensorwise(),
        Rowwise(),
        Blockwise(1, 32),
    }
    assert Rowwise() != Tensorwise()
    assert Blockwise(1, 128) != Blockwise(128, 1)


def test_a_compiler_can_prove_how_many_scales_a_dynamic_size_has():
    """As the lowering of _scaled_mm asks for it: test/kernels/test_dynamic_shapes.py."""
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    known = SizeVarAllocator(env).statically_known_equals
    rows, cols = scale_shape((size, 640), (128, 128))
    assert cols == 5
    assert known(rows.node.expr, CeilDiv(size.node.expr, 128))
    assert not known((-(-size // 128)).node.expr, CeilDiv(size.node.expr, 128))
