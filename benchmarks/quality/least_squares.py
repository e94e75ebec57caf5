"""Least squares, with Student's intervals of what the coefficients say.

For observations y_i = x_i . b + e_i with independent errors e_i of one variance,

    b = (X'X)^-1 X'y,   s^2 = |y - X b|^2 / (n - k),   var(c . b) = s^2 c' (X'X)^-1 c

and c . b lies within t(n - k) * sqrt(var(c . b)) of its estimate at a confidence of 95 % (any
textbook of linear regression). t(k) is the 97.5 % quantile of Student's t distribution with k
degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The 97.5 % quantile of the t distribution with 1, 2, ... degrees of freedom (any table of it).
# fmt: off
QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)
# fmt: on


def quantile(freedom: int) -> float:
    """97.5 % of the t distribution; beyond 30 degrees of freedom that of 30, 4 % too much at most.

    Infinite without a degree of freedom.
    """
    return QUANTILES[min(freedom, len(QUANTILES)) - 1] if freedom > 0 else math.inf


Observation = tuple[Mapping[str, float], float]  # coefficient -> its factor; the value observed


@dataclass(frozen=True)
class Fit:
    """Coefficients by name, and how certain they are.

    Attributes:
        coefficients: estimates.
        covariance: of the estimates, in the order of ``coefficients``.
        freedom: degrees of freedom of the errors.
    """

    coefficients: dict[str, float]
    covariance: Tensor
    freedom: int

    def combined(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """``sum(weight * coefficient)``, and the half width of its interval."""
        c = torch.tensor([weights.get(n, 0.0) for n in self.coefficients], dtype=torch.float64)
        mean = sum(weight * self.coefficients[name] for name, weight in weights.items())
        return mean, quantile(self.freedom) * math.sqrt(float(c @ self.covariance @ c))


def fit(observations: Sequence[Observation]) -> Fit | None:
    """The least-squares fit; None while observations are too few to tell the coefficients."""
    names = list(dict.fromkeys(name for factors, _ in observations for name in factors))
    X = torch.tensor(
        [[factors.get(name, 0.0) for name in names] for factors, _ in observations],
        dtype=torch.float64,
    )
    y = torch.tensor([value for _, value in observations], dtype=torch.float64)
    freedom = len(observations) - len(names)
    if freedom < 1 or torch.linalg.matrix_rank(X) < len(names):
        return None
    inverse = torch.linalg.inv(X.T @ X)
    b = inverse @ X.T @ y
    variance = (y - X @ b).square().sum() / freedom
    return Fit(dict(zip(names, b.tolist(), strict=True)), variance * inverse, freedom)
