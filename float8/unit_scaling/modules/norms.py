"""Norms: `LayerNorm` and `RMSNorm`, by default without weights.

A norm makes unit scale by itself; forward and input gradient are ``torch.nn``'s. What its weight
and bias need is a factor for their gradients, which sum over the rows that are normalised:

    rows ** -0.5,     rows = input.numel() / prod(normalized_shape)

u-muP does without weights (arXiv 2407.17465, "non-parametric norms"), since a norm's weight can
undo the scale that everything before it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.parameter import MupModule, set_parameter_data


class LayerNorm(MupModule, nn.LayerNorm):
    """A unit-scaled ``nn.LayerNorm``, without weight and bias by default.

    Args:
        normalized_shape: the last dimensions, which are normalised together.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, which starts at 1.
        bias: whether there is a bias too, which starts at 0.
        device, dtype: of the parameters.

    Shape:
        (..., *normalized_shape) -> the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape: Any = normalized_shape  # torch takes any sequence, and says a list
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        if self.weight is not None:
            set_parameter_data(self.weight, "norm")
        if self.bias is not None:
            set_parameter_data(self.bias, "bias")

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same."""
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(MupModule, nn.RMSNorm):
    """A unit-scaled ``nn.RMSNorm`` (arXiv 1910.07467), without weight by default.

    ``y = x / sqrt(mean(x**2) + eps) * weight``.

    Args:
        normalized_shape: the last dimensions, which are normalised together.
        eps: added to the mean square.
        elementwise_affine: whether there is a weight, which starts at 1.
        device, dtype: of the weight.

    Shape:
        (..., *normalized_shape) -> the same.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        if self.weight is not None:
            set_parameter_data(self.weight, "norm")

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same."""
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps)
