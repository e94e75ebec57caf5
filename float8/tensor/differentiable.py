"""A `Float8Tensor` as the differentiable result of an op that computes float8 data.

It takes two autograd functions. The op's own function computes the data and receives the gradient;
`Differentiable` wraps the data. Between them the gradient flows through a *carrier*, a tensor of
one element expanded to the shape of the result. A single function would not do: torch.compile
traces a backward with gradients of the type of the forward's output, a Float8Tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8.granularity import WHOLE
from float8.tensor.tensor import Float8Tensor


class Differentiable(torch.autograd.Function):
    """``apply(carrier, data, data_t, scale)``: a `Float8Tensor`, whose gradient is the carrier's.

    The carrier has the shape and the high-precision dtype of the result; ``data`` has as many
    elements. ``data_t`` is its transposed copy, or None. ``scale`` has one element.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, data: Tensor, data_t: Tensor | None, scale: Tensor
    ) -> Tensor:
        """See the class."""
        shape, dims = carrier.shape, carrier.dim()
        scale, block = scale.reshape((1,) * dims), (WHOLE,) * dims
        return Float8Tensor(data.reshape(shape), scale, block, carrier.dtype, data_t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        return g, None, None, None
