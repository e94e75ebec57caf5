"""Faults that a float8 library has had somewhere, planted one at a time.

Each is a context manager under a name; `test_faults.py` shows that the suite's own checks catch it.
A check that lets one pass is worth nothing, and a fault that you fear belongs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from float8 import scaling
from float8.kernels import reference
from float8.linear import delayed
from float8.linear.autograd import _Float8LinearFunction

Fault = Callable[[], Any]


def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    @contextmanager
    def plant() -> Iterator[None]:
        original = getattr(owner, name)
        with mock.patch.object(owner, name, make(original)):
            yield

    return plant


def _truncating_cast(original: Any) -> Any:
    """Round toward zero: shrink each value so that nearest-even picks the code below."""

    def cast(
        x: Tensor, scale: Tensor, block: Any, dtype: torch.dtype, fits: bool = False
    ) -> Tensor:
        data = original(x, scale, block, dtype, fits)
        too_large = reference.dequantize(data, scale, block, torch.float32).abs() > x.abs().float()
        codes = data.view(torch.uint8)
        return (codes - too_large.to(torch.uint8)).view(dtype)

    return cast


def _swapped_scales(original: Any) -> Any:
    """The scale of the other operand on each side of a product."""

    def scaled_mm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, *rest: Any, **kw: Any) -> Tensor:
        return original(a, b_s[:1, :1].expand_as(a_s), b, a_s[:1, :1].expand_as(b_s), *rest, **kw)

    return scaled_mm


def _inverted_scale(original: Any) -> Any:
    """A product that divides by the scales instead of multiplying."""
    return lambda a, a_s, b, b_s, *rest, **kw: original(a, 1 / a_s, b, 1 / b_s, *rest, **kw)


def _wrong_format(original: Any) -> Any:
    """The format of another vendor's hardware, one exponent off."""
    other = {
        torch.float8_e4m3fn: torch.float8_e4m3fnuz,
        torch.float8_e5m2: torch.float8_e5m2fnuz,
    }
    return lambda x, scale, block, dtype, fits=False: original(x, scale, block, other[dtype])


def _format_maximum_of_fnuz(original: Any) -> Any:
    """Scales for a largest value of 240, as another library's simulation has it."""
    return lambda amax, format_max, *rest: original(amax, min(format_max, 240.0), *rest)


def _stale_scale(original: Any) -> Any:
    """Scales that never follow the data."""
    return lambda amax, format_max, *rest: original(torch.ones_like(amax), format_max, *rest)


def _one_scale_for_all_rows(original: Any) -> Any:
    """The smallest block's amax for every block."""

    def amax(x: Tensor, block: Any) -> Tensor:
        found: Tensor = original(x, block)
        return found.min().expand(found.shape)

    return amax


def _sign_only_gradient(original: Any) -> Any:
    """A gradient that keeps only the sign of grad_output."""

    def backward(ctx: Any, g: Tensor) -> Any:
        return original(ctx, g.sign() * g.abs().mean())

    return staticmethod(backward)


def _forgotten_clamp(original: Any) -> Any:
    """A cast that does not saturate."""
    return lambda x, scale, block, dtype, fits=False: original(x, scale, block, dtype, True)


# Caught by layer_check.check_layer.
LAYER_FAULTS: dict[str, Fault] = {
    "truncating cast": _patched(scaling.kernels, "cast", _truncating_cast),
    "swapped scales": _patched(reference, "scaled_mm", _swapped_scales),
    "inverted scale": _patched(reference, "scaled_mm", _inverted_scale),
    "wrong format": _patched(scaling.kernels, "cast", _wrong_format),
    "format maximum of fnuz": _patched(scaling.kernels, "scale_from_amax", _format_maximum_of_fnuz),
    "stale scale": _patched(scaling.kernels, "scale_from_amax", _stale_scale),
    "one scale for all rows": _patched(scaling.kernels, "amax", _one_scale_for_all_rows),
    "sign-only gradient": _patched(_Float8LinearFunction, "backward", _sign_only_gradient),
}
# Caught by a check of their own.
forgotten_clamp = _patched(scaling.kernels, "cast", _forgotten_clamp)
missing_all_reduce = _patched(delayed, "max_over_ranks", lambda original: lambda amax, group: amax)


def _amax_of_this_rank_alone(original: Any) -> Any:
    return lambda amax, group: amax


def _amax_of_all_ranks(original: Any) -> Any:
    """Other replicas have other data, and with them other tensors."""
    return lambda amax, group: original(amax, torch.distributed.group.WORLD)


# Caught by tensor_parallel_program.a_close_fit.
no_group = _patched(scaling, "max_over_ranks", _amax_of_this_rank_alone)
default_group = _patched(scaling, "max_over_ranks", _amax_of_all_ranks)
