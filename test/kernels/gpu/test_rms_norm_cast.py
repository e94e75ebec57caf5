"""`rms_norm_cast`: given its rstd, the kernel's codes are those of the oracle, bit for bit."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from assertions import assert_bitwise, assert_error_within_baseline
from interpreter import launcher
from shapes import DEVICES, FORMATS, LAYOUTS, Case

from float8.kernels import reference
from float8.kernels.gpu.rms_norm_cast import rms_norm_cast

E4M3, EPS = torch.float8_e4m3fn, 1e-6
WHOLE = (-1, -1)
# How it runs -> (scale, whole rows). Many rows are needed before the launcher takes whole ones.
FORMS = {"dynamic": (None, None), "tiles": (0.037, False), "whole rows": (0.037, True)}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# x, weight, compute dtype. Triton's interpreter rounds to bfloat16 wrongly (half up, lost carries):
# that one is for a GPU.
DTYPES = [
    ("cpu", F32, F32, F32),
    ("cpu", BF16, F32, F32),
    ("cpu", F16, F16, F16),
    ("cpu", F32, BF16, F16),
    pytest.param("cuda", BF16, BF16, BF16, marks=pytest.mark.cuda),
    pytest.param("cuda", F32, F32, BF16, marks=pytest.mark.cuda),
]


def run(device, x, weight, scale, compute_dtype, dtype=E4M3, pow2=False, cols=True, amax=None,
        whole_rows=None, eps=EPS):  # fmt: skip
    launch = launcher("rms_norm_cast", "_launch", device)
    scale = None if scale is None else torch.tensor([[scale]], device=device)
    return launch(x, weight, eps, scale, compute_dtype, dtype, pow2, cols, amax, whole_rows)


def y_of(x, weight, rstd, compute_dtype):
    y = x.float() * rstd
    return (y if weight is None else y * weight.float()).to(compute_dtype)


def check(got, x, weight, compute_dtype, replay, dtype=E4M3, eps=EPS):
    """rstd is right to a few ulps, and given rstd the codes are the oracle's, both ways."""
    data, data_t, scale, rstd = (t.cpu() for t in got)
    x, weight = x.cpu(), None if weight is None else weight.cpu()
    exact = (x.double().square().mean(1, keepdim=True) + eps).rsqrt()
    plain = (x.float().square().mean(1, keepdim=True) + eps).rsqrt()
    assert_error_within_baseline(rstd, exact, plain, 4.0, replay, "rstd")
    codes = oracle.cast(y_of(x, weight, rstd, compute_dtype), scale, WHOLE, dtype)
    assert_bitwise(data, codes, replay, "data")
    assert_bitwise(data_t, codes.t(), replay, "data_t")
    assert data.is_contiguous() and data_t.is_contiguous()


def make(shape, dtype, weight_dtype, device, layout="contiguous", fill="normal"):
    case = Case(shape, dtype, layout=layout, fill=fill, seed=3)
    weight = Case((shape[1],), weight_dtype, seed=4).make(device)
    return case, case.make(device), weight


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "source", "weighted", "compute"), DTYPES)
@pytest.mark.parametrize("shape", [(80, 144), (5, 123)])
def test_codes_and_amax(shape, device, source, weighted, compute, form):
    scale, whole_rows = FORMS[form]
    case, x, weight = make(shape, source, weighted, device)
    seen = torch.tensor(1.5, device=device)
    got = run(device, x, weight, scale, compute, amax=seen, whole_rows=whole_rows)
    check(got, x, weight, compute, (case, form))
    amax = y_of(x, weight, got[3], compute).abs().amax().float()
    assert_bitwise(seen, amax.clamp(min=1.5), (case, form), "recorded amax")
    if scale is None:
        assert_bitwise(got[2], reference.scale_from_amax(amax.reshape(1, 1), 448.0), case, "scale")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(20, 1100), (37, 1), (1, 1030)])
