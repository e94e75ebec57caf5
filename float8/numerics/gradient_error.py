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

import torch
from torch import Tensor

from float8.linear.smoothing import inverse
from float8.numerics.statistics import PROBES, Float8Matrix, Products


def probes(features: int, factors_1K: Tensor | None, device: torch.device) -> Products:
    """V: (features, PROBES).

    ``factors_1K`` are those by which the layer multiplied its input before the cast, and by whose
    inverse it multiplies the gradient (`float8.linear.smoothing`); None for neither.
    """
    v = _probes(features).to(device)
    v = v if factors_1K is None else v * inverse(factors_1K).t()
    return Products(v, v)


def contracted(matrix: Float8Matrix, right: Products, is_transposed: bool) -> Products:
    """``x @ right`` and ``x' @ right``, where ``matrix`` is x or, ``is_transposed``, that of x."""
    if matrix.is_column_major:
        matrix, is_transposed = matrix.t(), not is_transposed
    rows = matrix.data.shape[1 if is_transposed else 0]
    found = Products(*(right.exact.new_zeros(rows, PROBES) for _ in range(2)))
    for piece in matrix.pieces():
        operands = piece.exact, piece.data * piece.scale
        for total, part, factor in zip(found, operands, right, strict=True):
            if is_transposed:
                total.addmm_(part.t(), factor[piece.rows])
            else:
                torch.mm(part, factor, out=total[piece.rows])
    return found


@cache
def _probes(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (features, PROBES), generator=generator)
    return (2 * bits - 1).double()
