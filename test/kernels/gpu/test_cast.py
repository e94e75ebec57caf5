"""`cast`, `cast_dynamic`: the kernel has the definition's bits, in both orientations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.definition import scale_format_of
from float8.kernels.gpu.cast import cast, cast_dynamic

E4M3, WHOLE = torch.float8_e4m3fn, (-1, -1)
SHAPES = ((80, 272), (5, 123), (1, 128), (130, 257))


def check(got, x, scale, dtype, replay):
    """Both orientations hold the definition's data, row-major."""
    expected = definition.cast(x, scale.reshape(1, 1), WHOLE, dtype)
    data, data_t = got[:2]
    assert_bitwise(data, expected, replay, "data")
    assert_bitwise(data_t, expected.t(), replay, "data_t")
    assert data.is_contiguous() and data_t.is_contiguous()


def check_dynamic(got, x, dtype, power_of_two, seen, replay):
    found = definition.amax(x, WHOLE)
    assert_bitwise(seen.reshape(1, 1), found, replay, "recorded amax")
    expected = definition.scale_from_amax(
        found, torch.finfo(dtype).max, scale_format_of(power_of_two)
    )
    assert_bitwise(got[2], expected, replay, "scale")
    check(got, x, expected, dtype, replay)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=SHAPES, layout=LAYOUTS, dtype=FORMATS)
def test_given_scale(shape, layout, dtype, device):
    case = Case(shape, torch.bfloat16, fill="wide", exponent=9, layout=layout)
    x = case.make(device)
    scale = torch.tensor([[0.37]], device=device)
    seen = torch.tensor(3.0, device=device)
    got = launcher("cast", "cast", device)(x, scale, dtype, True, True, seen)
    check(got, x, scale, dtype, case)
    assert_bitwise(seen, x.abs().amax().float().clamp(min=3.0), case, "recorded amax")


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=SHAPES[:2],
    layout=["contiguous", "transposed", "sliced"],
    source=HIGH_PRECISION,
    power_of_two=[False, True],
)
def test_dynamic(shape, layout, source, power_of_two, device):
    case = Case(shape, source, fill="one_large", layout=layout, seed=1)
    x, seen = case.make(device), torch.tensor(0.0, device=device)
    got = launcher("cast", "cast_dynamic", device)(x, E4M3, power_of_two, True, True, seen)
    check_dynamic(got, x, E4M3, power_of_two, seen, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), exponent=[-130, 0, 120], dtype=FORMATS)
def test_special_values(special, exponent, dtype, device):
    case = Case((32, 48), torch.float32, exponent=exponent, specials=(special,), seed=2)
    x, scale = case.make(device), torch.tensor([[1.5]], device=device)
    seen = torch.zeros(2, device=device)
    got = launcher("cast", "cast", device)(x, scale, dtype, True, True, seen[0])
    check(got, x, scale, dtype, case)
    assert_bitwise(seen[:1, None], definition.amax(x, WHOLE), case, "recorded amax")
    got = launcher("cast", "cast_dynamic", device)(x, dtype, False, True, True, seen[1])
    check_dynamic(got, x, dtype, False, seen[1], case)


@pytest.mark.parametrize("device", DEVICES)
def test_more_tiles_than_programs(device):
    """Each program of the amax pass reads several tiles, and the last one is read too."""
    x = torch.zeros(64 * 5, 8, device=device)
    x[-1, -1] = 5.0
    partials = launcher("amax", "partial_amaxes", device)(x, 2)
    assert partials.shape == (2,)
    assert partials.max().view(torch.float32).item() == 5.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [16, 80, 15, 17])  # packed where 16 divides them, else byte-wise
def test_every_row_goes_to_its_own_byte(rows, device):
    """All codes of a row are the row's number: a byte in the wrong place has the wrong number."""
    numbers = (torch.arange(rows) % 120).to(torch.uint8)
    x = numbers.view(E4M3).float()[:, None].expand(rows, 130).contiguous().to(device)
    one = torch.ones(1, 1, device=device)
    data, data_t = launcher("cast", "cast", device)(x, one, E4M3, True, True)
    assert torch.equal(data.cpu().view(torch.uint8), numbers[:, None].expand(rows, 130))
    assert torch.equal(data_t.cpu().view(torch.uint8), numbers.expand(130, rows))


@pytest.mark.parametrize("device", DEVICES)
def test_a_given_scale_is_read_and_not_written(device):
    scale = torch.full((1, 1), 0.5, device=device)
    before = scale._version
    x = torch.full((16, 16), 3.0, device=device)
    data, _ = launcher("cast", "cast", device)(x, scale, E4M3, True, False)
    assert data.float().eq(6.0).all()
    assert (scale.item(), scale._version) == (0.5, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "cols"), [(True, False), (False, True), (False, False)])
def test_writes_what_is_asked_for(rows, cols, device):
    x = Case((32, 64), torch.bfloat16, layout="transposed").make(device)
    dtype = torch.float8_e4m3fn
    full = launcher("cast", "cast_dynamic", device)(x, dtype, False, True, True, None)
    part = launcher("cast", "cast_dynamic", device)(x, dtype, False, rows, cols, None)
    nothing = x.new_empty((0, 0)).to(dtype)
    assert_bitwise(part[0], full[0] if rows else nothing)
    assert_bitwise(part[1], full[1] if cols else nothing)
    assert_bitwise(part[2], full[2])


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
@pytest.mark.parametrize("device", DEVICES)
def test_empty(shape, device):
    x, dtype = torch.empty(shape, device=device), torch.float8_e5m2
    data, data_t, scale = launcher("cast", "cast_dynamic", device)(x, dtype, False, True, True)
    assert (data.shape, data_t.shape, scale.item()) == (shape, shape[::-1], definition.MIN_SCALE)
    data, data_t = launcher("cast", "cast", device)(x, scale, dtype, True, True)
    assert (data.shape, data_t.shape) == (shape, shape[::-1])


@pytest.mark.parametrize("name", ["scale", "amax"])
def test_refuses_tensors_of_another_device(name):
    meta = {name: torch.ones((), device="meta")}
    arguments = {"scale": torch.ones(()), "amax": None} | meta
    function = launcher("cast", "cast", "cpu")
    with pytest.raises(
        ValueError, match=rf"float8::cast: {name} is on meta and the operand on cpu"
    ):
        function(torch.ones(16, 16), dtype=torch.float8_e4m3fn, rows=True, cols=False, **arguments)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(32, 48), (1, 5), (0, 16)],
    layout=["contiguous", "transposed"],
    is_dynamic=[False, True],
    rows=[False, True],
    records=[False, True],
)
def test_opcheck(shape, layout, is_dynamic, rows, records, device):
    """Schema, fake and mutation are what the ops say, on every device."""
    x = Case(shape, torch.bfloat16, layout=layout).make(device)
    seen = (torch.zeros((), device=device),) if records else ()
    if is_dynamic:
        torch.library.opcheck(cast_dynamic, (x, E4M3, rows, rows, True, *seen))
    else:
        scale = torch.ones(1, 1, device=device)
        torch.library.opcheck(cast, (x, scale, E4M3, True, rows, *seen))
