"""Least squares, with Student's intervals of what the coefficients say.

For observations y_i = x_i . b + e_i with independent errors e_i of one variance,

    b = (X'X)^-1 X'y,   s^2 = |y - X b|^2 / (n - k),   var(c . b) = s^2 c' (X'X)^-1 c

and c . b lies within t(n - k) * sqrt(var(c . b)) of its estimate at a confidence of 95 % (any
textbook of linear regression; t as in `paired.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.paired import quantile

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
