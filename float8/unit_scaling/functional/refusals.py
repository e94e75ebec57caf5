"""Checks of arguments that functions and modules share; each names the caller in its message."""

from __future__ import annotations

import math

from torch import Tensor


def check_mult(mult: float, caller: str) -> None:
    """Raise ValueError unless ``mult``, which multiplies an input, is positive and finite.

    Raises TypeError if it is a bool or a tensor, for example torch's ``inplace`` at its position.
    """
    if isinstance(mult, bool | Tensor):
        raise TypeError(
            f"{caller}: mult is a number that multiplies the input, got {mult!r}; name other "
            "arguments, such as inplace=False"
        )
    if not 0 < mult < math.inf:
        raise ValueError(
            f"{caller}: mult multiplies the input, is finite and greater than 0, got {mult}"
        )


def check_probability(p: float, argument: str) -> None:
    """Raise a ValueError unless dropout with ``p`` leaves something to scale."""
    if not 0 <= p < 1:
        raise ValueError(
            f"{argument} is a probability in [0, 1), got {p}; with 1 nothing is left to scale"
        )


def refuse_inplace(inplace: bool, caller: str) -> None:
    """Raise a ValueError if ``inplace``."""
    if inplace:
        raise ValueError(
            f"{caller}: inplace=True cannot be unit-scaled, whose factors differ between the "
            "value and its gradient; pass inplace=False"
        )


def refuse_frequencies(scale_grad_by_freq: bool, caller: str) -> None:
    """Raise a ValueError if ``scale_grad_by_freq``."""
    if scale_grad_by_freq:
        raise ValueError(
            f"{caller}: scale_grad_by_freq=True divides gradients by how often a row is used, "
            "which their unit-scaling factor does already; pass False"
        )


def refuse_legacy(caller: str, size_average: bool | None, reduce: bool | None) -> None:
    """Raise a ValueError if an old name of ``reduction`` is used."""
    if size_average is not None or reduce is not None:
        raise ValueError(
            f"{caller}: size_average={size_average} and reduce={reduce} are torch's old names; "
            "pass reduction='none', 'mean' or 'sum'"
        )
