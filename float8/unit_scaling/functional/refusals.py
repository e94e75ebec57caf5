"""Checks of arguments that functions and modules share; each names the caller in its message."""

from __future__ import annotations

import math

from torch import Tensor


def check_mult(mult: float, caller: str) -> None:
    """Raise ValueError unless ``mult``, which multiplies an input, is positive and finite.

    Nor may it be a bool or a tensor, for example torch's ``inplace`` at its position.
    """
    if isinstance(mult, bool | Tensor) or not 0 < mult < math.inf:
        raise ValueError(
            f"{caller}: mult is a finite number that multiplies the input and is greater than 0, "
            f"got {mult!r}; name other arguments, such as inplace=False"
        )


def refuse(is_given: bool, caller: str, argument: str, instead: str) -> None:
    """Raise a ValueError if an argument of torch's is given that has no unit-scaled meaning."""
    if is_given:
        raise ValueError(f"{caller}: {argument} cannot be unit-scaled; {instead}")


def refuse_inplace(inplace: bool, caller: str) -> None:
    """Raise a ValueError if ``inplace``."""
    refuse(inplace, caller, "inplace=True", "pass inplace=False")


def refuse_frequencies(scale_grad_by_freq: bool, caller: str) -> None:
    """Raise a ValueError if gradients would be divided a second time."""
    refuse(scale_grad_by_freq, caller, "scale_grad_by_freq=True", "pass False")


def refuse_legacy(caller: str, size_average: bool | None, reduce: bool | None) -> None:
    """Raise a ValueError if an old name of ``reduction`` is used."""
    given = size_average is not None or reduce is not None
    refuse(given, caller, "size_average or reduce", "pass reduction='none', 'mean' or 'sum'")
