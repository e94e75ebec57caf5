"""Granularity is one block; the number of scales and the transpose follow from it."""

from __future__ import annotations

import oracle
import pytest
import shapes

from float8.granularity import (
    Blockwise,
    Granularity,
    Rowwise,
    Tensorwise,
    block_name,
    scale_shape,
    transpose_block,
)


@pytest.mark.parametrize(
    ("granularity", "shape", "block", "scales"),
    [
        (Tensorwise(), (), (), ()),
        (Tensorwise(), (2, 3, 4), (-1, -1, -1), (1, 1, 1)),
        (Rowwise(), (2, 3, 4), (1, 1, -1), (2, 3, 1)),
        (Rowwise(), (), (), ()),
        (Rowwise(), (0,), (-1,), (1,)),
        (Blockwise(4, 32), (), (), ()),
        (Blockwise(4, 32), (65,), (32,), (3,)),
        (Rowwise(), (0, 16), (1, -1), (0, 1)),
        (Blockwise(1, 128), (16, 0), (1, 128), (16, 0)),
        (Blockwise(128, 128), (2, 130, 257), (1, 128, 128), (2, 2, 3)),
        (Blockwise(128, 128), (128, 256), (128, 128), (1, 2)),
    ],
)
def test_a_shape_has_its_block_and_scales(granularity, shape, block, scales):
    assert granularity.block_of(shape) == block
    assert scale_shape(shape, block) == scales


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        *(
            (lambda extents=extents: Blockwise(*extents), ValueError, "must be an integer >= 1")
            for extents in ((0, 128), (128, 0), (-1, 128), (1, -1))
        ),
        (lambda: scale_shape((5, 123), (1, 1, -1)), ValueError, r"\(5, 123\).*\(1, 1, -1\)"),
        (Granularity, TypeError, "abstract"),
    ],
)
def test_what_has_no_block_is_refused(run, error, words):
    with pytest.raises(error, match=words):
        run()


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ((-1,), "tensorwise"),
        ((-1, -1, -1), "tensorwise"),
        ((1, 1, -1), "rowwise"),
        ((-1, 1), "allx1"),
        ((1, -1, -1), "1xallxall"),
        ((1, 128), "1x128"),
    ],
)
def test_errors_call_a_block_by_its_name(block, name):
    assert block_name(block) == name


def test_equal_granularities_are_one_key():
    assert len({Tensorwise(), Tensorwise(), Rowwise(), Blockwise(1, 32), Blockwise(1, 32)}) == 3
    assert Blockwise(1, 128) != Blockwise(128, 1)


@pytest.mark.parametrize("granularity", shapes.GRANULARITIES.values(), ids=shapes.GRANULARITIES)
@pytest.mark.parametrize("shape", shapes.WEIRD_SHAPES, ids=str)
def test_a_transpose_swaps_block_and_scales(granularity, shape):
    block = granularity.block_of(shape)
    swapped = scale_shape(shape[::-1], transpose_block(block))
    assert swapped == scale_shape(shape, block)[::-1]
    assert transpose_block(transpose_block(block)) == block
    assert scale_shape(shape, block) == oracle.scale_shape(shape, block)
