"""``mult``: how sharp a nonlinear function is, the one degree of freedom that scale leaves it.

Inputs of unit scale see a fixed part of a nonlinear function. u-muP makes the part a hyperparameter
(arXiv 2407.17465, appendix B): the input is multiplied by ``mult`` first. A small one
sees the function where it is linear or flat, a large one where it is a ramp or a step. The factors
of a function depend on ``mult``, so that its scale does not.
"""

from __future__ import annotations

import math

from torch import Tensor


def checked_mult(mult: float, function: str) -> float:
    """``mult`` as it is, if it is a positive, finite number.

    Raises:
        TypeError: it is no number, or a bool (torch's ``inplace`` in the second place?).
        ValueError: it is not positive, or infinite.
    """
    if isinstance(mult, bool | Tensor):
        raise TypeError(
            f"{function}: mult is a number that multiplies the input, got {mult!r}; name other "
            "arguments, such as inplace=False"
        )
    if not 0 < mult < math.inf:
        raise ValueError(
            f"{function}: mult multiplies the input, is finite and greater than 0, got {mult}"
        )
    return mult
