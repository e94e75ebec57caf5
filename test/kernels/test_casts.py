"""Which cast runs where: the choice and its refusals.

That it costs nothing until it is needed is claimed in ``test_architecture.py``.
"""

from unittest import mock

import oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.kernels import registration
from float8.kernels.casts import KERNELS, CastSpec, cast, kernel_for

WHOLE = (-1, -1)


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
    missing = mock.Mock(side_effect=ModuleNotFoundError("No module named triton"))
    monkeypatch.setattr(registration.importlib, "import_module", missing)
    with pytest.raises(error, match=words):
        kernel_for(arch, WHOLE)


@pytest.mark.parametrize("block", KERNELS["sm_90"])
@pytest.mark.parametrize(("rows", "cols"), [(True, True), (True, False), (False, True)])
def test_both_orientations_with_their_scales(block, rows, cols):
    """Shapes on CUDA, where a CPU build can only pretend; bits are test_kernel_path.py's."""
    pytest.importorskip("triton")
    scale_format = "e8m0" if block[1] == 32 else "float32"
    with FakeTensorMode():
        x = torch.empty(256, 384, device="cuda", dtype=torch.bfloat16)
        how = CastSpec(block, torch.float8_e4m3fn, scale_format, kernel_for("sm_90", block))
        out = cast(x, how, row_major=rows, transposed=cols)
    for wanted, shape, matrix in (
        (rows, (256, 384), out.row_major),
        (cols, (384, 256), out.transposed),
    ):
        assert (matrix is not None) == wanted
        if matrix is not None:
            assert matrix.data.shape == shape
            assert matrix.scale.shape == oracle.scale_shape(shape, block)
