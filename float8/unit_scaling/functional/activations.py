"""Activations of unit scale: gelu, silu, their gated product, softmax, dropout.

Each is ``a f(m x) / m`` (softmax: ``a f(m x)``), and its gradient is multiplied by ``b``; m is
``mult``. For independent inputs and gradients N(0, 1) the ideal ``a`` and ``b`` are one over the
scale of what they multiply: the standard deviation of an output, the root mean square of a softmax,
whose mean is part of its value. There is no closed form, but there are limits, between which u-muP
interpolates (arXiv 2407.17465, appendix B; `core.functional.logarithmic_interpolation`):

    function         limit m -> 0       limit m -> inf           weight of the second
    gelu      a      x/2: 2             relu: sqrt(2/(1 - 1/pi))  1/(1 + 1/(4 m**2))
              b      2                  sqrt(2)                   1/(1 + 1/(4 m**2))
    silu      a      x/2: 2             relu: sqrt(2/(1 - 1/pi))  1/(1 + 1/(4 m**2))
              b      2                  sqrt(2)                   1/(1 + 1/m**2)
    silu_glu  a = b  2                  sqrt(2)                   1/(1 + 1/m**2)
    softmax   a      flat: n            one-hot: sqrt(n)          1/(1 + 4/m**2)
              b      n/m                sqrt(n/m)                 1/(1 + 4/m**2)

The docstrings say how well each model holds, as measured by integration in float64. Dropout needs
no model: it keeps a part ``q = 1 - p`` of the elements and divides by q, which makes a variance of
1/q; both factors are ``sqrt(q)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.core.functional import (
    check_mult,
    logarithmic_interpolation,
    refuse,
    scale_elementwise,
)
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd

_LINEAR = 2.0  # 1 / std(x / 2)
_RAMP = (2 / (1 - 1 / math.pi)) ** 0.5  # 1 / std(relu(x))
_STEP = 2**0.5  # 1 / rms(step(x)), the gradient of a ramp


@overridable
def gelu(
    input: Tensor,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
    approximate: str = "none",
) -> Tensor:
    """A unit-scaled GELU, ``a gelu(m x) / m``.

    For every mult its standard deviation is 1 within 4 %, and without constraint the scale of its
    gradient within 3 %.
    """
    check_mult(mult, "gelu")
    alpha = 1 / (1 + 0.25 / mult**2)

    def gelu_of_product(x: Tensor) -> Tensor:
        y = F.gelu(x if mult == 1 else x * mult, approximate=approximate)
        return y if mult == 1 else y / mult

    scaled = scale_elementwise(
        gelu_of_product,
        logarithmic_interpolation(alpha, _LINEAR, _RAMP),
        logarithmic_interpolation(alpha, _LINEAR, _STEP),
        constraint,
    )
    return scaled(input)


@overridable
def silu(
    input: Tensor,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
    inplace: bool = False,
) -> Tensor:
    """A unit-scaled SiLU, ``a x sigmoid(m x)``; ``inplace`` must be False.

    For every mult its standard deviation is 1 within 3 %, and without constraint the scale of its
    gradient within 4 %.
    """
    refuse(inplace, "silu", "inplace=True", "pass inplace=False")
    check_mult(mult, "silu")
    scaled = scale_elementwise(
        _silu,
        logarithmic_interpolation(1 / (1 + 0.25 / mult**2), _LINEAR, _RAMP),
        logarithmic_interpolation(1 / (1 + 1 / mult**2), _LINEAR, _STEP),
        constraint,
    )
    return scaled(input, mult)


@overridable
def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """A unit-scaled SwiGLU product, ``a input gate sigmoid(m gate)``, of two equal shapes.

    One factor serves the output and both gradients. Output and gradient of ``input`` have a root
    mean square of 1 within 1 % for every mult, the gradient of ``gate`` within 4 %.
    """
    refuse(input.shape != gate.shape, "silu_glu", "a gate of another shape", "expand it first")
    check_mult(mult, "silu_glu")
    scale = logarithmic_interpolation(1 / (1 + 1 / mult**2), _LINEAR, _STEP)
    input, gate = scale_bwd(input, scale), scale_bwd(gate, scale)
    return scale_fwd(input * _silu(gate, mult), scale)


@overridable
def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: Constraint = "to_output_scale",
    mult: float = 1.0,
    *,
    _stacklevel: int = 3,
) -> Tensor:
    """A unit-scaled softmax, ``a softmax(m x)``, along ``dim``, which must be given.

    Its scale is a root mean square: outputs are positive, of mean 1 in the flat limit. For n in
    [16, 4096] it is 1 within 5 % for mult up to 1/4, as is the gradient's without constraint. For
    mult in [1/8, 8] the model is rough: within 30 %.
    """
    check_mult(mult, "softmax")
    size = max(input.shape[dim], 1) if input.dim() else 1  # type: ignore[index]
    alpha = 1 / (1 + 4 / mult**2)
    scaled = scale_elementwise(
        lambda x: F.softmax(x if mult == 1 else x * mult, dim=dim, dtype=dtype),
        logarithmic_interpolation(alpha, size, size**0.5),
        logarithmic_interpolation(alpha, size / mult, (size / mult) ** 0.5),
        constraint,
    )
    return scaled(input)


@overridable
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A unit-scaled dropout: ``sqrt(1 - p) F.dropout(x, p)`` in training, else the identity.

    In training the standard deviation and the gradient are exactly 1 in expectation (unit scaling,
    arXiv 2303.11257, table A.2). p is in [0, 1) and ``inplace`` False.
    """
    refuse(inplace, "dropout", "inplace=True", "pass inplace=False")
    if not training or p == 0:
        return input
    return scale_elementwise(F.dropout, (1 - p) ** 0.5, (1 - p) ** 0.5)(input, p)


def _silu(x: Tensor, mult: float) -> Tensor:
    return F.silu(x) if mult == 1 else x * torch.sigmoid(x * mult)
