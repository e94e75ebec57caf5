"""Operations on gradients between backward and step: norms, scaling, clipping, zeroing.

With them ``clip_grad_norm_``, ``clip_grad_value_``, ``GradScaler`` and ``zero_grad`` work on float8
gradients. Multiplying or dividing by a number changes the scales and keeps the data. Norms and
checks are in float32, one tensor at a time. NaN stays NaN. Only ``clamp_`` rounds a second time,
and ``mul_`` and ``div_`` where the product is no other float32 scale.

``add_`` is not defined: small updates of an ordinary optimizer would be lost by rounding, without
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.tensor.dispatch.copies import is_part
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
    is_one = not isinstance(factor, Tensor) or factor.numel() == 1
    if not is_one or is_part(x) or x.scale_format != "float32":
        return x.copy_(change(x.dequantize(torch.float32), factor))
    x.scale.copy_(change(x.scale, factor).reshape(x.scale.shape))
    return x


@implements(aten.clamp_.default)
def _clamp_(func: Any, x: Float8Tensor, *bounds: Any) -> Tensor:
    return x.copy_(x.dequantize(torch.float32).clamp_(*bounds))


@implements(aten.linalg_vector_norm.default)
def _norm(func: Any, x: Float8Tensor, ord: float = 2, *args: Any, **kwargs: Any) -> Any:
    """With one scale that of the data, times the scale: a third of the bytes of dequantising."""
    if x.scale.numel() != 1 or x.scale.dtype != torch.float32 or ord == 0:  # 0 counts
        return func(x.dequantize(torch.float32), ord, *args, **kwargs)
    data = x.float8_data.to(torch.bfloat16)  # exact
    dtype = kwargs.pop("dtype", None) or torch.float32
    return func(data, ord, *args, **kwargs, dtype=dtype) * x.scale.abs().reshape(())


@implements(aten._foreach_zero_.default)  # of fused optimizers; torch clips such lists one by one
def _zero_each(func: Any, tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        x.zero_()


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
