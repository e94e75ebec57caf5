"""Losses: their gradients have unit scale, their values are torch's.

A loss is the last node of the graph and its input a cut edge, so the factor of the gradient is
free. It gives the gradient unit scale *per element*, and is applied to the gradient of the sum over
tokens: a mean of N losses would divide every gradient by the constant N (unit scaling, arXiv
2303.11257, table A.2; u-muP, arXiv 2407.17465, appendix B):

    reduction    value                      gradient that reaches the input
    "none"       each loss                  unit scale
    "sum"        their sum                  unit scale
    "mean"       their mean, as torch's     that of the sum: unit scale, whatever the batch

**Cross entropy** of C classes, with logits of 0 (or small ones, as a readout's): the gradient of a
row is ``p - q``, ``p = 1/C`` everywhere and ``q`` the one-hot target. Its mean square is
``((1 - 1/C)**2 + (C - 1)/C**2) / C = (C - 1)/C**2``, so the factor is ``C / sqrt(C - 1)``.

With class weights w and label smoothing e the loss is ``-sum_j a_j log p_j``, where
``a = (1 - e) w_t onehot(t) + (e/C) w``; its gradient is ``sum(a)/C - a_j``. Over targets t drawn
evenly, with m and s the means of w and of w**2,

    mean square = s ((1 - e)**2 + (2 e - e**2) / C) / C - ((1 - e)**2 s + (2 e - e**2) m**2) / C**2

which is ``((1 - e) / C)**2 (C - 1)`` for weights of one. Ignored tokens have no gradient; the
gradients of the others have unit scale.

**Squared error** of independent x and t of unit scale: the gradient is ``2 (x - t)``, of scale
``2 sqrt(2)``, so the factor is ``1 / sqrt(8)``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.core.functional import check_mult, refuse
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd

_LEGACY = "size_average or reduce", "pass reduction='none', 'mean' or 'sum'"


@overridable
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mult: float = 1.0,
) -> Tensor:
    """A unit-scaled ``F.cross_entropy``: torch's value, and a gradient of unit scale per logit.

    Args:
        input, weight, ignore_index, label_smoothing: as of ``F.cross_entropy``.
        target: class indices or probabilities. The gradient of probabilities has unit scale where
            they are one-hot, and less where not.
        size_average, reduce: must be None; torch replaced them by ``reduction``.
        reduction: "none", "sum" or "mean". The gradient of "mean" is that of "sum": a mean over N
            tokens would divide all gradients by N.
        mult: multiplies the logits, but not their gradient.

    Raises:
        ValueError: a legacy argument, or a ``mult`` that is not positive.
        KeyError: an unknown reduction.
        ZeroDivisionError: a single class, whose gradient is zero, or a label smoothing of 1.
    """
    refuse((size_average, reduce) != (None, None), "cross_entropy", *_LEGACY)
    check_mult(mult, "cross_entropy")
    classes = input.shape[0 if input.dim() == 1 else 1]
    logits = scale_bwd(input, _gradient_factor(classes, weight, label_smoothing))
    if mult != 1:
        logits = scale_fwd(logits, mult)
    losses = F.cross_entropy(
        logits, target, weight, None, ignore_index, None, "none", label_smoothing
    )
    return _reduced(losses, reduction, _count(losses, target, weight, ignore_index))


@overridable
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """A unit-scaled ``F.mse_loss``: torch's value, gradients of unit scale per element.

    Args:
        input, target: of one shape.
        size_average, reduce: must be None; torch replaced them by ``reduction``.
        reduction: "none", "sum" or "mean". The gradient of "mean" is that of "sum": a mean over N
            tokens would divide all gradients by N.
        weight: must be None: weighted gradients have the scale of the weights.

    Raises:
        ValueError: a weight, or a legacy argument.
        KeyError: an unknown reduction.
    """
    refuse((size_average, reduce) != (None, None), "mse_loss", *_LEGACY)
    refuse(weight is not None, "mse_loss", "weight", "multiply the losses of reduction='none'")
    factor = 8**-0.5
    losses = F.mse_loss(scale_bwd(input, factor), scale_bwd(target, factor), reduction="none")
    return _reduced(losses, reduction, losses.new_full((), losses.numel(), dtype=_wide(losses)))


def _reduced(losses: Tensor, reduction: str, count: Tensor) -> Tensor:
    """Torch's reductions, but with the gradient of the sum for the mean.

    The sum is at least float32: that of many float16 losses may overflow where their mean does not.
    """
    if reduction == "none":
        return losses
    total = losses.sum(dtype=_wide(losses))
    if {"mean": True, "sum": False}[reduction]:
        total = scale_fwd(total, 1 / count)
    return total.to(losses.dtype)


def _count(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of torch's mean: the sum of the weights of targets that are not ignored."""
    wide = _wide(losses)
    # Of probabilities none is ignored, and torch does not weight the count.
    if target.is_floating_point():
        return losses.new_full((), losses.numel(), dtype=wide)
    counted = target != ignore_index
    if weight is None:
        return counted.sum(dtype=wide)
    return (weight.detach().to(wide)[(target * counted).long()] * counted).sum()


def _wide(losses: Tensor) -> torch.dtype:
    """The dtype in which losses are summed and counted."""
    return torch.promote_types(losses.dtype, torch.float32)


def _gradient_factor(classes: int, weight: Tensor | None, label_smoothing: float) -> float | Tensor:
    """One over the root mean square of the gradient at even logits."""
    e, kept = label_smoothing, 1 - label_smoothing
    if weight is None:
        return float(classes / (classes - 1) ** 0.5 / kept)
    w = weight.detach().double()
    s, m = w.square().mean(), w.mean()
    rest = 2 * e - e**2
    second = s * (kept**2 + rest / classes) / classes
    first = (kept**2 * s + rest * m**2) / classes**2
    return (second - first).rsqrt()
