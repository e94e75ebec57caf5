"""Which cast runs where: the choice and its refusals.

That it costs nothing until it is needed is claimed in ``test_architecture.py``.
"""

import math
from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from shapes import DEVICES, Case
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.kernels import amax_by_rows, casts
from float8.kernels.casts import KERNELS, cast_operand, kernel_for, runs_kernel

WHOLE = (-1, -1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_kernels_yet():
    casts.import_kernels.cache_clear()
    yield
    casts.import_kernels.cache_clear()


@pytest.mark.parametrize(
    ("arch", "error", "words"),
    [
        ("sm_80", ValueError, "cast: sm_80 is not known to have float8 conv.*emulate=True"),
        ("sm_90", ModuleNotFoundError, "pip install triton"),
    ],
)
def test_a_gpu_without_float8_is_refused_and_a_missing_triton_is_named(
    arch, error, words, monkeypatch
):
    monkeypatch.setattr(casts, "family_of", lambda device: arch)
    missing = mock.Mock(side_effect=ModuleNotFoundError("No module named triton"))
    monkeypatch.setattr(casts.importlib, "import_module", missing)
    with pytest.raises(error, match=words):
        runs_kernel(CUDA, WHOLE, emulate=False)


@pytest.mark.parametrize("block", KERNELS["sm_90"])
@pytest.mark.parametrize(("rows", "cols"), [(True, True), (True, False), (False, True)])
def test_both_orientations_with_their_scales(block, rows, cols):
    """Shapes on CUDA, where a CPU build can only pretend; bits are test_kernel_path.py's."""
    pytest.importorskip("triton")
    runs_kernel(CUDA, block, emulate=False)
    scale_format = "e8m0" if block[1] == 32 else "float32"
    with FakeTensorMode():
        x = torch.empty(256, 384, device="cuda", dtype=torch.bfloat16)
        kernel, how = kernel_for("sm_90", block), (block, torch.float8_e4m3fn, scale_format)
        out = cast_operand(kernel, x, *how, row_major=rows, transposed=cols)
    for wanted, shape, data, scale in (
        (rows, (256, 384), out.data, out.scale),
        (cols, (384, 256), out.data_t, out.scale_t),
    ):
        assert data.shape == (shape if wanted else (0, 0))
        assert not wanted or scale.shape == oracle.scale_shape(shape, block)


@pytest.mark.parametrize(
    "case",
    [
        Case((5, 123), torch.bfloat16, fill="wide", layout="transposed"),
        Case((1, 7), torch.float32, exponent=-140),
        Case((3, 16), torch.float16, fill="zeros"),
        *(
            Case((33, 40), torch.bfloat16, specials=(name,))
            for name in ("nan", "inf", "negative_inf")
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_amax_by_rows_is_that_of_the_matrix(device, case):
    x = case.make(device)
    magnitudes = x.double().abs().flatten().tolist()
    expected = math.nan if any(map(math.isnan, magnitudes)) else max(magnitudes)
    found = amax_by_rows(x).cpu()
    assert (found.dtype, found.shape) == (torch.float32, (1, 1))
    assert_bitwise(found, torch.tensor([[expected]]), repr(case))
    assert float(amax_by_rows(x[:0])) == float(amax_by_rows(x[:, :0])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_norm", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_amax_that_inductor_fuses_is_that_of_what_it_writes(device, is_norm):
    """Inductor keeps values in float32 within a kernel: only some maxima would be rounded alike."""

    def produced(x, weight):
        y = F.rms_norm(x, x.shape[1:], weight) if is_norm else F.silu(x) * weight
        return y, amax_by_rows(y)

    run = torch.compile(produced, fullgraph=True)
    for seed in range(50):
        torch.manual_seed(seed)
        y, amax = run(*(torch.randn(shape).bfloat16().to(device) for shape in ((16, 96), (96,))))
        assert_bitwise(amax, y.abs().max().float().reshape(1, 1), f"seed {seed}")