def test_rows_longer_than_a_tile_and_rows_of_one(shape, form, device):
    scale, whole_rows = FORMS[form]
    case, x, weight = make(shape, F32, F32, device, fill="one_large")
    got = run(device, x, weight, scale, F32, whole_rows=whole_rows)
    check(got, x, weight, F32, (case, form))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["dynamic", "whole rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout, form, device):
    scale, whole_rows = FORMS[form]
    case, x, weight = make((18, 40), F32, F32, device, layout)
    got = run(device, x, weight, scale, F32, whole_rows=whole_rows)
    check(got, x, weight, F32, (case, form))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("pow2", [False, True])
def test_formats_powers_of_two_and_no_weight(dtype, pow2, device):
    case, x, _ = make((16, 48), F32, F32, device)
    got = run(device, x, None, None, F32, dtype, pow2)
    check(got, x, None, F32, case, dtype)
    if pow2:
        assert float(got[2].log2()) % 1 == 0
    rows = run(device, x, None, None, F32, dtype, pow2, cols=False)
    assert rows[1].shape == (0, 0)
    assert_bitwise(rows[0], got[0])


@pytest.mark.cuda
def test_the_launcher_takes_whole_rows_where_there_are_many():
    case, x, weight = make((4096, 96), BF16, BF16, "cuda")
    check(run("cuda", x, weight, 0.037, BF16), x, weight, BF16, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_special_rows(eps, form, device):
    """Zeros stay zeros, or are NaN without eps; inf and NaN are seen; other rows are untouched."""
    scale, whole_rows = FORMS[form]
    _, x, weight = make((6, 40), F32, F32, device)
    x[0], x[1, 3], x[2, 5] = 0.0, torch.inf, torch.nan
    seen = torch.tensor(0.0, device=device)
    data, data_t, _, rstd = run(
        device, x, weight, scale, F32, amax=seen, whole_rows=whole_rows, eps=eps
    )
    assert seen.isnan()
    assert_bitwise(data_t, data.view(torch.uint8).t().contiguous().view(E4M3))
    assert rstd[0].isinf() if eps == 0 else data[0].float().eq(0).all() or scale is None
    assert rstd[1] == 0 and rstd[2].isnan()
    if scale is not None:
        y = y_of(x, weight, rstd, F32)
        codes = oracle.cast(y.cpu(), torch.tensor([[scale]]), WHOLE, E4M3)
        assert_bitwise(data, codes)


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_outside_the_matrix_is_no_nan(device):
    """Without eps a row of zeros is NaN, so rows past the last one must not be looked at."""
    _, x, weight = make((5, 24), F32, F32, device)
    seen = torch.tensor(0.0, device=device)
    run(device, x, weight, None, F32, amax=seen, eps=0.0)
    assert seen.isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_empty(scale, device):
    x, seen = torch.empty(0, 16, device=device), torch.tensor(2.0, device=device)
    data, data_t, found, rstd = run(device, x, None, scale, F32, amax=seen)
    assert (data.shape, data_t.shape, rstd.shape) == ((0, 16), (16, 0), (0, 1))
    assert found.item() == (scale or reference.MIN_SCALE)
    assert seen.item() == 2.0


def test_the_reference_is_the_unfused_chain():
    for dtype in (F32, BF16, F16):
        _, x, weight = make((9, 40), dtype, dtype, "cpu")
        scale = torch.tensor([[0.02]])
        data, data_t, found, _ = rms_norm_cast(x, weight, EPS, scale, dtype, E4M3, False, True)
        y = F.rms_norm(x, (40,), weight, EPS)
        assert_bitwise(data, reference.cast(y, scale, WHOLE, E4M3))
        assert_bitwise(data_t, reference.cast(y, scale, WHOLE, E4M3).t())
        assert_bitwise(found, scale)


def test_the_check_sees_faults():
    """A forgotten weight, another row's rstd, a rounding too few, a transpose too many."""
    case, x, weight = make((32, 64), BF16, BF16, "cpu")
    scale = torch.tensor([[0.02]])
    good = rms_norm_cast(x, weight, EPS, scale, BF16, E4M3, False, True)
    check(good, x, weight, BF16, case)
    unrounded = reference.cast(y_of(x, weight, good[3], F32), scale, WHOLE, E4M3)
    for bad in (
        rms_norm_cast(x, None, EPS, scale, BF16, E4M3, False, True),
        (*good[:3], good[3].roll(1)),
        (unrounded, unrounded.view(torch.uint8).t().contiguous().view(E4M3), *good[2:]),
        (good[0], good[1].flip(0), *good[2:]),
    ):
        with pytest.raises(AssertionError, match="replay"):
            check(bad, x, weight, BF16, case)


@pytest.mark.parametrize("name", ["weight", "scale", "amax"])
def test_refuses_tensors_of_another_device(name):
    meta = {name: torch.ones(16, device="meta")}
    arguments = {"weight": None, "scale": None, "amax": None} | meta
    with pytest.raises(ValueError, match=f"float8::rms_norm_cast: {name} is on meta and the opera"):
        launcher("rms_norm_cast", "rms_norm_cast", "cpu")(
            torch.ones(4, 16), eps=EPS, compute_dtype=F32, dtype=E4M3, power_of_two=False,
            cols=True, **arguments,
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 48), (1, 5), (0, 16)])
def test_opcheck(shape, device):
    """Schema, fake and mutation are what the op says, on every device."""
    _, x, weight = make(shape, BF16, BF16, device)
    scale, seen = torch.ones(1, 1, device=device), torch.zeros((), device=device)
    torch.library.opcheck(rms_norm_cast, (x, weight, EPS, scale, BF16, E4M3, False, True, seen))
    torch.library.opcheck(rms_norm_cast, (x, None, EPS, None, F32, E4M3, True, False))
