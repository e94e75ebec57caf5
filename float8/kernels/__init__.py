"""Ops on plain tensors. This package knows no Float8Tensor, no module and no config.

``definition.py`` defines every op in plain PyTorch, to the bit where bits are defined. ``cpu.py``
runs the same ops where there is no float8 hardware, and faster. ``scaled_mm.py`` chooses between it
and the tensor cores, ``casts.py`` between it and the Triton kernels of ``gpu/``; both give the
reason for a refusal. A new kernel is one file in ``gpu/`` and one row in a table of `casts` or
`scaled_mm`.

May import: ``float8.granularity``, ``float8.formats``, torch; ``gpu/`` also Triton.
"""

from float8.kernels.amaxes import amaxes, column_amaxes
from float8.kernels.casts import (
    Orientations,
    cast_by_kernel,
    cast_operand,
    check_compiler,
    compiler_may_cast,
    kernel_for,
    new_column_sums,
    runs_kernel,
)
from float8.kernels.cpu import (
    MIN_SCALE,
    amax,
    cast,
    cast_decoded,
    compiles_for_cpu,
    decode,
    dequantize,
    record_amax,
    scale_from_amax,
)
from float8.kernels.cublas import is_sharded
from float8.kernels.definition import smoothing_factors
from float8.kernels.grouped_mm import (
    group_alignment,
    grouped_gemm_for,
    multiply_groups,
    multiply_groups_plainly,
)
from float8.kernels.groups import cast_tokens, group_kernel_for
from float8.kernels.scaled_mm import PLAIN, family_of, gemm_for, is_aligned, multiply, scaled_mm

__all__ = [
    "MIN_SCALE",
    "PLAIN",
    "Orientations",
    "amax",
    "amaxes",
    "cast",
    "cast_by_kernel",
    "cast_decoded",
    "cast_operand",
    "cast_tokens",
    "check_compiler",
    "column_amaxes",
    "compiler_may_cast",
    "compiles_for_cpu",
    "decode",
    "dequantize",
    "family_of",
    "gemm_for",
    "group_alignment",
    "group_kernel_for",
    "grouped_gemm_for",
    "is_aligned",
    "is_sharded",
    "kernel_for",
    "multiply",
    "multiply_groups",
    "multiply_groups_plainly",
    "new_column_sums",
    "record_amax",
    "runs_kernel",
    "scale_from_amax",
    "scaled_mm",
    "smoothing_factors",
]
