"""`swiglu_cast` and `swiglu_backward`: as close to float64 as float32 can be, and cast to the bit.

Exponentials are not defined to the bit. A code is right if some float32 within 2^-20 of the exact
value has it: most often that leaves one code, and never more than two.
"""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline
from interpreter import launcher
from shapes import DEVICES, FORMATS, LAYOUTS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.swiglu_cast import swiglu_backward, swiglu_cast

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


def clamped(gate, up, limit):
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def bounds(gate, up, compute_dtype, limit=None):
    """The values that y may round to: from those a little below the exact ones to those above."""
    gate, up = clamped(gate.cpu().double(), up.cpu().double(), limit)
    exact = gate * gate.sigmoid() * up
    margin = exact.abs() * 2.0**-20
    return (exact - margin).float().to(compute_dtype), (exact + margin).float().to(compute_dtype)


def amax_bounds(gate, up, compute_dtype, limit, dims):
    magnitudes = torch.stack(bounds(gate, up, compute_dtype, limit)).abs().float()
    return magnitudes.amin(0).amax(dims), magnitudes.amax(0).amax(dims)


def check(got, gate, up, compute_dtype, replay, dtype=E4M3, limit=None):
    data, data_t, scale = (t.cpu() for t in got[:3])
    low, high = (
        oracle.values(oracle.cast(y.float(), scale, WHOLE, dtype), scale, WHOLE, dtype)
        for y in bounds(gate, up, compute_dtype, limit)
    )
    found = oracle.values(data, scale, WHOLE)
    outside = (found < low) | (found > high)
    assert not outside.any(), f"{outside.nonzero()[:3].tolist()}\n  replay: {replay}"
    assert_bitwise(data_t, data.view(torch.uint8).t().contiguous(), replay, "data_t")
    assert data.is_contiguous() and data_t.is_contiguous()


def run(
    device, gate, up, scale, compute_dtype, dtype=E4M3, pow2=False, cols=True, finds_amax=True,
    limit=None,
):  # fmt: skip
    scale = None if scale is None else torch.tensor([[scale]], device=device)
    launch = launcher("swiglu_cast", "swiglu_cast", device)
    return launch(gate, up, limit, scale, compute_dtype, dtype, pow2, cols, finds_amax)


def check_data_and_amax(
    shape, dtypes, scale, layout, device, dtype=E4M3, pow2=False, cols=True, finds_amax=True,
    limit=None,
):  # fmt: skip
    source, compute = dtypes
    cases, gate, up = make(shape, source, device, layout)
    got = run(device, gate, up, scale, compute, dtype, pow2, cols, finds_amax, limit=limit)
    if not cols:
        assert got[1].shape == (0, 0)
        got = (got[0], got[0].view(torch.uint8).t().contiguous().view(dtype), *got[2:])
    check(got, gate, up, compute, (cases, limit), dtype, limit=limit)
    low, high = amax_bounds(gate, up, compute, limit, (0, 1))
    seen = got[3].cpu()
    assert low <= seen <= high if finds_amax else seen.numel() == 0
    if scale is None:
        amaxes = [seen] * 2 if finds_amax else [low, high]
        largest, scale_format = torch.finfo(dtype).max, definition.scale_format_of(pow2)
        low, high = (definition.scale_from_amax(y, largest, scale_format) for y in amaxes)
        assert low <= got[2].cpu() <= high, cases


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(80, 144), (5, 123)],
    dtypes=[(F32, F32), (BF16, F32), (F16, F16)],
    scale=[None, 0.037],
    layout=[*LAYOUTS, "halves"],
    dtype=FORMATS,
    pow2=[False, True],
    cols=[False, True],
    limit=[None, 1.4],
)
def test_data_and_amax(shape, dtypes, scale, layout, dtype, pow2, cols, limit, device):
    if device == "cuda":  # the interpreter does not round to bfloat16, so it computes none
        dtypes = (dtypes[0], BF16)
    check_data_and_amax(shape, dtypes, scale, layout, device, dtype, pow2, cols, limit=limit)


@pytest.mark.parametrize("device", DEVICES)
def test_large_gates_neither_overflow_nor_vanish(device):
    gate = torch.tensor([[100.0, -100.0, 1e30, -1e30, 0.0, -0.0]], device=device)
    data, *_ = run(device, gate, torch.ones_like(gate), 1.0, F32)
    assert data.float().cpu().tolist() == [[96.0, 0.0, 448.0, 0.0, 0.0, 0.0]]
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]], device=device)
    data, _, _, seen = run(device, special, torch.ones_like(special), 1.0, F32)
    assert data.float().isnan().cpu().tolist() == [[True, True, True, False]]
    assert seen.isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_a_limit_clamps_infinity_and_keeps_nan(device):
    gate = torch.tensor([[torch.inf, 3.0, 1.0, torch.nan, 1.0]], device=device)
    up = torch.tensor([[1.0, torch.inf, -torch.inf, 1.0, torch.nan]], device=device)
    data, *_ = run(device, gate, up, 0.25, F32, limit=2.0)
    found, expected = data[0].float().cpu(), F.silu(torch.tensor([2.0, 2.0, 1.0]))
    expected = expected * torch.tensor([1.0, 2.0, -2.0]) / 0.25
    assert_bitwise(found[:3].to(E4M3), expected.to(E4M3))
    assert found[3:].isnan().all()
    g = torch.ones_like(gate)
    grad = launcher("swiglu_cast", "swiglu_backward", device)(g, gate, up, 2.0)[0].cpu()
    assert grad[[0, 1, 6, 7]].tolist() == [0] * 4
    assert grad[[3, 4, 8]].isnan().all() and grad[[2, 5, 9]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_more_tiles_than_programs(device):
    """The amax pass walks: its programs, 2 of them here, see every tile, the last one too."""
    gate = torch.zeros(32 * 5 - 1, 2, device=device)
    gate[-1, -1] = 40.0
    launch = launcher("swiglu_cast", "_partial_amaxes", device)
    partials = launch(gate, torch.ones_like(gate), F32, 2)
    assert partials.shape == (2,)
    assert partials.view(F32).max().item() == 40.0


def gradients(g, gate, up, dtype, limit):
    """(M, 2 F) by autograd, in a dtype."""
    gate, up = (t.detach().cpu().to(dtype).requires_grad_() for t in (gate, up))
    most_gate, most_up = clamped(gate, up, limit)
    (F.silu(most_gate) * most_up).backward(g.cpu().to(dtype))
    return torch.cat([gate.grad, up.grad], 1)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(40, 144), (5, 123)],
    layout=["contiguous", "transposed", "sliced", "expanded"],
    dtype=[F32, F16],
    limit=[None, 0.7],
)
def test_backward(shape, layout, dtype, limit, device):
    dtype = BF16 if (device, dtype) == ("cuda", F16) else dtype
    check_backward(shape, layout, device, dtype, limit)


