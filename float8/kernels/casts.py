"""Which kernel casts an operand: a table of device families and granularities.

A float8 GEMM reads its operands with the contraction contiguous. Training contracts both dimensions
of an operand, so most operands are cast in two orientations: row-major, and transposed. The kernels
of ``gpu/`` write both from one read. `KERNELS` lists the granularities that have a kernel, by
device family; every other cast is plain PyTorch (``cpu.py``). AMD GPUs are not listed: the kernels
are untested there.

Under torch.compile a cast is either a kernel, opaque to the compiler, or plain PyTorch, which
inductor may fuse with the op that produced the operand. `COMPILED` has the choice for each kernel.
`compiler_may_cast` says on which devices the compiler must not cast.
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block, ceil_div
from float8.kernels.definition import FLOAT32
from float8.kernels.scaled_mm import CPU, SUPPORT, family_of


class Orientations(NamedTuple):
    """An operand in float8, row-major and transposed, for the two GEMMs that read it.

    ``data`` (M, K) and ``data_t`` (K, M) are each contiguous in the last dimension and have a scale
    each. An orientation that was not requested is a tensor without elements.
    """

    data: Tensor
    scale: Tensor
    data_t: Tensor
    scale_t: Tensor


_TRITON: dict[Block, str] = {
    (WHOLE, WHOLE): "cast",
    (1, WHOLE): "cast_rowwise",
    (1, 128): "cast_blockwise",
    (128, 128): "cast_blockwise",
    (1, 32): "cast_mx",
}
# device family (`family_of`) -> block of a matrix in GEMM-operand orientation -> the file of gpu/
# that casts it. All other casts are plain PyTorch.
KERNELS: dict[str, dict[Block, str]] = {
    family: _TRITON for family in SUPPORT if family.startswith("sm_")
}

# file of gpu/ -> the choice under torch.compile on CUDA, "kernel" or "aten", and the reason. On a
# GPU, `benchmarks/bench_linear.py --compiled-casts aten` measures the other choice; no times have
# been measured yet. The reasons are the kernels' bytes per element of a bfloat16 operand, as
# test/linear/test_autograd.py counts them; their bits are those of eager mode. With a dynamic scale
# inductor needs at least 5 bytes: the amax in the epilogue of the op that makes the operand, 2 + 1
# for the cast, and 1 + 1 for the transposed copy that a GEMM needs.
COMPILED: dict[str, tuple[str, str]] = {
    "cast": ("kernel", "6 bytes, 4 with a delayed scale; no time measured"),
    "cast_rowwise": ("kernel", "6 bytes, 3 for rows alone; no time measured"),
    "cast_blockwise": ("kernel", "4 bytes; no time measured"),
    "cast_mx": ("kernel", "4 bytes, and inductor has no code for E8M0 scales; no time measured"),
}


# file of gpu/ -> the rows of its tiles, whose columns it can add; see `new_column_sums`
_SUMMED_ROWS = {"cast": 64, "cast_rowwise": 64, "cast_blockwise": 128}


def kernel_for(
    family: str, block: Block, emulate: bool = False, compiling: bool = False
) -> str | None:
    """The file of gpu/ that casts matrices of this granularity; None for plain PyTorch.

    ``family`` is that of `float8.kernels.family_of`. ``block`` is in GEMM-operand orientation. Of
    experts (E, N, K), its extents are those of each one's matrix, after a 1. ``emulate`` uses plain
    PyTorch on every device. ``compiling`` says that torch.compile traces the cast. Raises
    ValueError if the GPU has no float8 conversions, and ModuleNotFoundError if Triton is not
    installed.
    """
    if emulate:
        return None
    if family not in (CPU, *SUPPORT):
        raise ValueError(
            f"cast: {family} is not known to have float8 conversions (known: "
            f"{', '.join(SUPPORT)}); set emulate=True to run it in plain PyTorch"
        )
    kernel = KERNELS.get(family, {}).get(block[-2:])
    if kernel is None or (compiling and _is_left_to_the_compiler(kernel, family)):
        return None
    import_kernels(tuple(KERNELS[family].values()))
    return kernel


def runs_kernel(device: torch.device, block: Block, emulate: bool = False) -> bool:
    """Whether a kernel casts matrices of this granularity; see `kernel_for`."""
    compiling = torch.compiler.is_compiling()
    return kernel_for(family_of(device), block, emulate, compiling) is not None


def _is_left_to_the_compiler(kernel: str, family: str) -> bool:
    return COMPILED[kernel][0] == "aten" and compiler_may_cast(family)


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
            "torch.compile would compile this float8 cast itself, because the operand is a DTensor "
            f"(tensor parallelism) or emulate=True, and {ptxas} loses results of float8 "
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


def new_column_sums(kernel: str, x_MK: Tensor) -> Tensor | None:
    """Empty float32 (tiles, K) for `cast_by_kernel`; None if the kernel adds no columns."""
    rows = _SUMMED_ROWS.get(kernel)
    if rows is None:
        return None
    M, K = x_MK.shape
    return torch.empty((ceil_div(M, rows), K), dtype=torch.float32, device=x_MK.device)


def cast_by_kernel(
    kernel: str,
    x_MK: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str = FLOAT32,
    scale: Tensor | None = None,
    row_major: bool = True,
    transposed: bool = False,
    amax: Tensor | None = None,
    swizzled: bool = False,
    column_sums: Tensor | None = None,
) -> Orientations:
    """Cast a CUDA matrix, or a stack of them, by the kernel that `kernel_for` returned.

    Args:
        kernel: the file of gpu/.
        x_MK: float32, bfloat16 or float16, any strides; of experts (E, N, K), cast one by one.
        block: of ``x`` for ``data``, and of ``x.t()`` for ``data_t``.
        dtype: the float8 dtype.
        scale_format: which numbers computed scales may be.
        scale: the scale to use, one for the tensor; None computes scales from x. Scales of smaller
            blocks are always computed: that needs no second read, and gives the same scales again.
        row_major, transposed: whether to write the row-major and the transposed orientation.
        amax: float32, 0-dim: a running maximum to record the amax of x in; whole tensors only.
        swizzled: write scales of 1x32 blocks as `cublas.swizzled` does, for the GEMM alone.
        column_sums: of `new_column_sums`: filled with the sums of the columns of each tile. Needs
            both orientations.
    """
    ops, power_of_two = torch.ops.float8, scale_format != FLOAT32
    if kernel == "cast" and scale is not None:
        data, data_t = ops.cast.default(
            x_MK, scale, dtype, row_major, transposed, amax, column_sums
        )
        return Orientations(data, scale, data_t, scale)
    if kernel == "cast":
        data, data_t, scale = ops.cast_dynamic.default(
            x_MK, dtype, power_of_two, row_major, transposed, amax, column_sums
        )
        return Orientations(data, scale, data_t, scale)
    if kernel == "cast_rowwise":
        return Orientations(
            *ops.cast_rowwise.default(x_MK, dtype, power_of_two, row_major, transposed, column_sums)
        )
    if kernel == "cast_mx":
        return Orientations(
            *ops.cast_mx.default(x_MK, dtype, scale_format, swizzled, row_major, transposed)
        )
    return Orientations(
        *ops.cast_blockwise.default(
            x_MK, dtype, power_of_two, *block[-2:], row_major, transposed, column_sums
        )
    )


def cast_operand(
    x_MK: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str = FLOAT32,
    scale: Tensor | None = None,
    row_major: bool = True,
    transposed: bool = False,
    amax: Tensor | None = None,
) -> Orientations:
    """`cast_by_kernel` by the Triton kernel of this granularity."""
    kernel = _TRITON[block[-2:]]
    return cast_by_kernel(
        kernel, x_MK, block, dtype, scale_format, scale, row_major, transposed, amax
    )
