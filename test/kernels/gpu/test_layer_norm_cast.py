"""`layer_norm_cast`: given the statistics, the kernel's codes are the oracle's, bit for bit."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline
from interpreter import launcher
from shapes import DEVICES, FORMATS, Case, pairs

from float8.kernels import reference
from float8.kernels.gpu.layer_norm_cast import layer_norm_cast

E4M3, EPS, WHOLE = torch.float8_e4m3fn, 1e-5, (-1, -1)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# How it runs -> (scale, whole rows). Many rows are needed before the launcher takes whole ones.
FORMS = {"dynamic": (None, None), "tiles": (0.037, False), "whole rows": (0.037, True)}


def run(device, x, weight, bias, scale, compute, dtype=E4M3, pow2=False, cols=True, amax=None,
        whole_rows=None, eps=EPS):  # fmt: skip
    launch = launcher("layer_norm_cast", "_launch", device)
    scale = None if scale is None else torch.tensor([[scale]], device=device)
    return launch(x, weight, bias, eps, scale, compute, dtype, pow2, cols, amax, whole_rows)


def y_of(x, weight, bias, mean, rstd, compute):
    y = (x.float() - mean) * rstd
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(compute)


def check(got, x, weight, bias, compute, replay, dtype=E4M3):
    """Statistics are right to a few ulps, and given them the codes are the oracle's, both ways."""
    data, data_t, scale, mean, rstd = (t.cpu() for t in got)
    x, weight, bias = (None if t is None else t.cpu() for t in (x, weight, bias))
    exact = x.double()
    variance = exact.var(1, correction=0, keepdim=True) + EPS
    plain = x.float() - x.float().mean(1, keepdim=True)
    plain = (plain.square().mean(1, keepdim=True) + EPS).rsqrt()
    assert_error_within_baseline(rstd, variance.rsqrt(), plain, 4.0, replay, "rstd")
    means = exact.mean(1, keepdim=True), x.float().mean(1, keepdim=True)
    assert_error_within_baseline(mean, *means, 4.0, replay, "mean")
    codes = oracle.cast(y_of(x, weight, bias, mean, rstd, compute), scale, WHOLE, dtype)
    assert_bitwise(data, codes, replay, "data")
    assert_bitwise(data_t, codes.t(), replay, "data_t")
    assert data.is_contiguous() and data_t.is_contiguous()


def make(shape, dtype, weighted, device, layout="contiguous", fill="normal"):
    case = Case(shape, dtype, layout=layout, fill=fill, seed=3)
    weight, bias = (Case((shape[1],), weighted, seed=n).make(device) for n in (4, 5))
    return case, case.make(device) + 0.5, weight, bias


@pairs(
    form=list(FORMS),
    shape=[(48, 144), (5, 123), (4, 1100), (37, 1)],
    dtypes=[(F32, F32, F32), (BF16, F32, F32), (F16, F16, F16)],
    layout=["contiguous", "transposed", "sliced"],
    affine=["weight and bias", "weight", "neither"],
)
def test_codes_and_amax(form, shape, dtypes, layout, affine):
    check_form("cpu", form, shape, dtypes, layout, affine)


@pytest.mark.cuda
@pairs(
    form=list(FORMS),
    shape=[(80, 144), (5, 123), (20, 1100), (37, 1)],
    dtypes=[(F32, F32, BF16), (BF16, BF16, BF16)],  # the interpreter does not round to bfloat16
    affine=["weight and bias", "weight", "neither"],
)
def test_codes_and_amax_on_a_gpu(form, shape, dtypes, affine):
    check_form("cuda", form, shape, dtypes, "contiguous", affine)


