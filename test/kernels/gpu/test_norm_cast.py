"""`norm_cast`: the oracle's data, given the statistics, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline, error
from interpreter import launcher
from shapes import DEVICES, FORMATS, LAYOUTS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.norm_cast import norm_cast

E4M3, EPS, WHOLE = torch.float8_e4m3fn, 1e-5, (-1, -1)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FORMS = {"dynamic": None, "given": 0.037}  # the scale
# norm -> has a weight, has a bias, is centred
NORMS = {
    "rms": (False, False, False),
    "rms, weight": (True, False, False),
    "layer": (False, False, True),
    "layer, weight": (True, False, True),
    "layer, weight and bias": (True, True, True),
}
BOTH = ("rms, weight", "layer, weight and bias")


class NormParameters(NamedTuple):
    """The arguments of the op that follow x."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    is_centred: bool


def make(shape, norm, device, dtypes=(F32, F32), layout="contiguous", fill="normal", eps=EPS):
    """What replays it, x, and the norm."""
    has_weight, has_bias, is_centred = NORMS[norm]
    case = Case(shape, dtypes[0], layout=layout, fill=fill, seed=3)
    weight, bias = (
        Case((shape[1],), dtypes[1], seed=seed).make(device) if wanted else None
        for wanted, seed in ((has_weight, 4), (has_bias, 5))
    )
    x = case.make(device) + 0.5 if is_centred else case.make(device)
    return (case, norm), x, NormParameters(weight, bias, eps, is_centred)


def run(x, norm, form, compute=F32, dtype=E4M3, pow2=False, cols=True, finds_amax=True):
    """(data, data_t, scale, amax, mean or None, rstd) of the kernel, on x's device."""
    scale = FORMS[form]
    scale = None if scale is None else torch.tensor([[scale]], device=x.device)
    launch = launcher("norm_cast", "_launch", x.device.type)
    return launch(x, *norm, scale, compute, dtype, pow2, cols, finds_amax)


def op_of(x, norm, scale, compute):
    """The same results of the registered op."""
    return norm_cast(x, *norm, scale, compute, E4M3, False, True)


def y_of(x, norm, mean, rstd, compute):
    y = (x.float() - mean if norm.is_centred else x.float()) * rstd
    y = y if norm.weight is None else y * norm.weight.float()
    return (y if norm.bias is None else y + norm.bias.float()).to(compute)


def rstd_of(x, is_centred, eps=EPS):
    x = x - x.mean(1, keepdim=True) if is_centred else x
    return (x.square().mean(1, keepdim=True) + eps).rsqrt()


def check(got, x, norm, compute, replay, dtype=E4M3):
    """Statistics are right to a few ulps, and given them the data is the oracle's, both ways."""
    data, data_t, scale, _, mean, rstd = (None if t is None else t.cpu() for t in got)
    x = x.cpu()
    norm = NormParameters(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in norm))
    exact, plain = (rstd_of(x.to(d), norm.is_centred, norm.eps) for d in (torch.float64, F32))
    assert_error_within_baseline(rstd, exact, plain, 4.0, replay, "rstd")
    if norm.is_centred:
        means = x.double().mean(1, keepdim=True), x.float().mean(1, keepdim=True)
        assert_error_within_baseline(mean, *means, 4.0, replay, "mean")
    expected = oracle.cast(y_of(x, norm, mean, rstd, compute), scale, WHOLE, dtype)
    assert_bitwise(data, expected, replay, "data")
    assert_bitwise(data_t, expected.t(), replay, "data_t")
    assert data.is_contiguous() and data_t.is_contiguous()


