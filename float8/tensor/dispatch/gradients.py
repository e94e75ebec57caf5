"""Operations on gradients between backward and step: norms, scaling, clipping, zeroing.

With them ``clip_grad_norm_``, ``clip_grad_value_``, ``GradScaler`` and ``zero_grad`` work on float8
gradients. Multiplying or dividing by a number changes the scale and keeps the data. If the scale
would fall below the smallest one, 2^-126, the values become 0. Norms, sums and checks dequantise to
float32, one tensor at a time. NaN stays NaN. Only ``clamp_`` rounds a second time, and ``mul_`` and
``div_`` of a tensor with many scales.

``add_`` is not defined: small updates of an ordinary optimizer would be lost by rounding, without
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.tensor.dispatch.copies import is_part
from float8.tensor.parts import is_e8m0
from float8.tensor.tensor import Float8Tensor, implements

aten = torch.ops.aten


@implements(aten.zero_.default)
def _zero_(func: Any, x: Float8Tensor) -> Float8Tensor:
    x.float8_data.view(torch.uint8).zero_()
    if not is_part(x):
        x.scale.fill_(1.0)
    return x


@implements(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _scale_(func: Any, x: Tensor, factor: Tensor | float) -> Tensor:
    """``x.mul_(factor)`` and ``x.div_(factor)``."""
    if not isinstance(x, Float8Tensor) or isinstance(factor, Float8Tensor):
        raise TypeError(f"{func} by a Float8Tensor: call .dequantize() on it first")
    change = torch.mul if func in (aten.mul_.Tensor, aten.mul_.Scalar) else torch.div
    if not _is_for_the_scale(x, factor):
        return x.copy_(change(x.dequantize(torch.float32), factor))
    return _with_scale(x, change(x.scale, factor))


def _is_for_the_scale(x: Float8Tensor, factor: Tensor | float) -> bool:
    is_one = not isinstance(factor, Tensor) or factor.numel() == 1
    return is_one and x.scale.numel() == 1 and not is_part(x) and not is_e8m0(x.scale)


def _with_scale(x: Float8Tensor, scale: Tensor) -> Float8Tensor:
    """Replace the scale of x by one of any sign and dtype, in place; the data keeps its bits.

    A negative scale inverts the signs of the data. A scale that is too small makes finite data 0.
    """
    scale = scale.float().reshape(x.scale.shape)
    codes = x.float8_data.view(torch.uint8)
    codes.bitwise_xor_((scale < 0).to(torch.uint8).view((1,) * x.dim()) << 7)  # the sign bit
    vanish = (scale.abs() < kernels.MIN_SCALE).view((1,) * x.dim())
    codes.masked_fill_(vanish & x.float8_data.to(torch.bfloat16).isfinite(), 0)
    x.scale.copy_(scale.abs().clamp(min=kernels.MIN_SCALE))
    return x


@implements(aten.clamp_.default)
def _clamp_(
    func: Any, x: Float8Tensor, min: float | None = None, max: float | None = None
) -> Float8Tensor:
    x.copy_(x.dequantize(torch.float32).clamp_(min, max))
    return x


@implements(aten.sum.default, aten.sum.dim_IntList)
def _sum(func: Any, x: Float8Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype = kwargs.pop("dtype", None) or x.dtype
    result: Tensor = func(x.dequantize(torch.float32), *args, **kwargs)
    return result.to(dtype)


@implements(aten.linalg_vector_norm.default)
def _vector_norm(func: Any, x: Float8Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(x.dequantize(torch.float32), *args, **kwargs)
    return result


@implements(aten._foreach_norm.Scalar)
def _foreach_norm(
    func: Any, tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


_IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten._foreach_mul_.Tensor: Tensor.mul_,
    aten._foreach_mul_.Scalar: Tensor.mul_,
    aten._foreach_clamp_min_.Scalar: lambda x, least: x.clamp_(min=least),
    aten._foreach_clamp_max_.Scalar: lambda x, most: x.clamp_(max=most),
    aten._foreach_zero_.default: Tensor.zero_,
}


@implements(*_IN_PLACE)
def _foreach_(func: Any, tensors: Sequence[Tensor], *args: Any) -> None:
    for x in tensors:
        _IN_PLACE[func](x, *args)


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_(
    func: Any, tensors: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor
) -> None:
    plain = [x for x in tensors if not isinstance(x, Float8Tensor)]
    if plain:
        func(plain, found_inf, inverse_scale)
    for x in tensors:
        if isinstance(x, Float8Tensor):
            is_bad = ~x.dequantize(torch.float32).isfinite().all()
            found_inf.copy_(found_inf.bool() | is_bad)
            x.mul_(inverse_scale)
