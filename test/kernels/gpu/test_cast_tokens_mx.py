"""`cast_tokens_mx`: every group as the definition casts it, its scales where the GEMM looks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from pretend import into_squares
from shapes import DEVICES, FORMATS, Case, pairs

from float8.kernels import definition, groups
from float8.kernels.gpu.cast_tokens_mx import ALIGNMENT, _definition, cast_tokens_mx

E4M3 = torch.float8_e4m3fn
# Sizes of groups, and rows in no group.
GROUPS = (((5, 0, 130, 33), 9), ((0, 0, 3), 0), ((128, 64), 40), ((0, 0), 7))
ORIENTATIONS = ((True, True), (True, False), (False, True))


def tokens(sizes, rest, columns, device="cpu", **words):
    """x, whose last rows are in no group and hold NaN, and offs."""
    x = Case((sum(sizes) + rest, columns), **words).make(device).clone()
    x[sum(sizes) :] = torch.nan
    return x, torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def check(op, x, offs, dtype, scale_format, wanted, replay):
    """Each group is cast as a matrix; its scales are where MSLK's kernel finds them."""
    T, K = x.shape
    got = op(x, offs, (1, 32), dtype, scale_format, None, ALIGNMENT, *wanted)
    data, scale, data_t, scale_t = (each.cpu() for each in got)
    of_rows, of_columns = (each.view(torch.uint8).flatten() for each in (scale, scale_t))
    across, start = 4 * -(-K // 128), 0
    for group, (begin, end) in enumerate(pairwise([0, *offs.tolist()])):
        where, padded = f"{replay}, group {group}", -(-(end - begin) // 128) * 128
        rows = x[begin:end].cpu()
        if wanted[0]:
            codes, expected = definition.cast_dynamic(rows, (1, 32), dtype, scale_format)
            assert_bitwise(data[begin:end], codes, where, "data")
            placed = into_squares(expected.view(torch.uint8))
            first = start * across
            assert_bitwise(of_rows[first : first + len(placed)], placed, where, "scale")
        if wanted[1]:
            codes, expected = definition.cast_dynamic(rows.t(), (1, 32), dtype, scale_format)
            columns = data_t[:, start : start + padded]
            assert_bitwise(columns[:, : end - begin], codes, where, "data_t")
            padding = columns[:, end - begin :].float()
            assert padding.nan_to_num().count_nonzero() == 0, where
            placed = into_squares(expected.view(torch.uint8))
            first = start // 32 * (-(-K // 128) * 128)
            assert_bitwise(of_columns[first : first + len(placed)], placed, where, "scale_t")
        start += padded
    assert (scale.dim(), scale_t.dim()) == (2, 2)
    assert data_t.shape == ((K, groups.padded_tokens(T, len(offs), 128)) if wanted[1] else (0, 0))


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    group=GROUPS,
    layout=["contiguous", "transposed", "sliced"],
    scale_format=["e8m0", "e8m0_floor"],
    dtype=FORMATS,
)
def test_agrees(group, layout, scale_format, dtype, device):
    words = {"dtype": torch.bfloat16, "fill": "wide", "layout": layout}
    x, offs = tokens(*group, 144, device, **words)
    op = launcher("cast_tokens_mx", "_launch", device)
    check(op, x, offs, dtype, scale_format, (True, True), (group, words))


@pytest.mark.parametrize("device", DEVICES)
@pairs(wanted=ORIENTATIONS, columns=[37, 129, 16], special=["inf", "nan"])
def test_writes_what_is_asked_for(wanted, columns, special, device):
    x, offs = tokens((40, 129), 3, columns, device, specials=(special,), seed=3)
    op = launcher("cast_tokens_mx", "_launch", device)
    check(op, x, offs, E4M3, "e8m0", wanted, (wanted, columns, special))


@pytest.mark.parametrize("group", GROUPS)
def test_the_definition_agrees(group):
    check(_definition, *tokens(*group, 144), E4M3, "e8m0", (True, True), group)


def test_refuses_other_casts():
    x, offs = tokens((4,), 0, 16)
    for other in (
        ((1, 128), E4M3, "e8m0", None, 128),
        ((1, 32), E4M3, "float32", None, 128),
        ((1, 32), E4M3, "e8m0", None, 16),
        ((1, 32), E4M3, "e8m0", torch.ones(1, 1), 128),
    ):
        with pytest.raises(ValueError, match=r"float8::cast_tokens_mx: no kernel casts .* use "):
            cast_tokens_mx(x, offs, *other, True, True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ORIENTATIONS[:2])
def test_opcheck(wanted, device):
    x, offs = tokens((5, 0, 20), 0, 48, device)
    arguments = (x, offs, (1, 32), E4M3, "e8m0", None, ALIGNMENT, *wanted)
    # What is not written differs from call to call on a GPU.
    torch.library.opcheck(cast_tokens_mx, arguments, test_utils=("test_schema", "test_faketensor"))
