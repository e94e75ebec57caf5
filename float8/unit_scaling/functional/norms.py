"""Norms and embeddings: their values have unit scale already, their weights' gradients do not.

A norm divides by the scale that it finds, so its output has unit scale and its input's gradient
too, where the input has. Its weight and bias are used once in each row: their gradients sum over
the M rows, and are divided by ``sqrt(M)``. A row of an embedding's weight gets the gradients of
the tokens that chose it: M/V of them, of M tokens and V rows, so its factor is ``sqrt(V/M)``.
(unit scaling, arXiv 2303.11257, table A.2; u-muP, arXiv 2407.17465, appendix B). Weights are cut
edges, so nothing constrains these factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.override import overridable
from float8.unit_scaling.scale import scale_bwd


@overridable
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.layer_norm``.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the sizes of the last dimensions, which are normalised together.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.

    Returns:
        As the input.
    """
    scale = _per_row(input, normalized_shape)
    weight = None if weight is None else scale_bwd(weight, scale)
    bias = None if bias is None else scale_bwd(bias, scale)
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


@overridable
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.rms_norm``.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the sizes of the last dimensions, which are normalised together.
        weight: of shape ``normalized_shape``, or None.
        eps: added to the mean square; None for the epsilon of the dtype, torch's default.

    Returns:
        As the input.
    """
    weight = None if weight is None else scale_bwd(weight, _per_row(input, normalized_shape))
    return F.rms_norm(input, tuple(normalized_shape), weight, eps)


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
    """A unit-scaled ``F.embedding``: rows of the weight, as they are.

    Args:
        input: indices, any shape; M of them.
        weight: (V, D), of unit scale.
        padding_idx: the row that gets no gradient. The other rows' factor is still ``sqrt(V/M)``:
            how many indices are padding is known only at run time.
        max_norm: rows in use of a larger norm are shrunk to it first, in the weight itself.
        norm_type: p of that norm.
        scale_grad_by_freq: must be False, for it would divide by the counts a second time.
        sparse: whether the weight's gradient is a sparse tensor.

    Returns:
        (*input.shape, D).

    Raises:
        ValueError: ``scale_grad_by_freq``.
    """
    refuse_frequencies(scale_grad_by_freq, "embedding")
    if max_norm is not None:
        # Here, not in F.embedding: what it would be given is a view, whose base must not change.
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    weight = scale_bwd(weight, (weight.shape[0] / max(input.numel(), 1)) ** 0.5)
    return F.embedding(input, weight, padding_idx, sparse=sparse)


def refuse_frequencies(scale_grad_by_freq: bool, function: str) -> None:
    """Raises a ValueError that names ``function`` if ``scale_grad_by_freq``."""
    if scale_grad_by_freq:
        raise ValueError(
            f"{function}: scale_grad_by_freq=True divides gradients by how often a row is used, "
            "which their unit-scaling factor does already; pass False"
        )


def _per_row(input: Tensor, normalized_shape: Sequence[int]) -> float:
    """One over the root of the number of rows."""
    rows = 1
    for size in input.shape[: input.dim() - len(normalized_shape)]:
        rows = rows * size
    return float(1 / max(rows, 1) ** 0.5)