def check_form(device, form, shape, dtypes, layout, affine):
    source, weighted, compute = dtypes
    scale, whole_rows = FORMS[form]
    case, x, weight, bias = make(shape, source, weighted, device, layout)
    weight = None if affine == "neither" else weight
    bias = bias if affine == "weight and bias" else None
    seen = torch.tensor(0.25, device=device)
    got = run(device, x, weight, bias, scale, compute, amax=seen, whole_rows=whole_rows)
    check(got, x, weight, bias, compute, (case, form, affine))
    amax = y_of(x, weight, bias, *got[3:], compute).abs().amax().float()
    assert_bitwise(seen, amax.clamp(min=0.25), (case, form), "recorded amax")
    if scale is None:
        expected = reference.scale_from_amax(amax.reshape(1, 1), 448.0)
        assert_bitwise(got[2], expected, case, "scale")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_formats_powers_of_two_and_rows_alone(dtype, device):
    case, x, weight, bias = make((16, 48), F32, F32, device)
    got = run(device, x, weight, bias, None, F32, dtype, pow2=True)
    check(got, x, weight, bias, F32, case, dtype)
    assert float(got[2].log2()) % 1 == 0
    rows = run(device, x, weight, bias, None, F32, dtype, pow2=True, cols=False)
    assert rows[1].shape == (0, 0)
    assert_bitwise(rows[0], got[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_special_rows(form, device):
    """A constant row is its bias, also with a huge mean; inf and NaN stay in their rows."""
    scale, whole_rows = FORMS[form]
    _, x, weight, bias = make((6, 40), F32, F32, device)
    x[0], x[1], x[2, 3], x[3, 5] = 0.0, 3e4, torch.inf, torch.nan
    seen = torch.tensor(0.0, device=device)
    data, data_t, found, _, rstd = run(
        device, x, weight, bias, scale, F32, amax=seen, whole_rows=whole_rows
    )
    assert seen.isnan() and rstd[2:4].isnan().all()
    assert_bitwise(data_t, data.view(torch.uint8).t().contiguous().view(E4M3))
    if scale is not None:
        codes = oracle.cast(bias.cpu().expand(2, -1).contiguous(), found.cpu(), WHOLE, E4M3)
        assert_bitwise(data[:2], codes)
        assert data[2:4].float().isnan().all() and data[4:].float().isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_empty(scale, device):
    x, seen = torch.empty(0, 16, device=device), torch.tensor(2.0, device=device)
    data, data_t, found, mean, rstd = run(device, x, None, None, scale, F32, amax=seen)
    assert (data.shape, data_t.shape) == ((0, 16), (16, 0))
    assert mean.shape == rstd.shape == (0, 1)
    assert found.item() == (scale or reference.MIN_SCALE)
    assert seen.item() == 2.0


@pytest.mark.cuda
def test_the_launcher_takes_whole_rows_where_there_are_many():
    case, x, weight, bias = make((4096, 96), BF16, BF16, "cuda")
    check(run("cuda", x, weight, bias, 0.037, BF16), x, weight, bias, BF16, case)


def test_the_reference_is_the_unfused_chain():
    for dtype in (F32, BF16, F16):
        _, x, weight, bias = make((9, 40), dtype, dtype, "cpu")
        scale = torch.tensor([[0.02]])
        data, data_t, found, *_ = layer_norm_cast(
            x, weight, bias, EPS, scale, dtype, E4M3, False, True
        )
        y = [t.float() for t in (x, weight, bias)]
        exact = F.layer_norm(x.double(), (40,), weight.double(), bias.double(), EPS)
        plain = F.layer_norm(y[0], (40,), *y[1:], EPS).to(dtype)
        by_hand = y_of(x, weight, bias, *reference.layer_norm(x, weight, bias, EPS)[1:], dtype)
        assert_error_within_baseline(by_hand, exact, plain)
        assert_bitwise(data, reference.cast(by_hand, scale, WHOLE, E4M3))
        assert_bitwise(data_t, data.view(torch.uint8).t().contiguous().view(E4M3))
        assert_bitwise(found, scale)


def test_the_check_sees_faults():
    """A forgotten bias or mean, another row's rstd, a rounding too few, a transpose too many."""
    case, x, weight, bias = make((32, 64), BF16, BF16, "cpu")
    scale = torch.tensor([[0.02]])
    good = layer_norm_cast(x, weight, bias, EPS, scale, BF16, E4M3, False, True)
    check(good, x, weight, bias, BF16, case)
    unrounded = reference.cast(y_of(x, weight, bias, *good[3:], F32), scale, WHOLE, E4M3)
    by_rms = torch.ops.float8.layer_norm_cast(
        x - x.mean() + x.mean(1, keepdim=True), weight, bias, EPS, scale, BF16, E4M3, False, True
    )
    for bad in (
        layer_norm_cast(x, weight, None, EPS, scale, BF16, E4M3, False, True),
        (*by_rms[:3], *good[3:]),
        (*good[:4], good[4].roll(1)),
        (unrounded, unrounded.view(torch.uint8).t().contiguous().view(E4M3), *good[2:]),
        (good[0], good[1].flip(0), *good[2:]),
    ):
        with pytest.raises(AssertionError, match="replay"):
            check(bad, x, weight, bias, BF16, case)


@pytest.mark.parametrize("name", ["weight", "bias", "scale", "amax"])
def test_refuses_tensors_of_another_device(name):
    meta = {name: torch.ones(16, device="meta")}
    arguments = {"weight": None, "bias": None, "scale": None, "amax": None} | meta
    with pytest.raises(ValueError, match=f"float8::layer_norm_cast: {name} is on meta and the op"):
        launcher("layer_norm_cast", "_launch", "cpu")(
            torch.ones(4, 16), eps=EPS, compute_dtype=F32, dtype=E4M3, power_of_two=False,
            cols=True, **arguments,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_refuses_a_weight_or_bias_of_another_size(name):
    short = {"weight": None, "bias": None} | {name: torch.ones(8)}
    with pytest.raises(ValueError, match=rf"layer_norm_cast: {name} is \(8,\), expected \(16,\)"):
        run("cpu", torch.ones(4, 16), **short, scale=None, compute=F32)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    """Schema, fake and mutation are what the op says, on every device."""
    _, x, weight, bias = make((32, 48), BF16, BF16, device)
    scale, seen = torch.ones(1, 1, device=device), torch.zeros((), device=device)
    arguments = (x, weight, bias, EPS, scale, BF16, E4M3, False, True, seen)
    # What traces it in whole, test_fused.py compiles.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(layer_norm_cast, arguments, test_utils=utils)
