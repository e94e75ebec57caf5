"""`swiglu_cast`: as close to float64 as float32 can be, and cast to the bit.

Exponentials are not defined to the bit. A code is right if some float32 within 2^-20 of the exact
value has it: most often that leaves one code, and never more than two.
"""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS, LAYOUTS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.swiglu_cast import swiglu_cast

E4M3 = torch.float8_e4m3fn
WHOLE = (-1, -1)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def make(shape, dtype, device, layout="contiguous"):
    """What replays them, gate and up."""
    if layout == "halves":
        case = Case((shape[0], 2 * shape[1]), dtype, exponent=1, seed=5)
        return case, *case.make(device).chunk(2, 1)
    cases = [Case(shape, dtype, layout=layout, exponent=1, seed=seed) for seed in (5, 6)]
    return cases, *(case.make(device) for case in cases)


def bounds(exact, magnitude, dtype):
    """The values that may be rounded to: from those a little below the exact ones to those above.

    ``magnitude`` is that of the terms whose sum is ``exact``.
    """
    margin = magnitude.abs() * 2.0**-20
    return [(exact + sign * margin).float().to(dtype) for sign in (-1, 1)]


def bounds_of_y(gate, up):
    exact = F.silu(gate.cpu().double()) * up.cpu().double()
    return bounds(exact, exact, gate.dtype)


def check_cast(data, scale, amax, between, given, pow2, replay, name="data"):
    """Codes, scale and amax (if any) are those of values between the bounds."""
    data, scale, dtype = data.cpu(), scale.cpu(), data.dtype
    low, high = (
        oracle.values(oracle.cast(y.float(), scale, WHOLE, dtype), scale, WHOLE, dtype)
        for y in between
    )
    found = oracle.values(data, scale, WHOLE)
    outside = (found < low) | (found > high)
    assert not outside.any(), f"{name}: {outside.nonzero()[:3].tolist()}\n  replay: {replay}"
    assert data.is_contiguous()
    magnitudes = torch.stack(between).abs().float().flatten(1)
    low, high = magnitudes.amin(0).amax(), magnitudes.amax(0).amax()
    if amax.numel():
        assert low <= amax.cpu() <= high, f"the amax of {name}\n  replay: {replay}"
        low = high = amax.cpu()
    if given is None:
        of = torch.finfo(dtype).max, definition.scale_format_of(pow2)
        low, high = (definition.scale_from_amax(y, *of) for y in (low, high))
        assert low <= scale <= high, f"the scale of {name}\n  replay: {replay}"
    else:
        assert_bitwise(scale, given.cpu(), replay, f"scale of {name}")


def check(shape, dtype, scale, layout, device, format=E4M3, pow2=False, finds_amax=True):
    cases, gate, up = make(shape, dtype, device, layout)
    given = None if scale is None else torch.tensor([[scale]], device=device)
    launch = launcher("swiglu_cast", "swiglu_cast", device)
    got = launch(gate, up, given, format, pow2, finds_amax)
    assert got[2].numel() == finds_amax
    check_cast(*got, bounds_of_y(gate, up), given, pow2, (cases, scale, format))


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(80, 144), (5, 123)],
    dtype=[F32, F16],
    scale=[None, 0.037],
    layout=[*LAYOUTS, "halves"],
    format=FORMATS,
    pow2=[False, True],
    finds_amax=[False, True],
)
def test_data_and_amax(shape, dtype, scale, layout, format, pow2, finds_amax, device):
    dtype = BF16 if (device, dtype) == ("cuda", F16) else dtype
    check(shape, dtype, scale, layout, device, format, pow2, finds_amax)


def test_the_check_sees_a_wrong_function():
    cases, gate, up = make((8, 16), F16, "cpu")
    scale = torch.tensor([[0.02]])
    rest = bounds_of_y(gate, up), scale, False, cases
    check_cast(*swiglu_cast(gate, up, scale, E4M3, False), *rest)
    for wrong in ((up, gate), (gate, up / gate)):  # exchanged, or the sigmoid alone
        with pytest.raises(AssertionError, match="replay"):
            check_cast(*swiglu_cast(*wrong, scale, E4M3, False), *rest)


@pytest.mark.parametrize("device", DEVICES)
def test_large_gates_neither_overflow_nor_vanish(device):
    gate = torch.tensor([[100.0, -100.0, 1e30, -1e30, 0.0, -0.0]], device=device)
    launch, one = launcher("swiglu_cast", "swiglu_cast", device), torch.ones(1, 1, device=device)
    data, *_ = launch(gate, torch.ones_like(gate), one, E4M3, False)
    assert data.float().cpu().tolist() == [[96.0, 0.0, 448.0, 0.0, 0.0, 0.0]]
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]], device=device)
    data, _, seen = launch(special, torch.ones_like(special), one, E4M3, False, True)
    assert data.float().isnan().cpu().tolist() == [[True, True, True, False]]
    assert seen.isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_more_tiles_than_programs(device):
    """The amax pass walks: its programs, 2 of them here, see every tile, the last one too."""
    gate = torch.zeros(32 * 5 - 1, 2, device=device)
    gate[-1, -1] = 40.0
    launch = launcher("swiglu_cast", "_partial_amaxes", device)
    partials = launch(gate, torch.ones_like(gate), 2)
    assert partials.shape == (2,)
    assert partials.view(F32).max().item() == 40.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_empty(scale, device):
    gate = torch.empty(0, 16, device=device)
    given = None if scale is None else torch.full((1, 1), scale, device=device)
    launch = launcher("swiglu_cast", "swiglu_cast", device)
    data, found, amax = launch(gate, gate, given, E4M3, False, True)
    assert data.shape == (0, 16)
    assert found.item() == (scale or definition.MIN_SCALE) and amax.item() == 0


def test_the_definition_is_the_unfused_chain():
    for dtype in (F32, BF16, F16):
        _, gate, up = make((9, 40), dtype, "cpu")
        scale = torch.tensor([[0.02]])
        data, found, _ = swiglu_cast(gate, up, scale, E4M3, False)
        expected = definition.cast_by_scale(
            (F.silu(gate.float()) * up.float()).to(dtype), scale, WHOLE, E4M3
        )
        assert_bitwise(data, expected)
        assert_bitwise(found, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 48), (1, 5), (0, 16)])
def test_opcheck(shape, device):
    """Schema, fake and mutation are what the op says, on every device."""
    _, gate, up = make(shape, BF16, device)
    scale = torch.ones(1, 1, device=device)
    torch.library.opcheck(swiglu_cast, (gate, up, scale, E4M3, False, True))
    torch.library.opcheck(swiglu_cast, (gate, up, None, E4M3, True))
