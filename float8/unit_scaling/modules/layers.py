"""The modules of ``torch.nn``, unit-scaled: layers with weights, norms, activations, the loss.

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

In a unit-scaled network the size of the weights cannot say how far from linear an activation works,
so u-muP makes ``mult``, which multiplies its input, a hyperparameter (arXiv 2407.17465).
``constraint`` ties the scales of output and input gradient. `float8.unit_scaling.functional`
derives the scales.

**In float8.** A unit-scaled layer divides each of its three products by the factor by which the
product multiplies scales. A float8 GEMM multiplies its result by the scales of its operands anyway,
and with recipe ``unit`` these are 1. The layer's factors take their place, so unit scaling costs no
kernel::

    output      = float8(x) @ float8(w).T  * (1 * 1 * factor_output)
    grad_input  = float8(g) @ float8(w)    * (1 * 1 * factor_grad_input)
    grad_weight = float8(g).T @ float8(x)  * (1 * 1 * factor_grad_weight)

With a dynamic or delayed recipe the factors multiply the measured scales, so that recipes can be
compared on one model. `convert_to_float8_training` makes such layers of `Linear` and
`LinearReadout`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from float8.linear.autograd import Call
from float8.linear.layer import Float8Linear
from float8.linear.module import ModuleRule, register_module_rule
from float8.linear.refusals import reason_against_layer
from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.products import linear_factors
from float8.unit_scaling.parameter import MupModule, MupType, set_parameter_data


def with_defaults(constructor: Any, **defaults: Any) -> Any:
    """A constructor with other default values."""
    values = [
        defaults.get(name, parameter.default)
        for name, parameter in inspect.signature(constructor).parameters.items()
        if parameter.default is not parameter.empty
    ]
    parts = constructor.__code__, constructor.__globals__, "__init__"
    return types.FunctionType(*parts, tuple(values), constructor.__closure__)


class ConstrainedLayer(MupModule):
    """Abstract: a layer with a weight, a bias or None, and a constraint."""

    mup_types = {"weight": "weight", "bias": "bias"}  # noqa: RUF012
    constraint: Constraint
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5)
    weight: Any  # a parameter
    bias: Any  # a parameter or None

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1) and set the bias to 0."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """What torch's layer shows, and the constraint."""
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
        set_parameter_data(self.weight, weight_mup_type)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return U.linear(input, self.weight, self.bias, self.constraint, self.scale_power)


class LinearReadout(Linear):
    """The last linear layer of a network, which divides its output by K.

    At the start its output has a standard deviation of ``K ** -0.5``, and in training of order 1,
    since its input and weight become correlated (u-muP, arXiv 2407.17465, table 2, "output").

    Its arguments are those of `Linear`. The gradients of the last layer may have a scale of their
    own, so it has no ``constraint`` by default; with "to_output_scale", tell `optim.SGD`.
    """

    scale_power = (1.0, 0.5, 0.5)
    __init__ = with_defaults(Linear.__init__, constraint=None, weight_mup_type="output")


class Float8UnitLinear(Float8Linear, Linear):
    """A `float8.unit_scaling.Linear` whose three products run in float8.

    Parameters, their u-muP data, ``constraint`` and ``scale_power`` are those of the plain layer.
    """

    plain_type = Linear

    def __getstate__(self) -> dict[str, Any]:
        return Linear.__getstate__(self) | super().__getstate__()  # parameters' roles first

    def begin_call(self, input: Tensor, weight: Tensor) -> Call:
        """As that of `Float8Linear`, with the factors of the layer's constraint."""
        call = super().begin_call(input, weight)
        call.factors = linear_factors(input, weight, self.constraint, self.scale_power)
        return call

    def _plain_forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self._plain_weight(), self.bias, self.constraint, self.scale_power)


class Float8UnitLinearReadout(Float8UnitLinear, LinearReadout):
    """A `float8.unit_scaling.LinearReadout` whose three products run in float8."""

    plain_type = LinearReadout


for _float8 in (Float8UnitLinear, Float8UnitLinearReadout):
    register_module_rule(
        _float8.plain_type,
        ModuleRule(
            refuses=lambda module, config: reason_against_layer(module.weight, config),  # type: ignore[arg-type]
            convert=_float8.from_float,  # type: ignore[arg-type]
            unit_scaled=True,
        ),
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
        set_parameter_data(self.weight, weight_mup_type)

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

    mup_types = {"weight": "weight"}  # noqa: RUF012

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape -> (*shape, embedding_dim)."""
        return U.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type,
            self.scale_grad_by_freq, self.sparse,
        )  # fmt: skip


class LayerNorm(MupModule, nn.LayerNorm):
    """A unit-scaled ``nn.LayerNorm``, without weight and bias by default."""

    mup_types = {"weight": "norm", "bias": "bias"}  # noqa: RUF012
    __init__ = with_defaults(nn.LayerNorm.__init__, elementwise_affine=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same."""
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(MupModule, nn.RMSNorm):
    """A unit-scaled ``nn.RMSNorm`` (arXiv 1910.07467), without weight by default.

    ``y = x / sqrt(mean(x**2) + eps) * weight``.
    """

    mup_types = {"weight": "norm"}  # noqa: RUF012
    __init__ = with_defaults(nn.RMSNorm.__init__, eps=1e-5, elementwise_affine=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same."""
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class GELU(nn.GELU):
    """A unit-scaled ``nn.GELU``: ``gelu(mult x) / mult``, scaled to unit variance."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: Constraint = "to_output_scale",
        approximate: str = "none",
    ) -> None:
        super().__init__(approximate)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return U.gelu(input, self.mult, self.constraint, self.approximate)


class SiLU(nn.SiLU):
    """A unit-scaled ``nn.SiLU``: ``x sigmoid(mult x)``, scaled to unit variance.

    ``inplace`` must be False, see `functional.silu`.
    """

    def __init__(
        self,
        mult: float = 1.0,
        constraint: Constraint = "to_output_scale",
        inplace: bool = False,
    ) -> None:
        super().__init__(inplace)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return U.silu(input, self.mult, self.constraint, self.inplace)


class Softmax(nn.Softmax):
    """A unit-scaled ``nn.Softmax``: its n results add up to about n instead of 1."""

    def __init__(
        self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale"
    ) -> None:
        super().__init__(dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return U.softmax(input, dim=self.dim, mult=self.mult, constraint=self.constraint)


class Dropout(nn.Dropout):
    """A unit-scaled ``nn.Dropout``: keeps the variance instead of the mean; the identity in eval.

    ``p`` is less than 1 and ``inplace`` False, see `functional.dropout`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return U.dropout(input, self.p, self.training, self.inplace)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """A unit-scaled ``nn.CrossEntropyLoss``: the gradient of the logits has unit scale.

    All arguments except ``mult`` are ``nn.CrossEntropyLoss``'s.
    """

    def __init__(
        self,
        mult: float = 1.0,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.mult = mult

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Logits and classes -> the loss."""
        options = (None, self.ignore_index, None, self.reduction, self.label_smoothing, self.mult)
        return U.cross_entropy(input, target, self.weight, *options)
