"""`expand_scales`: every element of an MX operand has the value that its float32 scale gives it."""

import math

import oracle
import pytest
import torch

pytest.importorskip("triton")

from interpreter import launcher
from pretend import into_squares, out_of_squares
from shapes import DEVICES, pairs
from torch import Tensor

from float8.kernels.gpu.expand_scales import expand_scales
from float8.kernels.groups import padded_tokens

BLOCKS = TENSOR, ROW, BY_128, SQUARE = (-1, -1), (1, -1), (1, 128), (128, 128)
# Beside powers of two: what E8M0 does not hold, of which a cast computes the first two.
SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 3.0, 2.0**-127, 2.0**-149, 1 + 2.0**-23)


def scales(matrix: tuple[int, int], block: tuple[int, int], strided: bool = False) -> Tensor:
    """Powers of two from the smallest to the largest, and `SPECIALS`; as casts write them."""
    shape = oracle.scale_shape(matrix, block)
    scale = torch.randint(-126, 128, shape).float().exp2()
    flat = scale.view(-1)
    ends = torch.tensor([2.0**-126, 2.0**127, *SPECIALS])[: len(flat)]
    flat[torch.randperm(len(flat))[: len(ends)]] = ends
    return scale.t().contiguous().t() if strided else scale


def values(scale: Tensor, matrix: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The scale of each element, in float64; NaN for what is no power of two of E8M0."""
    exact = scale.double()
    mantissa, _ = torch.frexp(exact)
    exact = exact.masked_fill((mantissa != 0.5) | (exact < 2.0**-126), torch.nan)
    rows, columns = (torch.arange(size) for size in matrix)
    down = rows // block[0] if block[0] > 0 else rows * 0
    across = columns // block[1] if block[1] > 0 else columns * 0
    return exact[down[:, None], across[None, :]]


def check(matrix, block, device, strided=False) -> None:
    scale = scales(matrix, block, strided)
    blocks, replay = -(-matrix[1] // 32), (matrix, block, strided)
    for run in (launcher("expand_scales", "_launch", device), expand_scales):
        found = run(scale.to(device), block, *matrix).cpu()
        by_32 = out_of_squares(found, matrix[0], blocks)  # padding of zeros
        code = by_32.view(torch.uint8).double()
        of_32 = torch.exp2(code - 127).masked_fill(code == 255, torch.nan)
        expected = values(scale, matrix, block)
        assert torch.equal(
            of_32.repeat_interleave(32, 1)[:, : matrix[1]].nan_to_num(-1), expected.nan_to_num(-1)
        ), replay
        assert torch.equal(into_squares(by_32.view(torch.uint8)), found.view(torch.uint8)), replay


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    matrix=[(256, 512), (1, 16), (130, 208), (128, 1264), (5, 4112)],
    block=BLOCKS,
    strided=[False, True],
)
def test_every_element_has_its_scale(matrix, block, strided, device):
    check(matrix, block, device, strided)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [TENSOR, ROW, SQUARE], ids=str)
def test_a_stack_is_expanded_matrix_by_matrix(block, device):
    matrix = (144, 272)
    stack = torch.stack([scales(matrix, block) for _ in range(3)])
    for run in (launcher("expand_scales", "_launch", device), expand_scales):
        found = run(stack.to(device), (1, *block), *matrix).cpu()
        for each, scale in zip(found, stack, strict=True):
            expected = expand_scales(scale, block, *matrix)
            assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8)), block


# Sizes of groups, and rows of none.
GROUPS = (((5, 0, 130, 16, 257), 9), ((128, 64), 0), ((0, 3), 200))


def check_groups(groups, width, block, by_columns, device) -> None:
    """The squares of each group are those of a matrix, one group after another."""
    (sizes, rest), E = groups, len(groups[0])
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    T = sum(sizes) + rest
    padded, P = [-(-size // 128) * 128 for size in sizes], padded_tokens(T, E, 128)
    starts = [sum(padded[:group]) for group in range(E)]
    if by_columns:  # (E, width), or each group's columns beside each other
        shape = (E, width) if block == ROW else (width, P // 128 + E)
    else:
        shape = oracle.scale_shape((T, width), block)
    scale = torch.ones(1, 1) if block == TENSOR else scales(shape, (1, 1))
    arguments = (offs.to(device), by_columns)
    sizes_of = (width, P) if by_columns else (T, width)
    for run in (launcher("expand_scales", "_launch", device), expand_scales):
        found = run(scale.to(device), block, *sizes_of, *arguments).cpu()
        assert found.is_contiguous()
        for group, (end, size, start) in enumerate(zip(offs.tolist(), sizes, starts, strict=True)):
            if not size:
                continue
            if by_columns:
                part, first = scale, start // 128 + group
                if block != TENSOR:
                    part = scale[group][:, None] if block == ROW else scale[:, first:]
                    part = part[:, : padded[group] // 128]
                expected = expand_scales(part, block, width, padded[group])
                place = start // 32 * found.shape[0]
            else:
                part = scale if block == TENSOR else scale[end - size : end]
                expected = expand_scales(part, block, size, width)
                place = start * found.shape[1]
            own = found.flatten()[place : place + len(expected)]
            replay = (groups, width, block, by_columns, group)
            assert torch.equal(own.view(torch.uint8), expected.view(torch.uint8)), replay


@pytest.mark.parametrize("device", DEVICES)
@pairs(groups=GROUPS, width=[272, 144, 16], block=[TENSOR, ROW, BY_128], by_columns=[False, True])
def test_groups_follow_each_other(groups, width, block, by_columns, device):
    check_groups(groups, width, block, by_columns, device)


@pytest.mark.parametrize("block", [ROW, BY_128], ids=str)
def test_opcheck(block):
    checks = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    scale = torch.ones(oracle.scale_shape((130, 272), block))  # NaNs are not compared
    torch.library.opcheck(expand_scales, (scale, block, 130, 272), test_utils=checks)
