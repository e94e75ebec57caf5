"""Ops on plain tensors. This package knows no Float8Tensor, no module and no config.

=========================== ====================================================================
``matrix.py``               `Float8Matrix`: what a cast returns and a product takes
``definition.py``           the definition of casts and products, to the bit where bits are defined
``e8m0.py``, ``mxfp4.py``   the scales and the 4-bit values of the MX formats
``casts.py``                `cast`: which kernel of ``gpu/`` casts, or plain PyTorch
``products.py``             `multiply`: which GEMM multiplies, or the reason why none does
``cublas.py``               products by torch's scaled GEMMs, and the layouts that these read
``groups.py``               tokens in groups, and their casts
``grouped_products.py``     products of groups
``cpu.py``                  plain PyTorch, with faster forms for tensors on a CPU
``plain.py``                the ops that plain PyTorch runs: their schemas and fakes
``registration.py``         how an op is registered
``moments.py``              float8 states of optimizers
``stochastic.py``           stochastic rounding
``update_rules.py``         the rules of optimizers
``optimizer_step.py``       a step of an optimizer in one op
``recompute.py``            a partitioner by which compiled backward casts again
``flops.py``, ``sqnr.py``   what products count as, and what casts lose
=========================== ====================================================================

A new kernel is one file in ``gpu/`` and one row in a table of `casts` or `products`.

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
