"""Layers with weights: `Linear`, `LinearReadout`, `Conv1d`, `Embedding`.

A unit-scaled layer starts with a weight from N(0, 1) and divides its products instead (u-muP, arXiv
2407.17465, table 2). Of a layer with K inputs and N outputs per row and M rows in the batch:

                        output     input gradient   weight gradient
    Linear              K ** -0.5  K ** -0.5        M ** -0.5     constraint "to_output_scale"
    Linear              K ** -0.5  N ** -0.5        M ** -0.5     constraint None
    LinearReadout       K ** -1.0  N ** -0.5        M ** -0.5

The three exponents are `Linear.scale_power`. A constraint ties output and input gradient: for a
chain of layers to have the right gradient the product of a path's factors must be the same in both
directions, save on the network's last edges; there `LinearReadout` needs no constraint.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.norms import refuse_frequencies
from float8.unit_scaling.parameter import MupModule, MupType, set_parameter_data


class Linear(MupModule, nn.Linear):
    """A unit-scaled ``nn.Linear``; without bias by default.

    Args:
        in_features: K.
        out_features: N.
        bias: whether to add a bias, which starts at 0.
        device, dtype: of the parameters.
        constraint: ties the scales of output and input gradient; see
            `float8.unit_scaling.constraints`.
        weight_mup_type: the weight's role, see `float8.unit_scaling.parameter`.

    Shape:
        (..., K) -> (..., N).
    """

    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5)

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
        _set_roles(self, weight_mup_type)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1) and set the bias to 0."""
        _reset(self)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return U.linear(input, self.weight, self.bias, self.constraint, self.scale_power)

    def extra_repr(self) -> str:
        """As ``nn.Linear``'s, with the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"


class LinearReadout(Linear):
    """The last linear layer of a network, which divides its output by K.

    At the start its output has a standard deviation of ``K ** -0.5``, and in training of order 1,
    since its input and weight become correlated (u-muP, arXiv 2407.17465, table 2, "output").

    Args:
        in_features: K.
        out_features: N.
        bias, device, dtype: as for `Linear`.
        constraint: as for `Linear`. Of the last layer gradients may have a scale of their own, so
            by default there is none; with "to_output_scale", tell `optim.SGD`.
        weight_mup_type: as for `Linear`.
    """

    scale_power: tuple[float, float, float] = (1.0, 0.5, 0.5)

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


class Conv1d(MupModule, nn.Conv1d):
    """A unit-scaled ``nn.Conv1d``; without bias by default.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, groups: as for ``nn.Conv1d``.
        padding: a number of elements, "valid" or "same".
        bias: whether to add a bias, which starts at 0.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device, dtype: of the parameters.
        constraint: ties the scales of output and input gradient.
        weight_mup_type: the weight's role.

    Shape:
        (batch, in_channels, length) or (in_channels, length) -> the same with out_channels.
    """

    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5)

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
        _set_roles(self, weight_mup_type)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1) and set the bias to 0."""
        _reset(self)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_channels, length) -> (..., out_channels, output length)."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0  # it is there, and its elements count as any others
        return U.conv1d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups,
            constraint=self.constraint, scale_power=self.scale_power,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """As ``nn.Conv1d``'s, with the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"


class Embedding(MupModule, nn.Embedding):
    """A unit-scaled ``nn.Embedding``: the gradient of its table has unit scale.

    Its learning rate follows from its width, ``embedding_dim`` (u-muP, arXiv 2407.17465, table 2,
    "input": the one rule that differs from muP's).

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, sparse, device, dtype: as
            for ``nn.Embedding``.
        scale_grad_by_freq: must be False, see `functional.embedding`.

    Shape:
        any shape of indices -> (*shape, embedding_dim).

    Raises:
        ValueError: ``scale_grad_by_freq``.
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


def _set_roles(layer: nn.Linear | nn.Conv1d, weight_mup_type: MupType) -> None:
    set_parameter_data(layer.weight, weight_mup_type)
    if layer.bias is not None:
        set_parameter_data(layer.bias, "bias")


def _reset(layer: nn.Linear | nn.Conv1d) -> None:
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