def check_form(
    shape,
    norm,
    form,
    device,
    dtypes,
    layout,
    fill,
    dtype=E4M3,
    pow2=False,
    cols=True,
    finds_amax=True,
):
    replay, x, norm = make(shape, norm, device, dtypes, layout, fill)
    got = run(x, norm, form, dtypes[2], dtype, pow2, cols, finds_amax)
    if not cols:
        assert got[1].shape == (0, 0)
        got = (got[0], got[0].view(torch.uint8).t().contiguous().view(dtype), *got[2:])
    check(got, x, norm, dtypes[2], (replay, form), dtype)
    amax = y_of(x, norm, *got[4:], dtypes[2]).abs().amax().float().reshape(1, 1)
    if finds_amax:
        assert_bitwise(got[3], amax, (replay, form), "amax")
    else:
        assert got[3].numel() == 0
    if form == "dynamic":
        largest, scale_format = torch.finfo(dtype).max, definition.scale_format_of(pow2)
        expected = definition.scale_from_amax(amax, largest, scale_format)
        assert_bitwise(got[2], expected, replay, "scale")


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    norm=list(NORMS),
    form=list(FORMS),
    shape=[(48, 144), (5, 123), (4, 1100), (37, 1)],
    dtypes=[(F32, F32, F32), (BF16, F32, F32), (F16, F16, F16), (F32, BF16, F16)],
    layout=LAYOUTS,
    fill=["normal", "one_large"],
    dtype=FORMATS,
    pow2=[False, True],
    cols=[False, True],
)
def test_data_and_amax(norm, form, shape, dtypes, layout, fill, dtype, pow2, cols, device):
    if device == "cuda":  # the interpreter does not round to bfloat16, so it computes none
        dtypes = (*dtypes[:2], BF16)
    check_form(shape, norm, form, device, dtypes, layout, fill, dtype, pow2, cols)


@pytest.mark.parametrize("device", DEVICES)
@pairs(norm=BOTH, form=list(FORMS), eps=[1e-6, 0.0])
def test_special_rows(norm, form, eps, device):
    """Zeros or a constant are the bias, or NaN without eps; inf and NaN stay in their rows."""
    _, x, norm = make((5, 40), norm, device, eps=eps)
    x[0], x[1, 3], x[2, 5] = (3e4 if norm.is_centred else 0.0), torch.inf, torch.nan
    data, data_t, scale, amax, mean, rstd = run(x, norm, form)
    assert amax.isnan() and rstd[0].isinf() == (eps == 0) and rstd[2].isnan()
    assert rstd[1].isnan() if norm.is_centred else rstd[1] == 0
    assert_bitwise(data_t, data.view(torch.uint8).t().contiguous().view(E4M3))
    if form != "dynamic":
        y = y_of(x, norm, mean, rstd, F32).cpu()
        assert_bitwise(data, oracle.cast(y, scale.cpu(), WHOLE, E4M3))
        assert data[3:].float().isfinite().all()
    few = run(x[3:], norm, "dynamic")[3]
    assert few.isfinite()  # rows past the last one, which are NaN without eps, are not looked at


@pytest.mark.parametrize("device", DEVICES)
@pairs(norm=["rms", "layer"], form=list(FORMS))
def test_empty(norm, form, device):
    x, norm = torch.empty(0, 16, device=device), NormParameters(None, None, EPS, norm == "layer")
    data, data_t, scale, amax, mean, rstd = run(x, norm, form)
    assert (data.shape, data_t.shape, rstd.shape) == ((0, 16), (16, 0), (0, 1))
    assert mean.shape == (0, 1) if norm.is_centred else mean is None
    assert_bitwise(scale.cpu(), torch.full((1, 1), FORMS[form] or definition.MIN_SCALE))
    assert_bitwise(amax.cpu(), torch.zeros(1, 1))


# --- the statistics


def statistics(device, x, is_centred, amax=True):
    """(partial amaxes, mean, rstd) of the first pass, by at most two programs."""
    norm = NormParameters(torch.ones(x.shape[1], device=device), None, EPS, is_centred)
    mean = torch.full((len(x), 1), torch.nan, device=device) if is_centred else None
    rstd = torch.full((len(x), 1), torch.nan, device=device)
    launch = launcher("norm_cast", "_statistics", device)
    return launch(x, *norm[:3], mean, rstd, F32, amax, 2), mean, rstd


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_centred", [False, True])
def test_more_rows_than_programs(is_centred, device):
    """Each program of the first pass reads several blocks of rows, the last one too."""
    generator = torch.Generator().manual_seed(3)
    x = (1e-2 * torch.randn(4 * 5 - 1, 4, generator=generator)).to(device)
    x[-1, 0] = 5.0
    partials, mean, rstd = statistics(device, x, is_centred)
    assert partials.shape == (2,)
    off = x - mean if is_centred else x
    assert_bitwise(partials.view(F32).max(), (off * rstd).abs().max())
    exact, plain = (rstd_of(x.cpu().to(dtype), is_centred) for dtype in (torch.float64, F32))
    assert_error_within_baseline(rstd, exact, plain, 4.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [5, 1023, 2500])
