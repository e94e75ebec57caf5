"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the products of the library.

As for ``nn.Linear``: two operations per element of the result and of the contraction. Torch counts
``torch._scaled_mm`` itself; torch 2.11 to 2.13 count no grouped product, their own included.

Conversion imports this file and ``import float8`` does not, since torch's counter imports Triton.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from float8.kernels.registration import load_kernels

_OURS, _ATEN = torch.ops.float8, torch.ops.aten


def of_products(a: Any, a_scale: Any, b: Any, *others: Any, **kwargs: Any) -> int:
    """(M, K) by (N, K), or (T, K) by (E, N, K)."""
    return 2 * prod(a) * int(b[-2])


def of_groups(a: Any, a_scale: Any, b: Any, b_scale: Any, offs: Any, *others: Any, **_: Any) -> int:
    """(T, C) by (E, N, C); or (M, P) by (N, P), without the columns between groups."""
    align = others[3]
    between = -(offs[0] * (1 - align) // align) * align if len(b) == 2 else 0
    return 2 * int(a[0]) * (int(a[1]) - between) * int(b[-2])


def of_torch(a: Any, b: Any, *others: Any, **kwargs: Any) -> int:
    """Torch's grouped products: (T, K) by (E, K, N), (M, P) by (P, N), padding included."""
    return 2 * prod(a if len(b) == 3 else a[-2:]) * int(b[-1])


# In plain PyTorch there are no columns between groups.
register_flop_formula([_OURS.scaled_mm, _OURS.cublas_blockwise_mm, _OURS.grouped_mm])(of_products)
for _op in (_ATEN._grouped_mm, _ATEN._scaled_grouped_mm):
    if _op not in flop_registry:
        register_flop_formula(_op)(of_torch)
if torch.cuda.is_available() and find_spec("triton") is not None:
    load_kernels("blockwise_mm", "grouped_mm")
    register_flop_formula(_OURS.blockwise_mm)(of_products)
    register_flop_formula(_OURS.grouped_mm_gpu)(of_groups)
