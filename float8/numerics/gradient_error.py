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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from float8.linear.smoothing import inverse

if TYPE_CHECKING:
    from float8.numerics.statistics import CastMatrix

PROBES = 16  # columns of V


def projected(x: CastMatrix, factors_1K: Tensor | None) -> Tensor:
    """``x @ V`` and ``x' @ V``: (2, tokens, PROBES) in float64.

    ``factors_1K`` are those by which the layer multiplied its input before the cast, and by whose
    inverse it multiplies the gradient (`float8.linear.smoothing`); None for neither.
    """
    v = _probes(x.data.shape[1]).to(x.data.device)
    v = v if factors_1K is None else v * inverse(factors_1K).t()
    found = v.new_zeros(2, len(x.data), PROBES)
    for piece in x.pieces():
        for total, part in zip(found, (piece.exact, piece.data * piece.scale), strict=True):
            torch.mm(part, v, out=total[piece.rows])
    return found


def contracted(g: CastMatrix, right: Tensor) -> Tensor:
    """``g^T @ right[0]`` and ``g'^T @ right[1]``: (2, out_features, PROBES)."""
    found = right.new_zeros(2, g.data.shape[1], PROBES)
    for piece in g.pieces():
        for i, part in enumerate((piece.exact, piece.data * piece.scale)):
            found[i].addmm_(part.t(), right[i, piece.rows])
    return found


def energies(products: Tensor) -> Tensor:
    """Estimates of ``|G|^2`` and ``|E|^2`` from the sum of the products of all calls."""
    exact, cast = products
    return torch.stack([exact, cast - exact]).square().sum((1, 2)) / PROBES


@cache
def _probes(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (features, PROBES), generator=generator)
    return (2 * bits - 1).double()
