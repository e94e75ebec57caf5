"""Stacks of matrices (E, M, K), such as the weights of experts: each is cast like one alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.cast import cast, cast_dynamic
from float8.kernels.gpu.cast_blockwise import cast_blockwise
from float8.kernels.gpu.cast_rowwise import cast_rowwise

E4M3 = torch.float8_e4m3fn
ORIENTATIONS = ((True, True), (True, False), (False, True))
KERNELS = {  # block of a matrix -> the file of gpu/, the op, and its arguments before the flags
    (-1, -1): ("cast", cast_dynamic, ()),
    (1, -1): ("cast_rowwise", cast_rowwise, ()),
    (1, 128): ("cast_blockwise", cast_blockwise, (1, 128)),
    (128, 128): ("cast_blockwise", cast_blockwise, (128, 128)),
}


def experts(shape, layout, device):
    """Magnitudes differ by powers of ten: another matrix's scale changes the data."""
    w = Case(shape, torch.bfloat16, layout=layout, seed=1).make(device)
    factors = torch.tensor([1.0, 100.0, 0.01], dtype=w.dtype, device=device)[:, None, None]
    return w * factors  # keeps the strides


def check(parts, source, block, power_of_two, replay):
    data, scale = parts
    scale_format = definition.scale_format_of(power_of_two)
    for e, matrix in enumerate(source):
        codes, expected = definition.cast_dynamic(matrix, block, E4M3, scale_format)
        assert_bitwise(scale[e].contiguous(), expected, f"{replay}, matrix {e}", "scale")
        assert_bitwise(data[e], codes, f"{replay}, matrix {e}", "data")
    assert data.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(3, 32, 144), (3, 37, 50)],
    layout=["contiguous", "transposed", "sliced"],
    block=list(KERNELS),
    wanted=ORIENTATIONS,
    power_of_two=[True, False],
)
def test_agrees(shape, layout, block, wanted, power_of_two, device):
    file, _, arguments = KERNELS[block]
    w = experts(shape, layout, device)
    function = launcher(file, "_cast_dynamic" if file == "cast" else "_launch", device)
    data, *others = function(w, E4M3, power_of_two, *arguments, *wanted)
    data_t, scale = others[:2] if file == "cast" else (others[1], others[0])
    scale_t = scale if file == "cast" else others[2]
    replay = (shape, layout, block)
    if wanted[0]:
        check((data, scale), w, block, power_of_two, replay)
    if wanted[1]:
        check((data_t, scale_t), w.mT, block, power_of_two, replay)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3])
def test_given_scales(count, device):
    """One for all matrices, or one for each."""
    w = experts((3, 32, 40), "contiguous", device)
    scale = torch.tensor([0.1, 0.02, 3.0][:count], device=device).reshape(count, 1, 1)
    data, data_t = launcher("cast", "_cast", device)(w, scale, E4M3, True, True)
    expected = definition.cast(w, scale.expand(3, 1, 1), (1, -1, -1), E4M3)
    assert_bitwise(data, expected, count)
    assert_bitwise(data_t, expected.mT, count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", KERNELS)
def test_opcheck(block, device):
    _, op, arguments = KERNELS[block]
    w = experts((3, 16, 40), "transposed", device)
    torch.library.opcheck(op, (w, E4M3, True, *arguments, True, True))
    if block == (-1, -1):
        scale = torch.ones(3, 1, 1, device=device)
        torch.library.opcheck(cast, (w, scale, E4M3, True, True))
