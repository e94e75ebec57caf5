"""Which kernel casts an operand: a table of device families and granularities.

A float8 GEMM reads its operands with the contraction contiguous. Training contracts both dimensions
of an operand, so most operands are cast in two orientations: row-major, and transposed. The kernels
of ``gpu/`` write both from one read. `KERNELS` lists the granularities that have a kernel, by
device family; every other cast is plain PyTorch (``plain.py``). AMD GPUs are not listed: the
kernels are untested there.

To torch.compile a cast is one op, on every device. On a GPU it may fuse a cast that no kernel runs
with the op that produced the operand; `compiler_may_cast` says on which devices it must not. It may
fuse the amax of a dynamic tensorwise cast everywhere (`float8.linear.plan.bind_cast`).
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import plain
from float8.kernels.definition import FLOAT32, record_amax, scale_from_amax
from float8.kernels.scaled_mm import CPU, SUPPORT, family_of


class Orientations(NamedTuple):
    """An operand in float8, row-major and transposed, for the two GEMMs that read it.

    ``data`` (M, K) and ``data_t`` (K, M) have a scale each. A kernel writes each contiguous in the
    last dimension; plain PyTorch keeps the strides of x. An orientation that was not requested has
    no elements.
    """

    data: Tensor
    scale: Tensor
    data_t: Tensor
    scale_t: Tensor


_CAST = ((WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128), (1, 32), (32, 32))
# device family (`family_of`) -> block of a matrix in GEMM-operand orientation -> the op, a file of
# gpu/, that casts it. All other casts are plain PyTorch.
KERNELS: dict[str, dict[Block, str]] = {
    family: dict.fromkeys(_CAST, "cast") for family in SUPPORT if family.startswith("sm_")
}
# The same of tokens in groups. All others are cast by the definition, which reads ``offs`` on the
# host.
GROUP_KERNELS: dict[str, dict[Block, str]] = {
    family: dict.fromkeys(((WHOLE, WHOLE), (1, WHOLE), (1, 128)), "cast_tokens")
    for family in KERNELS
}
# In the layout of torch's grouped GEMM of MX formats, which runs on this family alone.
GROUP_KERNELS["sm_100"][1, 32] = "cast_tokens"


def kernel_for(family: str, block: Block, emulate: bool = False) -> str | None:
    """The file of gpu/ that casts matrices of this granularity; None for plain PyTorch.

    ``family`` is that of `float8.kernels.family_of`. ``block`` is in GEMM-operand orientation. Of
    experts (E, N, K), its extents are those of each one's matrix, after a 1. ``emulate`` uses plain
    PyTorch on every device. Raises ValueError if the GPU has no float8 conversions, and
    ModuleNotFoundError if Triton is not installed.
    """
    if emulate:
        return None
    if family not in (CPU, *SUPPORT):
        raise ValueError(
            f"cast: {family} is not known to have float8 conversions (known: "
            f"{', '.join(SUPPORT)}); set emulate=True to run it in plain PyTorch"
        )
    kernel = KERNELS.get(family, {}).get(block[-2:])
    if kernel is None:
        return None
    import_kernels(tuple(KERNELS[family].values()))
    return kernel


def runs_kernel(device: torch.device, block: Block, emulate: bool = False) -> bool:
    """Whether a kernel casts matrices of this granularity; see `kernel_for`."""
    return kernel_for(family_of(device), block, emulate) is not None


# For torch.compile: it runs once, while tracing. See `architecture`.
kernel_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def import_kernels(files: tuple[str, ...]) -> None:
    """Import files of gpu/, which registers their ops."""
    for name in files:
        try:
            importlib.import_module(f"float8.kernels.gpu.{name}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "float8 casts on a GPU are Triton kernels, and triton is not installed: "
                "`pip install triton`, or set emulate=True to run plain PyTorch"
            ) from error


# ptxas 12.8 and 12.9 (of Triton 3.6 to 3.8, and of 3.9 below sm_90) lose results of float8
# conversions that are used twice (triton#11111); 13.1 and later do not. The code of inductor of
# torch 2.13 for a static cast was compiled by Triton 3.6, 3.7.1, 3.8 and 3.9 and scanned by
# scripts.kernel_tools scan. A kernel of both orientations stores wrong bytes: in 5 of 8 tile
# sizes by Triton 3.7.1 for sm_89 and for sm_90, in all 8 by Triton 3.9 for sm_89. The kernels of
# compiled Float8Linear layers store one orientation (another op makes the other one), and the scan
# found no error in them. But the fusions of inductor depend on the model around a cast, so with an
# older ptxas the compiler must not cast.
_KEEPS_CONVERSIONS = (13, 1)


def compiler_may_cast(family: str) -> bool:
    """Whether code that torch.compile generates for this family stores float8 data correctly."""
    return family == CPU or _ptxas_that_loses_conversions(family) is None


def check_compiler(device: torch.device) -> None:
    """Raise if torch.compile would have to cast and `compiler_may_cast` is False.

    The RuntimeError names the version of ptxas and the remedy.
    """
    family = family_of(device)
    if not compiler_may_cast(family):
        ptxas = _ptxas_that_loses_conversions(family)
        raise RuntimeError(
            "torch.compile would compile this float8 cast itself, because emulate=True, "
            f"and {ptxas} loses results of float8 "
            "conversions (triton#11111). Set TRITON_PTXAS_PATH (for Triton's ptxas-blackwell: "
            "TRITON_PTXAS_BLACKWELL_PATH) to the ptxas of CUDA 13.1 or later, or run these layers "
            "without torch.compile"
        )


@functools.cache
def _ptxas_that_loses_conversions(family: str) -> str | None:
    if not family.startswith("sm_"):
        return None  # ptxas is NVIDIA's
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(int(family.removeprefix("sm_")))
    if tuple(int(part) for part in ptxas.version.split(".")) >= _KEEPS_CONVERSIONS:
        return None
    return f"ptxas {ptxas.version} ({ptxas.path}) for {family}"


# For torch.compile: both run once, while tracing. See `architecture`.
compiler_may_cast._dynamo_marked_constant = True  # type: ignore[attr-defined]
check_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cast_operand(
    kernel: str | None,
    x_MK: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str = FLOAT32,
    scale: Tensor | None = None,
    row_major: bool = True,
    transposed: bool = False,
    amax: Tensor | None = None,
    swizzled: bool = False,
) -> Orientations:
    """Cast a matrix, or a stack of them, by a row of `KERNELS`, or in plain PyTorch.

    Args:
        kernel: the file of gpu/; None for plain PyTorch.
        x_MK: float32, bfloat16 or float16, any strides; of experts (E, N, K), cast one by one.
        block: of ``x`` for ``data``, and of ``x.t()`` for ``data_t``.
        dtype: the float8 dtype.
        scale_format: which numbers computed scales may be.
        scale: the scale to use; None computes scales from x. A kernel computes scales of rows and
            blocks always: that needs no second read, and gives the same scales again.
        row_major, transposed: whether to write the row-major and the transposed orientation.
        amax: float32, 0-dim: a running maximum to record the amax of x in; whole tensors only.
        swizzled: write E8M0 scales as `cublas.mx_scales` does, for the GEMM alone.
    """
    wanted = (row_major, transposed)
    if kernel is None:
        if x_MK.device.type == "cuda" and torch.compiler.is_compiling():
            check_compiler(x_MK.device)
        if amax is not None:
            largest = plain.amax(x_MK, block)
            record_amax(amax, largest)
            if scale is None:
                scale = scale_from_amax(largest, torch.finfo(dtype).max, scale_format)
        found = plain.cast_plain(x_MK, scale, block, dtype, scale_format, *wanted)
        return Orientations(*found) if scale is None else _with_scale(found[0], found[2], scale)
    is_tensor = block[-2:] == (WHOLE, WHOLE)
    data, its_scale, data_t, scale_t = torch.ops.float8.cast.default(
        x_MK, scale if is_tensor else None, block[-2:], dtype, scale_format, swizzled, *wanted, amax
    )
    if is_tensor:
        return _with_scale(data, data_t, its_scale if scale is None else scale)
    return Orientations(data, its_scale, data_t, scale_t)


def _with_scale(data: Tensor, data_t: Tensor, scale: Tensor) -> Orientations:
    return Orientations(data, scale, data_t, scale)


def cast_tokens(
    kernel: str | None,
    x_TK: Tensor,
    offs: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str,
    scale: Tensor | None,
    align: int,
    row_major: bool,
    transposed: bool,
) -> Orientations:
    """`cast_groups` by a row of `GROUP_KERNELS`, or by the definition."""
    op = getattr(torch.ops.float8, kernel or "cast_groups").default
    return Orientations(
        *op(x_TK, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    )
