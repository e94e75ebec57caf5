"""`cast_rowwise`: rows, and rows of the transpose, agree with the definition, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.definition import scale_format_of
from float8.kernels.gpu.cast_rowwise import cast_rowwise

BY_ROW = (1, -1)
SHAPES = ((80, 272), (5, 123), (66, 129), (1, 16))
ORIENTATIONS = ((True, True), (True, False), (False, True), (False, False))


def check(x, dtype, power_of_two, rows, cols, device, replay):
    """Requested outputs have the definition's data and scales, row-major; others are empty."""
    got = launcher("cast_rowwise", "_launch", device)(x, dtype, power_of_two, rows, cols)
    for wanted, source, data, scale in ((rows, x, *got[:2]), (cols, x.t(), *got[2:])):
        if not wanted:
            assert data.shape == scale.shape == (0, 0)
            continue
        codes, expected = definition.cast_dynamic(
            source, BY_ROW, dtype, scale_format_of(power_of_two)
        )
        assert_bitwise(scale, expected, replay, "scale")
        assert_bitwise(data, codes, replay, "data")
        assert data.is_contiguous()
        assert scale.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=SHAPES, layout=LAYOUTS, dtype=FORMATS)
def test_agrees(shape, layout, dtype, device):
    case = Case(shape, torch.bfloat16, fill="wide", layout=layout)
    check(case.make(device), dtype, True, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=[(32, 144), (5, 123)], layout=LAYOUTS, wanted=ORIENTATIONS[1:])
def test_writes_what_is_asked_for(shape, layout, wanted, device):
    case = Case(shape, torch.bfloat16, layout=layout, seed=1)
    check(case.make(device), torch.float8_e4m3fn, True, *wanted, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), source=HIGH_PRECISION, cols=[True, False])
def test_special_values(special, source, cols, device):
    """A special value reaches its own row and column, and no other."""
    case = Case((32, 48), source, fill="one_large", specials=(special,), seed=2)
    dtype, power_of_two = FORMATS[source == torch.bfloat16], source != torch.float32
    check(case.make(device), dtype, power_of_two, True, cols, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(exponent=[-140, -126, -60, 100, 126], power_of_two=[False, True], dtype=FORMATS)
def test_far_exponents(exponent, power_of_two, dtype, device):
    case = Case((16, 40), torch.float32, exponent=exponent, fill="wide", seed=4)
    check(case.make(device), dtype, power_of_two, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_line_has_its_own_scale(power_of_two, device):
    """Magnitudes differ by powers of ten between lines: another line's scale changes the data."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 96, generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (64, 1), generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (1, 96), generator=generator)
    check(x.to(device), torch.float8_e4m3fn, power_of_two, True, True, device, "seed 5")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [16384, 16385, 24001])
def test_rows_longer_than_a_program_holds(K, device):
    x = Case((2, K), torch.bfloat16, fill="wide", seed=6).make(device)
    x[0, -1] = 64.0  # the largest of its row, in its last chunk
    check(x, torch.float8_e4m3fn, True, True, False, device, f"seed 6, K={K}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty(shape, device):
    check(Case(shape).make(device), torch.float8_e5m2, False, True, True, device, shape)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(32, 48), (1, 5), (0, 16)],
    layout=["contiguous", "transposed"],
    wanted=ORIENTATIONS[::2],
)
def test_opcheck(shape, layout, wanted, device):
    x = Case(shape, torch.bfloat16, layout=layout).make(device)
    torch.library.opcheck(cast_rowwise, (x, torch.float8_e4m3fn, True, *wanted))
