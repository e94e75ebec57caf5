"""Claims in words. A claim that fails says how to make its input again, and where it fails.

Every assertion takes ``replay``, anything whose ``repr`` or ``str`` tells how to make the case
again: a `shapes.Case`, a tuple of (seed, recipe, shape), a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: Tensor, expected: Tensor, replay: Any = "", what: str = "") -> None:
    """Same dtype, shape and bits (the sign of zero included); any NaN equals any other.

    ``expected`` may hold uint8 codes where ``actual`` is float8.
    """
    _assert_same_shape(actual, expected, replay, what)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if expected.dtype == torch.uint8 and _is_float8(actual.dtype):
        expected = expected.contiguous().view(actual.dtype)
    if actual.dtype != expected.dtype:
        raise AssertionError(_text(what, replay, f"dtype {actual.dtype}, not {expected.dtype}"))
    same = (_bits(actual) == _bits(expected)) | (_nan(actual) & _nan(expected))
    if not bool(same.all()):
        raise AssertionError(_text(what, replay, _first_difference(actual, expected, ~same)))


def assert_all_bitwise(
    actual: Iterable[Tensor], expected: Iterable[Tensor], replay: Any = ""
) -> None:
    """Tensor by tensor, in order."""
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(mine, theirs, replay, f"tensor {i}")


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to quantisation noise in dB: ``20 log10(|exact| / |actual - exact|)``."""
    actual, exact = actual.detach().cpu().double(), exact.detach().cpu().double()
    noise = float((actual - exact).norm())
    signal = float(exact.norm())
    if noise == 0.0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def assert_sqnr_at_least(actual: Tensor, exact: Tensor, decibel: float, replay: Any = "") -> None:
    """``actual`` is as close to ``exact`` as a signal-to-noise ratio asks."""
    _assert_same_shape(actual, exact, replay, "")
    found = sqnr(actual, exact)
    if not found >= decibel:  # a NaN is not
        text = f"SQNR {found:.2f} dB, claimed at least {decibel:.2f} dB; {_largest(actual, exact)}"
        raise AssertionError(_text("", replay, text))


def assert_error_within_baseline(
    actual: Tensor,
    exact: Tensor,
    baseline: Tensor,
    factor: float = 2.0,
    replay: Any = "",
    what: str = "",
) -> None:
    """The error is at most ``factor`` times that of a plain computation in the same precision.

    Errors are Euclidean norms against ``exact`` (float64). A baseline that happens to be exact
    counts with the error of rounding ``exact`` to the result's dtype, which nothing avoids.
    """
    _assert_same_shape(actual, exact, replay, what)
    _assert_same_shape(baseline, exact, replay, what + " (baseline)")
    if actual.dtype != baseline.dtype:
        text = f"{actual.dtype} compared with a baseline in {baseline.dtype}"
        raise AssertionError(_text(what, replay, text))
    exact = exact.detach().cpu().double()
    plain = error(baseline, exact)
    rounding = error(exact.to(actual.dtype), exact)
    found, bound = error(actual, exact), factor * max(plain, rounding)
    if not found <= bound:
        text = (
            f"error {found:.4g}, claimed at most {factor:g} x {max(plain, rounding):.4g} (plain "
            f"{baseline.dtype} computation {plain:.4g}, rounding {rounding:.4g}); "
            f"{_largest(actual, exact)}"
        )
        raise AssertionError(_text(what, replay, text))


def error(actual: Tensor, exact: Tensor) -> float:
    """The Euclidean norm of the difference, in float64."""
    return float((actual.detach().cpu().double() - exact.detach().cpu().double()).norm())


def assert_same_float8(actual: Any, expected: Any, replay: Any = "") -> None:
    """Two Float8Tensors with the same bytes, scale bits, block, format, dtype and device."""
    assert_bitwise(actual.float8_data, expected.float8_data, replay, "data")
    assert_bitwise(actual.scale, expected.scale, replay, "scale")
    for name in ("block", "format", "scale_format", "dtype", "device", "requires_grad"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        if mine != theirs:
            raise AssertionError(_text(name, replay, f"{mine}, not {theirs}"))


def _assert_same_shape(actual: Tensor, expected: Tensor, replay: Any, what: str) -> None:
    if actual.shape != expected.shape:
        text = f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        raise AssertionError(_text(what, replay, text))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.element_size()])


def _nan(x: Tensor) -> Tensor:
    return x.float().isnan()


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _first_difference(actual: Tensor, expected: Tensor, differs: Tensor) -> str:
    at = _first(differs)
    width = 2 * actual.element_size()
    mask = 16**width - 1
    mine, theirs = (f"0x{_bits(x)[at].item() & mask:0{width}x}" for x in (actual, expected))
    return (
        f"{int(differs.sum())} of {differs.numel()} differ, first at {at}: "
        f"{mine} ({actual[at].item()!r}), expected {theirs} ({expected[at].item()!r})"
    )


def _largest(actual: Tensor, exact: Tensor) -> str:
    if not exact.numel():
        return "empty"
    off = (actual.detach().cpu().double() - exact.detach().cpu().double()).abs()
    at = _first(off == off.max()) if not bool(off.isnan().any()) else _first(off.isnan())
    return f"worst at {at}: {actual[at].item()!r}, exact {exact[at].item()!r}"


def _text(what: str, replay: Any, text: str) -> str:
    return f"{what + ': ' if what else ''}{text}\n  replay: {replay}"
