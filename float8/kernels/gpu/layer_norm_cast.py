"""`layer_norm_cast`: centre and normalise rows, and cast, in one op.

``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)`` per
row, in float32 and rounded once, to the compute dtype. y is never written: its codes are, row-major
and transposed, as ``cast.py`` casts a matrix that exists. From bfloat16:

====== =================== ================= ==============================================
scale  bytes per element   norm, then cast
====== =================== ================= ==============================================
given  2 + 1 + 1           2 + 2 and 2+1+1   static, delayed; records the amax of y
None   2 + 2 + 1 + 1       2 + 2 and 2+2+1+1 dynamic: a first pass finds both and the amax
====== =================== ================= ==============================================

The kernels are those of ``normed.py``; mean and rstd are found in one look. Given both, the bits
are the reference's; they themselves depend on the order of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.kernels import reference
from float8.kernels.gpu import normed
from float8.kernels.gpu.cast import cast, cast_dynamic
from float8.kernels.gpu.launch import Variant, new_codes, register

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # data, data_t, scale, mean, rstd


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, scale: Tensor | None,
    compute_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool, cols: bool,
    amax: Tensor | None = None, own: bool | None = None,
) -> Outputs:  # fmt: skip
    """Launch; ``own`` is for tests, which have no patience for many rows."""
    normed.check("layer_norm_cast", x, weight=weight, bias=bias, scale=scale, amax=amax)
    args = (x, weight, bias, eps, scale, compute_dtype, dtype, power_of_two, cols, amax)
    if x.numel() == 0:
        return _reference(*args)
    out = _empty(*args)
    norm = normed.Norm(weight, bias, eps, centred=True)
    codes = normed.Codes(*out)
    normed.launch(x, norm, codes, scale, compute_dtype, power_of_two, amax, own)
    return out


def _reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, scale: Tensor | None,
    compute_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool, cols: bool,
    amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    y32, mean, rstd = reference.layer_norm(x, weight, bias, eps)
    y = y32.to(compute_dtype)
    if scale is None:
        return *cast_dynamic(y, dtype, power_of_two, True, cols, amax), mean, rstd
    codes = cast(y, scale, dtype, True, cols, amax)
    return *codes, scale.reshape(1, 1).clone(), mean, rstd


def _empty(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, scale: Tensor | None,
    compute_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool, cols: bool,
    amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    M, K = x.shape
    found, mean, rstd = (
        x.new_empty(shape, dtype=torch.float32) for shape in ((1, 1), (M, 1), (M, 1))
    )
    data, data_t = new_codes(x, M, K, True, dtype), new_codes(x, K, M, cols, dtype)
    return data, data_t, found, mean, rstd


layer_norm_cast = register(
    "layer_norm_cast(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? scale, "
    "ScalarType compute_dtype, ScalarType dtype, bool power_of_two, bool cols, "
    "Tensor(a!)? amax=None)"
    " -> (Tensor data, Tensor data_t, Tensor scale_out, Tensor mean, Tensor rstd)",
    kernel=_launch,
    reference=_reference,
    fake=_empty,
)


def shipped() -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    return normed.shipped("layer_norm_cast", centred=True)
