"""Modules with weights: `Linear`, `LinearReadout`, `Conv1d`, `Embedding`, `LayerNorm`, `RMSNorm`.

A unit-scaled layer starts with a weight from N(0, 1) and divides its products instead (u-muP, arXiv
2407.17465, table 2). For a layer with K inputs and N outputs per row and M rows in the batch:

                        output     input gradient   weight gradient
    Linear              K ** -0.5  K ** -0.5        M ** -0.5     constraint "to_output_scale"
    Linear              K ** -0.5  N ** -0.5        M ** -0.5     constraint None
    LinearReadout       K ** -1.0  N ** -0.5        M ** -0.5

The three exponents are `Linear.scale_power`. A constraint ties output and input gradient: for the
right gradient of a chain of layers, the product of a path's factors must be the same in both
directions. The network's last edges are the exception: `LinearReadout` needs no constraint.

A norm makes unit scale by itself; forward and input gradient are ``torch.nn``'s. u-muP's norms have
no weights (arXiv 2407.17465, "non-parametric norms"), since a norm's weight can undo the scale of
everything before it. Gradients of weights, if there are any, are multiplied by ``rows ** -0.5``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.refusals import refuse_frequencies
from float8.unit_scaling.parameter import MupModule, MupType, set_parameter_data


class ConstrainedLayer(MupModule):
    """Abstract: a layer with a weight, a bias or None, and a constraint."""

    constraint: Constraint
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5)
    weight: Any  # a parameter
    bias: Any  # a parameter or None

    def _set_roles(self, weight_mup_type: MupType) -> None:
        set_parameter_data(self.weight, weight_mup_type)
        if self.bias is not None:
            set_parameter_data(self.bias, "bias")

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1) and set the bias to 0."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """As torch's layer's, with the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"


class Linear(ConstrainedLayer, nn.Linear):
    """A unit-scaled ``nn.Linear``, (..., K) -> (..., N); without bias by default.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``. A bias starts at 0.
        constraint: ties the scales of output and input gradient; see
            `float8.unit_scaling.constraints`.
        weight_mup_type: the weight's role, see `float8.unit_scaling.parameter`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        self._set_roles(weight_mup_type)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return U.linear(input, self.weight, self.bias, self.constraint, self.scale_power)


class LinearReadout(Linear):
    """The last linear layer of a network, which divides its output by K.

    At the start its output has a standard deviation of ``K ** -0.5``, and in training of order 1,
    since its input and weight become correlated (u-muP, arXiv 2407.17465, table 2, "output").

    Args:
        in_features, out_features, bias, device, dtype, weight_mup_type: as of `Linear`.
        constraint: as of `Linear`. The gradients of the last layer may have a scale of their own,
            so there is none by default; with "to_output_scale", tell `optim.SGD`.
    """

    scale_power = (1.0, 0.5, 0.5)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
        weight_mup_type: MupType = "output",
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, constraint, weight_mup_type
        )


class Conv1d(ConstrainedLayer, nn.Conv1d):
    """A unit-scaled ``nn.Conv1d``; without bias by default.

    ``constraint`` and ``weight_mup_type`` are as of `Linear`, all other arguments ``nn.Conv1d``'s.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int | str = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self.constraint = constraint
        self._set_roles(weight_mup_type)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_channels, length) -> (..., out_channels, output length)."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0  # padded elements now count as all others
        return U.conv1d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups,
            constraint=self.constraint, scale_power=self.scale_power,
        )  # fmt: skip


class Embedding(MupModule, nn.Embedding):
    """A unit-scaled ``nn.Embedding``: the gradient of its table has unit scale.

    Its learning rate follows from its width, ``embedding_dim`` (u-muP, arXiv 2407.17465, table 2,
    "input": the one rule that differs from muP's). ``scale_grad_by_freq`` must be False, see
    `functional.embedding`; all other arguments are ``nn.Embedding``'s.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        refuse_frequencies(scale_grad_by_freq, "uu.Embedding")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse, _weight, _freeze, device, dtype,
        )  # fmt: skip
        set_parameter_data(self.weight, "weight")

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape -> (*shape, embedding_dim)."""
        return U.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type,
            self.scale_grad_by_freq, self.sparse,
        )  # fmt: skip


class LayerNorm(MupModule, nn.LayerNorm):
    """A unit-scaled ``nn.LayerNorm``, without weight and bias by default."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape: Any = normalized_shape  # torch takes any sequence, and is annotated with list
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
