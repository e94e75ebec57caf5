"""What the casts of a layer leave of its weight's gradient, found by random projections.

With x the input (tokens, in_features) and g the gradient of the output (tokens, out_features), and
with x' and g' what the GEMM ``grad_weight`` reads of them::

    G = g^T x       the gradient that the layer would have without these two casts
    E = g'^T x' - G
    gradient_sqnr = 10 log10( |G|^2 / |E|^2 )                               in dB

Training gains little from a gradient that its quantisation error drowns. In Chmiel et al., "FP4 All
the Way" (arXiv 2505.19115), quantised training loses its effect when the norm of the gradient falls
below about sqrt(3) times that of the quantisation noise. That is a gradient SQNR of
10 log10(3) = 4.8 dB, below which a cast has a problem here.

**Against sampling noise.** The gradient of a batch is noisy without any cast: for samples with
covariance S, ``E |G|^2 = |true G|^2 + tr(S) / B`` (McCandlish et al., "An Empirical Model of
Large-Batch Training", arXiv 1812.06162, appendix A.1). G is that of the batch, with its sampling
noise. Casts at 32 and 26 dB put some 0.3 % of the energy of the tokens' own products into E. So the
ratio is large where tokens disagree, and falls where they cancel: late in a training, with batches
that the model knows.

**Cost.** Neither G nor E is computed. For V of p columns, whose elements are +1 and -1 at random,
``E |G V|^2 = p |G|^2`` (Hutchinson, "A stochastic estimator of the trace of the influence matrix",
1990). The products ``g^T (x V)`` take 2 p operations for each element of x and of g, and
p numbers per token are kept from forward to backward. With p = 16 the estimate of a matrix has a
standard deviation of at most sqrt(2 / 16) = 35 %, which is 1.5 dB. V depends on ``in_features``
alone: the errors of looks compare, and products of several calls add up to those of their sum.

Microbatches of a step are so taken together. Energies of ranks add up: where the gradients of ranks
agree, that of their mean has a larger ratio. Errors that arrive in g and x from other layers are
not in E, and neither are those of an operand that arrives in float8.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from float8.linear.smoothing import inverse
from float8.numerics.statistics import Float8Matrix, per_element, pieces

PROBES = 16


class Products(NamedTuple):
    """A product of exact operands, and that of their casts; float64."""

    exact: Tensor
    cast: Tensor


class GradientEnergies(NamedTuple):
    """Estimates of ``|G|^2`` and ``|E|^2``; float64 scalars on the device."""

    gradient: Tensor
    noise: Tensor


def project_input(
    x: Tensor | None,
    matrix: Float8Matrix,
    is_transposed: bool,
    factors_1K: Tensor | None = None,
) -> Products:
    """``x V`` and ``x' V``: (tokens, PROBES).

    Args:
        x: (tokens, in_features), or its transpose; None takes the cast for exact.
        matrix: its cast.
        is_transposed: whether both are transposes.
        factors_1K: by which the layer multiplied its input before the cast, and by whose inverse it
            multiplies the gradient (`float8.linear.smoothing`); None for neither.
    """
    features = matrix.data.shape[0 if is_transposed else 1]
    v = _probes(features).to(matrix.data.device)
    v = v if factors_1K is None else v * inverse(factors_1K).t()
    return _contracted(x, matrix, Products(v, v), over_rows=is_transposed)


def project_gradient(
    g: Tensor | None, matrix: Float8Matrix, is_transposed: bool, projected: Products
) -> Products:
    """``G V`` and ``(G + E) V``: (out_features, PROBES).

    Args:
        g: (tokens, out_features), or its transpose; None takes the cast for exact.
        matrix: its cast.
        is_transposed: whether both are transposes.
        projected: the result of `project_input`.
    """
    return _contracted(g, matrix, projected, over_rows=not is_transposed)


def energies(products: Products) -> GradientEnergies:
    """The estimates from the sum of the products of all calls."""
    error = products.cast - products.exact
    return GradientEnergies(*(each.square().sum() / PROBES for each in (products.exact, error)))


@cache
def _probes(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (features, PROBES), generator=generator)
    return (2 * bits - 1).double()


def _contracted(
    x: Tensor | None, matrix: Float8Matrix, right: Products, over_rows: bool
) -> Products:
    """``x @ right``, or ``x.T @ right`` over rows; piece by piece, as casts are measured."""
    if not matrix.data.is_contiguous() and matrix.data.stride(0) == 1:
        x, matrix, over_rows = None if x is None else x.t(), matrix.t(), not over_rows
    dtype, device = matrix.data.dtype, matrix.data.device
    rows, columns = matrix.data.shape
    shape = (columns if over_rows else rows, PROBES)
    found = Products(*(torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2)))
    if not matrix.data.numel():
        return found
    values = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).double()
    for some, some_scales in pieces(matrix):
        data = matrix.data[some]
        codes = data.reshape(-1).view(torch.uint8).int()
        scale = per_element(matrix.scale[some_scales].double(), data.shape, matrix.block)
        cast = values.index_select(0, codes).view(data.shape).mul_(scale)
        exact = cast if x is None else x[some].double()
        for total, part, factor in zip(found, (exact, cast), right, strict=True):
            if over_rows:
                total.addmm_(part.t(), factor[some])
            else:
                torch.mm(part, factor, out=total[some])
    return found
