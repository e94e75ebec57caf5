"""Norms and embeddings: their outputs have unit scale already, the gradients of their weights not.

A norm divides by the scale of its input, so its output has unit scale. The gradient of its input
has unit scale if the input has. The weight and the bias are used once per row: their gradients are
sums over the M rows, and are divided by ``sqrt(M)``. The gradient of a row of an embedding's weight
is a sum over the tokens with that index: M/V of M tokens for V rows, so its factor is ``sqrt(V/M)``
(unit scaling, arXiv 2303.11257, table A.2; u-muP, arXiv 2407.17465, appendix B). Weights are cut
edges, so these factors have no constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.core.functional import refuse
from float8.unit_scaling.functional.products import product_of
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd


@overridable
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.layer_norm`` of (..., *normalized_shape)."""
    factor = _factor_of_rows(input, normalized_shape)
    weight = None if weight is None else scale_bwd(weight, factor)
    bias = None if bias is None else scale_bwd(bias, factor)
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


@overridable
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.rms_norm`` of (..., *normalized_shape); eps None is torch's default."""
    weight = None if weight is None else scale_bwd(weight, _factor_of_rows(input, normalized_shape))
    return F.rms_norm(input, tuple(normalized_shape), weight, eps)


def _factor_of_rows(input: Tensor, normalized_shape: Sequence[int]) -> float:
    rows = product_of(input.shape[: input.dim() - len(normalized_shape)])
    return float(1 / max(rows, 1) ** 0.5)


@overridable
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A unit-scaled ``F.embedding``: rows of a weight of unit scale, not rescaled.

    Args:
        input, weight: M indices of any shape, and (V, D).
        padding_idx: the row that gets no gradient. The other rows' factor is still ``sqrt(V/M)``:
            how many indices are padding is known only at run time.
        max_norm, norm_type, sparse: as of ``F.embedding``.
        scale_grad_by_freq: must be False, because it would divide gradients a second time.

    Raises:
        ValueError: ``scale_grad_by_freq``.
    """
    refuse(scale_grad_by_freq, "embedding", "scale_grad_by_freq=True", "pass False")
    if max_norm is not None:
        # F.embedding gets a view, whose base must not change, so it cannot renormalise the weight.
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    weight = scale_bwd(weight, (weight.shape[0] / max(input.numel(), 1)) ** 0.5)
    return F.embedding(input, weight, padding_idx, sparse=sparse)
