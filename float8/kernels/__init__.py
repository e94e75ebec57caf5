"""Ops on plain tensors. This package knows no Float8Tensor, no module and no config.

``definition.py`` defines every op in plain PyTorch, to the bit where bits are defined. ``cpu.py``
is faster on a CPU, and ``plain.py`` makes ops of it. ``products.py`` chooses between these and the
tensor cores, ``casts.py`` between them and the Triton kernels of ``gpu/``; both give the reason for
a refusal. A new kernel is one file in ``gpu/`` and one row in a table of `casts` or
`products`.

May import: ``float8.granularity``, ``float8.formats``, torch; ``gpu/`` also Triton.
"""

from float8.kernels.casts import (
    Casts,
    CastSpec,
    cast,
    cast_grouped,
    compiler_may_cast,
    kernel_for,
)
from float8.kernels.cublas import is_sharded
from float8.kernels.definition import (
    MIN_SCALE,
    scale_from_amax,
    smoothing_factors_from_amax,
)
from float8.kernels.grouped_products import (
    group_alignment,
    grouped_gemm_for,
    multiply_groups,
    multiply_groups_plainly,
)
from float8.kernels.matrix import Float8Matrix
from float8.kernels.plain import amax, cast_by_scale, column_amaxes, dequantize
from float8.kernels.products import (
    PLAIN_PYTORCH,
    family_of,
    gemm_for,
    is_aligned,
    multiply,
    scaled_mm,
)

__all__ = [
    "MIN_SCALE",
    "PLAIN_PYTORCH",
    "CastSpec",
    "Casts",
    "Float8Matrix",
    "amax",
    "cast",
    "cast_by_scale",
    "cast_grouped",
    "column_amaxes",
    "compiler_may_cast",
    "dequantize",
    "family_of",
    "gemm_for",
    "group_alignment",
    "grouped_gemm_for",
    "is_aligned",
    "is_sharded",
    "kernel_for",
    "multiply",
    "multiply_groups",
    "multiply_groups_plainly",
    "scale_from_amax",
    "scaled_mm",
    "smoothing_factors_from_amax",
]
