"""Constraints: the value on which the factors of one operation agree.

The ideal factors of an operation give its output and each of its input gradients unit scale. But
backward must compute the gradient of the forward, up to one constant for the whole network. Unit
scaling shows when that holds (arXiv 2303.11257, section 4): the factors of the output and of an
input's gradient must be equal, unless the input is a cut edge of the graph, whose removal separates
the input's part from the rest: a weight, a bias, the logits of the loss, the branch of a residual.
A constraint replaces the factors by one:

    gmean  (a b c) ** (1/3)      hmean  3 / (1/a + 1/b + 1/c)      amean  (a + b + c) / 3
    to_output_scale  a           to_grad_input_scale  b, of two    None  each keeps its own
                                 to_left_grad_scale   b, of three
                                 to_right_grad_scale  c, of three

u-muP takes `to_output_scale` everywhere (arXiv 2407.17465, appendix B): activations
then have unit scale exactly, gradients nearly where an operation's fan-in and fan-out agree.
Operations take a constraint by name, as a function of the factors, or None.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

__all__ = [
    "Constraint",
    "amean",
    "apply_constraint",
    "gmean",
    "hmean",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]

Constraint = str | Callable[..., float] | None
"""A name of this module, a function of the scales, or None for no constraint."""


def gmean(*scales: float) -> float:
    """The geometric mean of the scales; the choice of the first unit scaling paper."""
    return functools.reduce(operator.mul, scales) ** (1 / len(scales))


def hmean(*scales: float) -> float:
    """The harmonic mean of the scales; of 1/fan_in and 1/fan_out it is Glorot's."""
    return len(scales) / sum([1 / scale for scale in scales])


def amean(*scales: float) -> float:
    """The arithmetic mean of the scales."""
    return sum(scales) / len(scales)


def to_output_scale(output_scale: float, *grad_input_scale: float) -> float:
    """The scale of the output."""
    return output_scale


def to_grad_input_scale(output_scale: float, grad_input_scale: float) -> float:
    """The scale of the input's gradient, in an operation of one input."""
    return grad_input_scale


def to_left_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """The scale of the left input's gradient, in an operation of two inputs."""
    return left_grad_scale


def to_right_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """The scale of the right input's gradient, in an operation of two inputs."""
    return right_grad_scale


_CONSTRAINTS: dict[Any, Callable[..., float]] = {
    name: globals()[name] for name in __all__ if name not in ("Constraint", "apply_constraint")
}


def apply_constraint(constraint_name: Constraint, *scales: float) -> tuple[float, ...]:
    """The scales of an operation after its constraint.

    Args:
        constraint_name: the name of a function of this module; or a function of the scales, called
            with the output's first and returning one scale, or a tuple of one for each; or None.
        scales: the ideal scales, the output's and those of the inputs' gradients.

    Returns:
        As many scales: all equal, or unchanged where the constraint is None.

    Raises:
        ValueError: no constraint has this name.
        TypeError: the function takes another number of scales.
    """
    if constraint_name is None:
        return scales
    constraint: Any = constraint_name
    if not callable(constraint):
        if constraint not in _CONSTRAINTS:
            known = ", ".join(_CONSTRAINTS)
            raise ValueError(f"{constraint!r} is no constraint: use one of {known}, or None")
        constraint = _CONSTRAINTS[constraint]
    scale = constraint(*scales)
    return scale if isinstance(scale, tuple) else (scale,) * len(scales)
