"""`cast_tokens`, `cast_tokens_mx`: every group of rows as the definition casts it.

In the transposed operand groups start at multiples of an alignment, with zeros between them. The
scales of 1x32 blocks are where MSLK's kernel finds them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import executed
from assertions import assert_bitwise
from interpreter import interpreted, launcher
from pretend import into_squares
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition, groups
from float8.kernels.gpu import cast_tokens
from float8.kernels.gpu.tiles import alignment_of

E4M3 = torch.float8_e4m3fn
FLOAT32, POWER_OF_TWO, E8M0 = definition.FLOAT32, definition.scale_format_of(True), definition.E8M0
TENSOR, ROW, BY_128, MX = (-1, -1), (1, -1), (1, 128), (1, 32)
BLOCKS = (TENSOR, ROW, BY_128, MX)
ALIGNMENT = {block: alignment_of(block) for block in BLOCKS}
# Sizes of groups, and rows in no group.
GROUPS = (
    ((5, 0, 130, 16, 33), 9),
    ((0, 0, 3), 0),
    ((64,), 1),
    ((257, 128), 40),
    ((0, 0), 7),
    ((0,), 0),
)
ORIENTATIONS = ((True, True), (True, False), (False, True))
EVERY_WAY = pytest.mark.parametrize("device", [*DEVICES, "definition"])


def run(device, x, offs, block, *arguments):
    """The op on a device, interpreted around guarded memory, or its definition."""
    if device == "definition":
        return cast_tokens._definition(x, offs, block, *arguments)
    if device == "cpu" and not executed.is_active():
        return interpreted("probe_tokens").launch(x, offs, block, *arguments)
    return launcher("cast_tokens", "_launch", device)(x, offs, block, *arguments)


def tokens(sizes, rest, columns, device="cpu", **words):
    """x, whose last rows are in no group and hold NaN, and offs."""
    device = "cpu" if device == "definition" else device
    x = Case((sum(sizes) + rest, columns), **words).make(device).clone()
    x[sum(sizes) :] = torch.nan
    return x, torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def check(x, offs, block, dtype, scale_format, wanted, device, replay, scale=None, align=None):
    """The data and scales of every group, from the definition of a matrix."""
    (T, K), align = x.shape, align or ALIGNMENT[block]
    arguments = (offs, block, dtype, scale_format, scale, align, *wanted)
    data, row_scale, data_t, scale_t = run(device, x, *arguments)
    ends = [0, *offs.tolist()]
    of_tensor = scale
    if block == TENSOR and scale is None:
        amax = definition.amax(x[: ends[-1]], TENSOR)
        of_tensor = definition.scale_from_amax(amax, torch.finfo(dtype).max, scale_format)

    def cast(matrix):
        if of_tensor is not None:
            return definition.cast_by_scale(matrix, of_tensor, TENSOR, dtype), of_tensor
        return definition.cast_dynamic(matrix, block, dtype, scale_format)

    def same_squares(found, first, expected, where, what):
        expected = into_squares(expected.view(torch.uint8).cpu())
        found = found.view(torch.uint8).flatten()[first : first + len(expected)]
        assert_bitwise(found, expected, where, what)

    start = 0
    for group, (begin, end) in enumerate(pairwise(ends)):
        where, size = f"{replay}, group {group}", end - begin
        if wanted[0]:
            codes, expected = cast(x[begin:end])
            assert_bitwise(data[begin:end], codes, where, "data")
            if block == MX:
                same_squares(row_scale, start * 4 * -(-K // 128), expected, where, "scale")
            else:
                found = row_scale if block == TENSOR else row_scale[begin:end]
                assert_bitwise(found, expected, where, "scale")
        padded = -(-size // align) * align
        if wanted[1]:
            codes, expected = cast(x[begin:end].t())
            columns = data_t[:, start : start + padded]
            assert_bitwise(columns[:, :size], codes, where, "data_t")
            assert not columns[:, size:].float().nan_to_num().count_nonzero(), where
            first = start // 128 + group
            if block == MX:
                first = start // 32 * (-(-K // 128) * 128)
                same_squares(scale_t, first, expected, where, "scale_t")
            elif block == BY_128:
                found = scale_t[:, first : first + expected.shape[1]]
                assert_bitwise(found, expected, where, "scale_t")
            elif block == TENSOR or size:
                found = scale_t if block == TENSOR else scale_t[group, :, None]
                assert_bitwise(found, expected, where, "scale_t")
            else:
                assert (scale_t[group] == 1).all(), where
        start += padded
    columns = groups.padded_tokens(T, len(offs), align)
    assert data.shape == ((T, K) if wanted[0] else (0, 0)) and data.is_contiguous()
    assert data_t.shape == ((K, columns) if wanted[1] else (0, 0)) and data_t.is_contiguous()


@EVERY_WAY
@pairs(groups=GROUPS, block=BLOCKS, wanted=ORIENTATIONS, columns=[144, 37])
def test_agrees(groups, block, wanted, columns, device):
    case = {"dtype": torch.bfloat16, "fill": "wide", "seed": 1}
    x, offs = tokens(*groups, columns, device, **case)
    scale_format = E8M0 if block == MX else POWER_OF_TWO
    check(x, offs, block, E4M3, scale_format, wanted, device, (groups, columns, case))


@EVERY_WAY
@pairs(groups=GROUPS, block=BLOCKS, wanted=ORIENTATIONS, columns=[144, 37])
def test_agrees_where_groups_are_padded_as_for_mx_products(groups, block, wanted, columns, device):
    x, offs = tokens(*groups, columns, device, fill="wide", seed=1)
    scale_format = E8M0 if block == MX else POWER_OF_TWO
    replay = (groups, columns)
    check(x, offs, block, E4M3, scale_format, wanted, device, replay, align=128)


@pytest.mark.parametrize("device", DEVICES)
@pairs(layout=LAYOUTS, block=BLOCKS, source=HIGH_PRECISION, dtype=FORMATS)
def test_any_strides_and_dtypes(layout, block, source, dtype, device):
    case = Case((70, 40), source, layout=layout, seed=2)
    offs = torch.tensor([20, 20, 70], device=device, dtype=torch.int32)
    scale_format = definition.E8M0_FLOOR if block == MX else FLOAT32
    check(case.make(device), offs, block, dtype, scale_format, (True, True), device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), block=BLOCKS, given=[True, False])
def test_special_values(special, block, given, device):
    """A special value reaches its own scales, and no other group."""
    case = {"dtype": torch.bfloat16, "fill": "one_large", "specials": (special,), "seed": 3}
    x, offs = tokens((17, 40), 3, 40, device, **case)
    scale = torch.full((1, 1), 0.01, device=device) if given and block == TENSOR else None
    scale_format = E8M0 if block == MX else POWER_OF_TWO
    check(x, offs, block, E4M3, scale_format, (True, True), device, case, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [TENSOR, BY_128])
def test_many_groups(block, device):
    sizes = [0] * (18 if device == "cpu" else 300)
    sizes[7], sizes[16], sizes[-1] = 20, 3, 1
    x, offs = tokens(sizes, 2, 16, device)
    check(x, offs, block, E4M3, POWER_OF_TWO, (True, True), device, "many groups")


@pytest.mark.parametrize("offs", [[60, 20, 70], [100, 130, 200], [-5, -40, 30], [90, 0, 90]])
@pytest.mark.parametrize("block", [ROW, BY_128])
def test_wrong_offsets_write_nowhere_else(offs, block):
    """Their values are on the GPU and not checked; only the outputs are written."""
    x, offs = torch.randn(70, 20), torch.tensor(offs, dtype=torch.int32)
    run("cpu", x, offs, block, E4M3, POWER_OF_TWO, None, ALIGNMENT[block], True, True)


@pytest.mark.parametrize("device", DEVICES)
@pairs(block=BLOCKS, wanted=ORIENTATIONS)
def test_opcheck(block, wanted, device):
    x, offs = tokens((17, 1, 33), 0, 16, device)  # no column behind the groups: all is defined
    scale_format = E8M0 if block == MX else POWER_OF_TWO
    arguments = (x, offs, block, E4M3, scale_format, None, ALIGNMENT[block], *wanted)
    # What is not written, which blocks of 32 have, differs from call to call on a GPU.
    checks = ("test_schema", "test_faketensor")
    all_checks = (*checks, "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        cast_tokens.cast_tokens_op, arguments, test_utils=checks if block == MX else all_checks
    )