def check_backward(shape, layout, device, dtype, limit=None, change=lambda out: out):
    cases, gate, up = make(shape, dtype, device, layout)
    g = Case(shape, dtype, layout=layout, seed=7).make(device)
    out = change(launcher("swiglu_cast", "swiglu_backward", device)(g, gate, up, limit)).cpu()
    exact = gradients(g, gate, up, torch.float64, limit)
    plain = gradients(g, gate, up, F32, limit).to(dtype)
    for half in (slice(0, shape[1]), slice(shape[1], None)):
        assert_error_within_baseline(
            out[:, half], exact[:, half], plain[:, half], 2.0, (cases, limit), f"half {half}"
        )


@pytest.mark.parametrize(
    "fault",
    [lambda out: out.sign(), lambda out: out.roll(out.shape[1] // 2, 1), lambda out: 0 * out],
)
def test_the_check_of_backward_sees_faults(fault):
    with pytest.raises(AssertionError, match="replay"):
        check_backward((5, 24), "contiguous", "cpu", F32, change=fault)


def test_the_check_of_codes_sees_faults():
    """gate and up exchanged, the sigmoid alone, one code off, no transpose."""
    cases, gate, up = make((8, 16), F16, "cpu")
    scale = torch.tensor([[0.02]])
    good = swiglu_cast(gate, up, None, scale, F16, E4M3, False, True)
    check(good, gate, up, F16, cases)
    off_by_one = (good[0].view(torch.uint8) ^ 1).view(E4M3)
    for bad in (
        swiglu_cast(up, gate, None, scale, F16, E4M3, False, True),
        swiglu_cast(gate, up / gate, None, scale, F16, E4M3, False, True),
        (off_by_one, off_by_one.view(torch.uint8).t().contiguous().view(E4M3), scale),
        (good[0], good[1].flip(0), scale),
    ):
        with pytest.raises(AssertionError, match="replay"):
            check(bad, gate, up, F16, cases)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_empty(scale, device):
    gate = torch.empty(0, 16, device=device)
    data, data_t, found, amax = run(device, gate, gate, scale, F32)
    assert (data.shape, data_t.shape) == ((0, 16), (16, 0))
    assert found.item() == (scale or definition.MIN_SCALE) and amax.item() == 0
    assert launcher("swiglu_cast", "swiglu_backward", device)(gate, gate, gate).shape == (0, 32)


def test_the_definition_is_the_unfused_chain():
    for dtype in (F32, BF16, F16):
        _, gate, up = make((9, 40), dtype, "cpu")
        scale = torch.tensor([[0.02]])
        data, data_t, found, _ = swiglu_cast(gate, up, None, scale, dtype, E4M3, False, True)
        expected = definition.cast_by_scale(
            (F.silu(gate.float()) * up.float()).to(dtype), scale, WHOLE, E4M3
        )
        assert_bitwise(data, expected)
        assert_bitwise(data_t, expected.t())
        assert_bitwise(found, scale)


X = torch.ones(4, 16)
FORWARD = (F32, E4M3, False, True, False)
REFUSED = [
    (
        "swiglu_cast",
        (X, X[:, :8], None, None, *FORWARD),
        r"up has shape \(4, 8\) and gate \(4, 16\)",
    ),
    ("swiglu_backward", (X[:2], X, X), r"grad has shape \(2, 16\) and gate"),
    ("swiglu_cast", (X, X, None, torch.ones((), device="meta"), *FORWARD), "scale is on meta"),
]


@pytest.mark.parametrize(("name", "given", "words"), REFUSED)
def test_what_a_kernel_would_read_past_is_refused(name, given, words):
    with pytest.raises(ValueError, match=f"swiglu_.*: {words}"):
        launcher("swiglu_cast", name, "cpu")(*given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 48), (1, 5), (0, 16)])
def test_opcheck(shape, device):
    """Schema, fake and mutation are what the ops say, on every device."""
    _, gate, up = make(shape, BF16, device)
    scale = torch.ones(1, 1, device=device)
    torch.library.opcheck(swiglu_cast, (gate, up, None, scale, BF16, E4M3, False, True, True))
    torch.library.opcheck(swiglu_cast, (gate, up, 2.0, None, F32, E4M3, True, False))
    torch.library.opcheck(swiglu_backward, (gate, gate, up))
    torch.library.opcheck(swiglu_backward, (gate, gate, up, 2.0))