def test_a_large_mean_costs_no_digits_of_the_variance(columns, device):
    """mean(x^2) - mean(x)^2 in float32 would have none left: 1e3 squared is 1e6 variances."""
    generator = torch.Generator().manual_seed(columns)
    x = (1e3 + torch.randn(10, columns, generator=generator)).to(device)
    x[1] = -x[1]
    x[2:, 0] = -1e4  # the first element says nothing of the others
    _, mean, rstd = statistics(device, x, True, amax=False)
    exact = x.double().cpu()
    assert_error_within_baseline(
        mean, exact.mean(1, keepdim=True), x.cpu().mean(1, keepdim=True), 4.0, what="mean"
    )
    square, of_mean = (t.cpu().float() for t in (x.square().mean(1), x.mean(1).square()))
    lost = error((square - of_mean + EPS).rsqrt()[:2, None], rstd_of(exact, True)[:2])
    assert error(rstd[:2], rstd_of(exact, True)[:2]) < 1e-3 * lost
    assert_error_within_baseline(rstd[2:], rstd_of(exact, True)[2:], rstd_of(x.cpu(), True)[2:], 4)


# --- the ops, and the check itself


@pytest.mark.parametrize("norm", BOTH)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_definition_is_the_unfused_chain(norm, dtype):
    replay, x, norm = make((9, 40), norm, "cpu", (dtype, dtype))
    scale = torch.tensor([[0.02]])
    got = op_of(x, norm, scale, dtype)
    check(got, x, norm, dtype, replay)
    assert_bitwise(got[2], scale)
    y = y_of(x, norm, *got[4:], dtype)
    function = F.layer_norm if norm.is_centred else F.rms_norm
    exact, plain = (
        function(x.to(d), (40,), *(t.to(d) for t in norm[:2] if t is not None), eps=norm.eps)
        for d in (torch.float64, F32)
    )
    assert_error_within_baseline(y, exact, plain.to(dtype))


def test_the_check_sees_faults():
    """A forgotten weight, bias or mean, another row's rstd, a rounding too few, no transpose."""
    scale = torch.tensor([[0.02]])
    for name in BOTH:
        replay, x, norm = make((32, 64), name, "cpu", (BF16, BF16))
        good = op_of(x, norm, scale, BF16)
        check(good, x, norm, BF16, replay)
        unrounded = definition.cast_by_scale(y_of(x, norm, *good[4:], F32), scale, WHOLE, E4M3)
        bad = [
            op_of(x, norm._replace(weight=None), scale, BF16),
            op_of(x, norm._replace(is_centred=not norm.is_centred), scale, BF16)[:4] + good[4:],
            (*good[:5], good[5].roll(1)),
            (unrounded, unrounded.view(torch.uint8).t().contiguous().view(E4M3), *good[2:]),
            (good[0], good[1].flip(0), *good[2:]),
        ]
        if norm.bias is not None:
            bad.append(op_of(x, norm._replace(bias=None), scale, BF16))
        for fault in bad:
            with pytest.raises(AssertionError, match="replay"):
                check(fault, x, norm, BF16, replay)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.ones(16, device="meta")}, "weight is on meta and the operand on cpu"),
        ({"weight": torch.ones(8)}, r"weight is \(8,\), expected \(16,\)"),
        ({"bias": torch.ones(8)}, r"bias is \(8,\), expected \(16,\)"),
    ],
)
def test_refuses_what_a_kernel_would_read_past(change, words):
    norm = NormParameters(change.get("weight"), change.get("bias"), EPS, True)
    scale = change.get("scale")
    launch = launcher("norm_cast", "_launch", "cpu")
    with pytest.raises(ValueError, match=f"float8::norm_cast: {words}"):
        launch(torch.ones(4, 16), *norm, scale, F32, E4M3, False, True, False)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=[(32, 48), (1, 5), (0, 16)], norm=BOTH)
def test_opcheck(shape, norm, device):
    """Schema, fake and mutation are what the ops say, on every device."""
    _, x, norm = make(shape, norm, device, (BF16, BF16))
    scale = torch.ones(1, 1, device=device)
    # test_fused.py compiles them, which traces them in whole.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    for weight, rest in (
        (norm.weight, (scale, BF16, E4M3, False, True, True)),
        (None, (None, F32, E4M3, True, False)),
    ):
        arguments = (x, weight, *norm[1:], *rest)
        torch.library.opcheck(norm_cast, arguments, test_utils=utils)
