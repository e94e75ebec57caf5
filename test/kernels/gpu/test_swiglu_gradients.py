"""`swiglu_gradients`: as close to float64 as float32 can be, and cast to the bit.

y has the bits of `swiglu_cast`. Gradients may have the codes that ``test_swiglu_cast.py`` explains.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from kernels.gpu.test_swiglu_cast import bounds, check_cast
from shapes import DEVICES, FORMATS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.swiglu_cast import swiglu_cast
from float8.kernels.gpu.swiglu_gradients import swiglu_gradients
from float8.kernels.matrix import BY_128

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def make(shape, dtype, layout, device):
    """What replays them, grad_y, gate and up."""
    if layout == "halves":
        both = Case((shape[0], 2 * shape[1]), dtype, exponent=1, seed=5)
        grad = Case(shape, dtype, seed=7)
        return (both, grad), grad.make(device), *both.make(device).chunk(2, 1)
    cases = [Case(shape, dtype, layout=layout, exponent=1, seed=seed) for seed in (7, 5, 6)]
    return cases, *(case.make(device) for case in cases)


def bounds_of_gradients(grad, gate, up):
    """For the gradients of gate and of up."""
    grad64, gate64, up64 = (t.cpu().double() for t in (grad, gate, up))
    s = gate64.sigmoid()
    of_gate, of_up = grad64 * up64 * s, grad64 * gate64 * s
    exact = of_gate * (1 + gate64 * (1 - s))
    gates = bounds(exact, of_gate * (1 + gate64.abs()), grad.dtype)
    return gates, bounds(of_up, of_up, grad.dtype)


def copy_of(x):
    """E4M3 in groups of 128 of a row."""
    largest = definition.amax(x, BY_128)
    name = definition.scale_format_of(True)
    scale = definition.scale_from_amax(largest, torch.finfo(E4M3).max, name)
    return definition.cast_by_scale(x, scale, BY_128, E4M3), scale


def check(
    shape, dtype, layout, joined, given, device, formats=(E4M3, E5M2), pow2=False, cols=True,
    y_cols=True, finds_amax=True, copies=False, by_definition=False,
):  # fmt: skip
    cases, grad, gate, up = make(shape, dtype, layout, device)
    replay = (cases, joined, given, formats, pow2)
    y_scale = torch.tensor([[0.021]], device=device)
    scales = [None, None]
    if given:
        scales = [torch.tensor([[s]], device=device) for s in (0.013, 0.0007)]
    cast, launch = swiglu_cast, swiglu_gradients
    if not by_definition:
        cast, launch = (launcher(op, op, device) for op in ("swiglu_cast", "swiglu_gradients"))
    how = (*formats, pow2, joined, y_cols, cols, finds_amax)
    operands, groups = (gate, up), ()
    if copies:  # the expected bits are those of their values
        operands, groups = zip(*[copy_of(t) for t in (gate, up)], strict=True)
        both = zip(operands, groups, strict=True)
        gate, up = [definition.dequantize(*of, BY_128, dtype) for of in both]
    out = launch(grad, *operands, y_scale, *scales, *how, *groups)
    y_t = cast(gate, up, y_scale, formats[0], False)[0]
    y_t = y_t.view(torch.uint8).t().contiguous().view(formats[0])
    assert_bitwise(out[0], y_t if y_cols else y_t.new_empty(0, 0), replay, "y_t")
    M, F = shape
    assert out[1].shape == ((M, 2 * F) if joined else (2, M, F))
    between = bounds_of_gradients(grad, gate, up)
    between = [[torch.cat(sides, 1) for sides in zip(*between, strict=True)]] if joined else between
    for i, (part, given) in enumerate(zip(between, scales, strict=False)):
        data, data_t, scale, amax = (t if joined or not t.numel() else t[i] for t in out[1:])
        check_cast(data, scale, amax, part, given, pow2, replay, f"part {i}")
        data_t = data_t.view(torch.uint8)
        want = data.view(torch.uint8).t().contiguous() if cols else data_t.new_empty(0, 0)
        assert_bitwise(data_t, want, replay, f"data_t {i}")
        assert amax.numel() == finds_amax


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(80, 144), (5, 123), (32, 64)],
    dtype=[F32, F16],
    layout=["contiguous", "transposed", "sliced", "halves"],
    joined=[False, True],
    given=[False, True],
    formats=[(E4M3, FORMATS[0]), (E4M3, FORMATS[1])],
    pow2=[False, True],
    cols=[False, True],
    y_cols=[False, True],
    finds_amax=[False, True],
    copies=[False, True],
)
def test_gradients_and_y(
    shape, dtype, layout, joined, given, formats, pow2, cols, y_cols, finds_amax, copies, device
):
    dtype = BF16 if (device, dtype) == ("cuda", F16) else dtype
    how = (formats, pow2, cols, y_cols, finds_amax, copies)
    check(shape, dtype, layout, joined, given, device, *how)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_the_definition(joined, given, copies):
    for dtype in (F32, BF16, F16):
        how = {"copies": copies, "by_definition": True}
        check((5, 123), dtype, "contiguous", joined, given, "cpu", **how)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("joined", [False, True])
def test_a_nan_is_seen_and_infinity_is_no_number(joined, device):
    grad = torch.ones(4, 16, device=device)
    gate, up = torch.full_like(grad, 0.5), torch.full_like(grad, 2.0)
    grad[1, 3] = torch.nan
    grad[2, 5] = torch.inf
    one = torch.ones(1, 1, device=device)
    launch = launcher("swiglu_gradients", "swiglu_gradients", device)
    how = (E4M3, E5M2, False, joined, True, True, True)
    for given in (one, None):
        _, data, _, scale, amax = launch(grad, gate, up, one, given, given, *how)
        assert amax.isnan().all() and scale.isnan().all() == (given is None)
        halves = data.chunk(2, 1) if joined else data
        for half in halves:
            wrong = half.float().isnan()
            assert (
                wrong.all() if given is None else wrong.sum() == 2 and wrong[1, 3] and wrong[2, 5]
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("joined", [False, True])
def test_empty(joined, device):
    gate, one = torch.empty(0, 16, device=device), torch.ones(1, 1, device=device)
    launch = launcher("swiglu_gradients", "swiglu_gradients", device)
    out = launch(gate, gate, gate, one, None, None, E4M3, E5M2, False, joined, True, True, True)
    assert out[0].shape == (16, 0) and out[4].eq(0).all()
    assert out[3].eq(definition.MIN_SCALE).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 48), (1, 5), (0, 16)])
@pytest.mark.parametrize("joined", [False, True])
def test_opcheck(shape, joined, device):
    _, grad, gate, up = make(shape, BF16, "contiguous", device)
    one = torch.ones(1, 1, device=device)
    for scales in ((one, one), (None, None)):
        for wanted in ((True, True, True), (False, False, False)):
            how = (E4M3, E5M2, True, joined, *wanted)
            torch.library.opcheck(swiglu_gradients, (grad, gate, up, one, *scales, *how))
            (a, a_groups), (b, b_groups) = copy_of(gate), copy_of(up)
            how = (*how, a_groups, b_groups)
            torch.library.opcheck(
                swiglu_gradients, (grad, a, b, one, *scales, *how), test_utils="test_faketensor"
            )
