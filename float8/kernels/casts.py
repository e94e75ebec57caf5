"""Which kernel casts an operand: a table of device families and granularities.

A float8 GEMM reads its operands with the contraction contiguous. Training contracts both dimensions
of an operand, so most operands are cast in two orientations: row-major, and transposed. The kernels
of ``gpu/`` write both from one read. `KERNELS` lists the granularities that have a kernel, by
device family; every other cast is plain PyTorch (``plain.py``). AMD GPUs are not listed: the
kernels are untested there.

To torch.compile a cast is one op, on every device. On a GPU it may fuse a cast that no kernel runs
with the op that produced the operand; `compiler_may_cast` says on which devices it must not.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import cpu, plain
from float8.kernels.definition import FLOAT32, scale_from_amax
from float8.kernels.matrix import Float8Matrix
from float8.kernels.products import CPU, SUPPORT, family_of
from float8.kernels.registration import load_kernels, op_on


class CastSpec(NamedTuple):
    """How a kernel casts.

    Args:
        block: of ``x`` for the data, and of its transpose for the transposed data.
        dtype: the float8 dtype.
        scales: which numbers computed scales may be, a value of `ScaleFormat`.
        kernel: the file of gpu/ whose op casts on a GPU; None for plain PyTorch.
        swizzled: write E8M0 scales as `cublas.mx_scales` does, for the GEMM alone.
    """

    block: Block
    dtype: torch.dtype
    scales: str = FLOAT32
    kernel: str | None = None
    swizzled: bool = False


class Casts(NamedTuple):
    """What a cast returns.

    Args:
        row_major: x in float8. A kernel writes data that is contiguous in the last dimension; plain
            PyTorch keeps the strides of x.
        transposed: x.mT in float8.
        amax: the largest magnitude of x, float32. Each is None if it was not asked for.
    """

    row_major: Float8Matrix | None
    transposed: Float8Matrix | None
    amax: Tensor | None


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
    load_kernels(kernel)
    return kernel


# For torch.compile: it runs once, while tracing. See `architecture`.
kernel_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Older ones (12.8 and 12.9 are in Triton 3.6 to 3.9) lose results of float8 conversions that are
# used twice (triton#11111). Inductor's fusions depend on the model around a cast, so with an older
# ptxas the compiler must not cast.
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
            "torch.compile would compile this float8 cast itself, because emulate=True or because "
            f"the operand is a DTensor, and {ptxas} loses results of float8 "
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


def cast(
    x: Tensor,
    how: Any,
    scale: Tensor | None = None,
    row_major: bool = True,
    transposed: bool = False,
    finds_amax: bool = False,
) -> Casts:
    """Cast a matrix, or a stack of them, in one orientation or in both.

    Args:
        x: (M, K), float32, bfloat16 or float16, any strides; of experts (E, N, K), cast one by one.
        how: a `CastSpec`, or what has its fields.
        scale: the scale to use, for the one orientation that is wanted, or of the whole tensor;
            None computes it. A kernel computes scales of rows and blocks always: that needs no
            second read, and gives the same scales again.
        row_major, transposed: which orientations are wanted.
        finds_amax: whether the amax is wanted too; by one scale per matrix only.

    The compiler sees two steps where one scale serves the tensor: the amax, which it may fuse with
    the op that makes x, and the cast. In eager mode one op does both.
    """
    block, dtype, scales = how.block, how.dtype, how.scales
    is_whole, is_compiling = block[-2:] == (WHOLE, WHOLE), torch.compiler.is_compiling()
    if is_whole and scale is None and is_compiling:
        amax = plain.amax(x, block)
        found = cast(
            x, how, scale_from_amax(amax, torch.finfo(dtype).max, scales), row_major, transposed
        )
        return found._replace(amax=amax if finds_amax else None)
    if how.kernel is not None and not is_whole:
        scale = None
    arguments = x, scale, block[-2:], dtype, scales, how.swizzled, row_major, transposed, finds_amax
    if how.kernel is not None or (x.is_cpu and not hasattr(x, "device_mesh")):
        run = torch.ops.float8.cast.default if how.kernel is None else op_on("cast", x)
        data, own, data_t, own_t, largest = run(*arguments)
    else:  # by aten's ops, which the compiler fuses, and which have rules for DTensors
        if is_compiling and x.device.type == "cuda":
            check_compiler(x.device)
        data, own, data_t, own_t, largest = cpu.cast_both(*arguments)
    if scale is not None:
        own = own_t = scale
    elif is_whole:
        own_t = own
    return Casts(
        Float8Matrix(data, own, block) if row_major else None,
        Float8Matrix(data_t, own_t, block) if transposed else None,
        largest,
    )


def cast_grouped(
    x_TK: Tensor,
    how: Any,
    offs: Tensor,
    align: int,
    scale: Tensor | None = None,
    row_major: bool = True,
    transposed: bool = True,
) -> Casts:
    """`cast` of tokens in groups, which end at ``offs``; see `float8.kernels.groups`.

    ``how.kernel`` is of `GROUP_KERNELS`, or None for the definition.
    """
    op = op_on(how.kernel or "cast_groups", x_TK)
    block, options = how.block, (scale, align, row_major, transposed)
    data, own, data_t, own_t = op(x_TK, offs, block, how.dtype, how.scales, *options)
    return Casts(
        Float8Matrix(data, own, block) if row_major else None,
        Float8Matrix(data_t, own_t, block) if transposed else None,
        None,
    )
