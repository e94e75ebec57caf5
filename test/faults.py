"""Faults that float8 libraries have had, planted one at a time.

Each fault is a context manager with a name. `test_faults.py` and the checks named below show that
the suite finds it. Add a fault here for each mistake that a change could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from float8 import kernels
from float8.distributed import sync
from float8.kernels import Float8Matrix, cpu, definition
from float8.linear import casts
from float8.linear.autograd import Float8LinearFunction

Fault = Callable[[], Any]


def _patched(owner: Any, names: str, make: Callable[[Any], Any]) -> Fault:
    @contextmanager
    def plant() -> Iterator[None]:
        made = {name: make(getattr(owner, name)) for name in names.split()}
        with mock.patch.multiple(owner, **made):
            yield

    return plant


def _truncating_cast(original: Any) -> Any:
    """Round toward zero: subtract one from each byte whose value is too large."""

    def cast(x: Tensor, scale: Tensor, block: Any, dtype: torch.dtype, *rest: Any) -> Tensor:
        data = original(x, scale, block, dtype, *rest)
        too_large = definition.dequantize(data, scale, block, torch.float32).abs() > x.abs().float()
        bytes_ = data.view(torch.uint8)
        return (bytes_ - too_large.to(torch.uint8)).view(dtype)

    return cast


def _swapped_scales(original: Any) -> Any:
    """Multiply each operand of a GEMM by the scale of the other one."""

    def multiply(a: Float8Matrix, b: Float8Matrix, *rest: Any) -> Tensor:
        scales = [other.scale[:1, :1].expand_as(x.scale) for x, other in ((a, b), (b, a))]
        return original(a._replace(scale=scales[0]), b._replace(scale=scales[1]), *rest)

    return multiply


def _inverted_scale(original: Any) -> Any:
    """Divide by the scales in a GEMM, instead of multiplying."""

    def multiply(a: Float8Matrix, b: Float8Matrix, *rest: Any) -> Tensor:
        a, b = [x._replace(scale=definition.reciprocal(x.scale)) for x in (a, b)]
        return original(a, b, *rest)

    return multiply


def _wrong_format(original: Any) -> Any:
    """Cast to the fnuz formats of other hardware, whose exponent bias differs by one."""
    other = {
        torch.float8_e4m3fn: torch.float8_e4m3fnuz,
        torch.float8_e5m2: torch.float8_e5m2fnuz,
    }
    return lambda x, scale, block, dtype, *rest: original(x, scale, block, other[dtype], *rest)


def _format_maximum_of_fnuz(original: Any) -> Any:
    """Compute scales for a largest value of 240, as another library's simulation does."""
    return lambda amax, format_max, *rest: original(amax, min(format_max, 240.0), *rest)


def _stale_scale(original: Any) -> Any:
    """Compute scales from an amax of 1, whatever the data."""
    return lambda amax, format_max, *rest: original(torch.ones_like(amax), format_max, *rest)


def _one_scale_for_all_rows(original: Any) -> Any:
    """Use the smallest block's amax for every block."""

    def amax(x: Tensor, block: Any) -> Tensor:
        found: Tensor = original(x, block)
        return found.min().expand(found.shape)

    return amax


def _sign_only_gradient(original: Any) -> Any:
    """Keep only the sign of grad_output, and its mean magnitude."""

    def backward(ctx: Any, g: Tensor) -> Any:
        return original(ctx, g.sign() * g.abs().mean())

    return staticmethod(backward)


def _forgotten_clamp(original: Any) -> Any:
    """Cast without saturation."""
    return lambda x, scale, block, dtype, *rest: original(x, scale, block, dtype, True)


# Found by layer_check.check_layer.
LAYER_FAULTS: dict[str, Fault] = {
    "truncating cast": _patched(cpu, "cast_by_scale", _truncating_cast),
    "swapped scales": _patched(kernels, "multiply", _swapped_scales),
    "inverted scale": _patched(kernels, "multiply", _inverted_scale),
    "wrong format": _patched(cpu, "cast_by_scale", _wrong_format),
    "format maximum of fnuz": _patched(cpu, "scale_from_amax", _format_maximum_of_fnuz),
    "stale scale": _patched(cpu, "scale_from_amax e8m0_scale_from_amax", _stale_scale),
    "one scale for all rows": _patched(cpu, "amax", _one_scale_for_all_rows),
    "sign-only gradient": _patched(Float8LinearFunction, "backward", _sign_only_gradient),
}
# Found by test_faults.py, and by distributed/test_parallel_training.py.
forgotten_clamp = _patched(cpu, "cast_by_scale", _forgotten_clamp)
missing_all_reduce = _patched(sync, "max_over_ranks", lambda original: lambda amax, group: amax)


def _amax_of_this_rank_alone(original: Any) -> Any:
    """Find the scale of a tensor that is cut over ranks from this rank's part."""
    return lambda amax, group: amax


def _amax_of_all_ranks(original: Any) -> Any:
    """Find the scale from the data of all replicas, rather than of the ranks of one tensor."""
    return lambda amax, group: original(amax, torch.distributed.group.WORLD)


# Found by distributed/test_tensor_parallel.py.
no_group = _patched(casts, "max_over_ranks", _amax_of_this_rank_alone)
default_group = _patched(casts, "max_over_ranks", _amax_of_all_ranks)
