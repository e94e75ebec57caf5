"""`cast_tokens`: every group of rows as the definition casts it, aligned in the transpose."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import executed
from assertions import assert_bitwise
from interpreter import interpreted, launcher
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.cast_tokens import ALIGNMENT, cast_tokens

E4M3 = torch.float8_e4m3fn
FLOAT32, POWER_OF_TWO = definition.FLOAT32, definition.scale_format_of(True)
TENSOR, ROW, BY_128 = (-1, -1), (1, -1), (1, 128)
BLOCKS = (TENSOR, ROW, BY_128)
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


def run(device, *arguments, fault=None):
    if device == "cpu" and not executed.is_active():
        return interpreted("probe_tokens").launch(fault, *arguments)
    assert fault is None
    return launcher("cast_tokens", "_launch", device)(*arguments)


def tokens(sizes, rest, columns, device="cpu", **words):
    """x, whose last rows are in no group and hold NaN, and offs."""
    x = Case((sum(sizes) + rest, columns), **words).make(device).clone()
    x[sum(sizes) :] = torch.nan
    return x, torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def check(x, offs, block, dtype, scale_format, wanted, device, replay, scale=None, fault=None):
    """The data and scales of every group, from the definition of a matrix."""
    arguments = (offs, block, dtype, scale_format, scale, ALIGNMENT, *wanted)
    data, row_scale, data_t, scale_t = run(device, x, *arguments, fault=fault)
    ends = [0, *offs.tolist()]
    of_tensor = scale
    if block == TENSOR and scale is None:
        amax = definition.amax(x[: ends[-1]], TENSOR)
        of_tensor = definition.scale_from_amax(amax, torch.finfo(dtype).max, scale_format)

    def cast(matrix):
        if of_tensor is not None:
            return definition.cast(matrix, of_tensor, TENSOR, dtype), of_tensor
        return definition.cast_dynamic(matrix, block, dtype, scale_format)

    start = 0
    for group, (begin, end) in enumerate(pairwise(ends)):
        where = f"{replay}, group {group}"
        if wanted[0]:
            codes, expected = cast(x[begin:end])
            assert_bitwise(data[begin:end], codes, where, "data")
            found = row_scale if block == TENSOR else row_scale[begin:end]
            assert_bitwise(found, expected, where, "scale")
        if wanted[1]:
            codes, expected = cast(x[begin:end].t())
            assert_bitwise(data_t[:, start : start + end - begin], codes, where, "data_t")
            padding = data_t[:, start + end - begin : start + -(-(end - begin) // 16) * 16].float()
            assert not padding[~expected.isnan().any(1).expand(len(padding))].count_nonzero(), where
            first = start // 128 + group
            found = {
                TENSOR: scale_t,
                ROW: scale_t[group, :, None] if block == ROW else None,
                BY_128: scale_t[:, first : first + expected.shape[1]],
            }[block]
            if end > begin or block == TENSOR:
                assert_bitwise(found, expected, where, "scale_t")
            elif block == ROW:
                assert (found == 1).all(), where
        start += -(-(end - begin) // 16) * 16
    for each, orientation in ((data, 0), (data_t, 1)):
        assert each.is_contiguous()
        assert each.numel() == 0 or wanted[orientation]


@pytest.mark.parametrize("device", DEVICES)
@pairs(groups=GROUPS, block=BLOCKS, wanted=ORIENTATIONS, columns=[144, 37])
def test_agrees(groups, block, wanted, columns, device):
    case = {"dtype": torch.bfloat16, "fill": "wide", "seed": 1}
    x, offs = tokens(*groups, columns, device, **case)
    check(x, offs, block, E4M3, POWER_OF_TWO, wanted, device, (groups, columns, case))


@pytest.mark.parametrize("device", DEVICES)
@pairs(layout=LAYOUTS, block=BLOCKS, source=HIGH_PRECISION, dtype=FORMATS)
def test_any_strides_and_dtypes(layout, block, source, dtype, device):
    case = Case((70, 40), source, layout=layout, seed=2)
    offs = torch.tensor([20, 20, 70], device=device, dtype=torch.int32)
    check(case.make(device), offs, block, dtype, FLOAT32, (True, True), device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), block=BLOCKS, given=[True, False])
def test_special_values(special, block, given, device):
    """A special value reaches its own scales, and no other group."""
    case = {"dtype": torch.bfloat16, "fill": "one_large", "specials": (special,), "seed": 3}
    x, offs = tokens((17, 40), 3, 40, device, **case)
    scale = torch.full((1, 1), 0.01, device=device) if given and block == TENSOR else None
    check(x, offs, block, E4M3, POWER_OF_TWO, (True, True), device, case, scale)


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
    run("cpu", x, offs, block, E4M3, POWER_OF_TWO, None, ALIGNMENT, True, True)


@pytest.mark.parametrize(
    "fault", ["wrong_start", "tail_is_read", "neighbours_tokens", "no_padding"]
)
def test_a_planted_fault_is_seen(fault):
    x, offs = tokens((5, 21, 130), 7, 20)
    with pytest.raises(AssertionError):
        check(x, offs, BY_128, E4M3, POWER_OF_TWO, (True, True), "cpu", fault, fault=fault)


def test_refuses_other_blocks_and_alignments():
    x, offs = tokens((3,), 0, 16)
    for block, align in (((128, 128), 16), ((1, 32), 16), (ROW, 8)):
        with pytest.raises(ValueError, match=r"float8::cast_tokens: no kernel casts .* use one of"):
            cast_tokens(x, offs, block, E4M3, FLOAT32, None, align, True, True)


@pytest.mark.parametrize("device", DEVICES)
@pairs(block=BLOCKS, wanted=ORIENTATIONS)
def test_opcheck(block, wanted, device):
    x, offs = tokens((17, 1, 33), 0, 16, device)  # no column behind the groups: all is defined
    arguments = (x, offs, block, E4M3, POWER_OF_TWO, None, ALIGNMENT, *wanted)
    torch.library.opcheck(cast_tokens, arguments)
