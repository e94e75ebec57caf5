"""Modules without weights: `GELU`, `SiLU`, `Softmax`, `Dropout`, `CrossEntropyLoss`.

Each calls its function in `float8.unit_scaling.functional`, which derives the scales. ``mult``
multiplies the input of the nonlinear function. In a unit-scaled network the size of the weights
cannot say how far from linear a function works, so u-muP makes ``mult`` a hyperparameter (arXiv
2407.17465). ``constraint`` ties the scales of output and input gradient.
"""

from __future__ import annotations

from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.refusals import refuse_inplace, refuse_legacy


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
        refuse_inplace(inplace, "uu.SiLU")
        super().__init__()
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

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        refuse_inplace(inplace, "uu.Dropout")
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return U.dropout(input, self.p, self.training, self.inplace)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """A unit-scaled ``nn.CrossEntropyLoss``: the gradient of the logits has unit scale.

    ``size_average`` and ``reduce`` must be None; torch replaced them by ``reduction``.
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
        refuse_legacy("uu.CrossEntropyLoss", size_average, reduce)
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.mult = mult

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Logits and classes -> the loss."""
        return U.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            mult=self.mult,
        )
