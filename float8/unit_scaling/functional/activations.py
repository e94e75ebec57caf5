"""Activations of unit scale: gelu, silu, their gated product, softmax, dropout.

Every one is ``a f(m x) / m`` (softmax: ``a f(m x)``), its gradient multiplied by ``b``. For inputs
N(0, 1) and gradients N(0, 1), independent, the ideal ``a`` and ``b`` are one over the scale of
what they multiply: the standard deviation of an output, the root mean square of a softmax, whose
mean is no accident. No closed form, but limits, and u-muP's interpolation between them
(arXiv 2407.17465, appendix B; `float8.unit_scaling.rules.logarithmic_interpolation`):

    function         limit m -> 0       limit m -> inf           weight of the second
    gelu      a      x/2: 2             relu: sqrt(2/(1 - 1/pi))  1/(1 + 1/(4 m**2))
              b      2                  sqrt(2)                   1/(1 + 1/(4 m**2))
    silu      a      x/2: 2             relu: sqrt(2/(1 - 1/pi))  1/(1 + 1/(4 m**2))
              b      2                  sqrt(2)                   1/(1 + 1/m**2)
    silu_glu  a = b  2                  sqrt(2)                   1/(1 + 1/m**2)
    softmax   a      flat: n            one-hot: sqrt(n)          1/(1 + 4/m**2)
              b      n/m                sqrt(n/m)                 1/(1 + 4/m**2)

How well each holds is in its docstring, as measured by integration in float64. Dropout needs no
model: it keeps a part ``q = 1 - p`` of the elements and divides by q, which makes a variance of
1/q; the factors are ``sqrt(q)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.multiplier import checked_mult
from float8.unit_scaling.override import overridable
from float8.unit_scaling.rules import logarithmic_interpolation
from float8.unit_scaling.scale import scale_bwd, scale_elementwise, scale_fwd

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
    """A unit-scaled GELU, ``a gelu(m x) / m`` (u-muP, arXiv 2407.17465, appendix B).

    Args:
        input: any shape.
        mult: m; see `float8.unit_scaling.functional.multiplier`.
        constraint: ties the factors of output and gradient.
        approximate: "none" or "tanh", as of ``F.gelu``.

    Returns:
        As the input. Of standard deviation 1 within 4 % for every mult, the gradient without
        constraint within 3 %.

    Raises:
        ValueError: ``mult`` is not positive, or the constraint is unknown.
    """
    checked_mult(mult, "gelu")
    alpha = 1 / (1 + 0.25 / mult**2)
    scaled = scale_elementwise(
        lambda x: _divided(F.gelu(_multiplied(x, mult), approximate=approximate), mult),
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
    """A unit-scaled SiLU, ``a x sigmoid(m x)`` (u-muP, arXiv 2407.17465, appendix B).

    Args:
        input: any shape.
        mult: m; see `float8.unit_scaling.functional.multiplier`.
        constraint: ties the factors of output and gradient.
        inplace: must be False: the factors need the input and the output both.

    Returns:
        As the input. Of standard deviation 1 within 3 % for every mult, the gradient without
        constraint within 4 %.

    Raises:
        ValueError: ``inplace``, ``mult`` is not positive, or the constraint is unknown.
    """
    refuse_inplace(inplace, "silu")
    checked_mult(mult, "silu")
    scaled = scale_elementwise(
        _silu,
        logarithmic_interpolation(1 / (1 + 0.25 / mult**2), _LINEAR, _RAMP),
        logarithmic_interpolation(1 / (1 + 1 / mult**2), _LINEAR, _STEP),
        constraint,
    )
    return scaled(input, mult)


@overridable
def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """A unit-scaled SwiGLU product, ``a input gate sigmoid(m gate)`` (u-muP, appendix B).

    One factor for the output and both gradients.

    Args:
        input: any shape.
        gate: of the same shape.
        mult: m; see `float8.unit_scaling.functional.multiplier`.

    Returns:
        As the input. Output and gradient of ``input`` have a root mean square of 1 within 1 % for
        every mult, the gradient of ``gate`` within 4 %.

    Raises:
        ValueError: the shapes differ, or ``mult`` is not positive.
    """
    if input.shape != gate.shape:
        raise ValueError(
            f"silu_glu: input has shape {tuple(input.shape)} and gate {tuple(gate.shape)}; their "
            "gradients have unit scale only if these are equal, so expand one first"
        )
    checked_mult(mult, "silu_glu")
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
    """A unit-scaled softmax, ``a softmax(m x)`` (u-muP, arXiv 2407.17465, appendix B).

    The scale is a root mean square: the outputs are positive, of mean 1 in the flat limit.

    Args:
        input: any shape.
        dim: the dimension that sums to a constant, of size n.
        dtype: that the softmax is computed in and returned in; None for the input's.
        constraint: ties the factors of output and gradient.
        mult: m; see `float8.unit_scaling.functional.multiplier`.
        _stacklevel: ignored; ``F.softmax`` has it.

    Returns:
        As the input. For n in [16, 4096] its root mean square, and without constraint that of the
        gradient, is 1 within 5 % for mult of 1/4 and less; it is a rough model elsewhere, within
        30 % for mult in [1/8, 8].

    Raises:
        ValueError: ``dim`` is None, ``mult`` is not positive, or the constraint is unknown.
    """
    if dim is None:
        raise ValueError("softmax: dim is None; name the dimension, for example dim=-1")
    checked_mult(mult, "softmax")
    size, alpha = max(input.shape[dim], 1) if input.dim() else 1, 1 / (1 + 4 / mult**2)
    scaled = scale_elementwise(
        lambda x: F.softmax(_multiplied(x, mult), dim=dim, dtype=dtype),
        logarithmic_interpolation(alpha, size, size**0.5),
        logarithmic_interpolation(alpha, size / mult, (size / mult) ** 0.5),
        constraint,
    )
    return scaled(input)


@overridable
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A unit-scaled dropout: ``sqrt(1 - p) F.dropout(x, p)`` in training, else the identity.

    Args:
        input: any shape.
        p: the probability that an element becomes 0.
        training: whether anything is dropped at all.
        inplace: must be False: the factors need the input and the output both.

    Returns:
        As the input. In training of standard deviation and gradient exactly 1 in expectation
        (unit scaling, arXiv 2303.11257, table A.2).

    Raises:
        ValueError: ``inplace``, or ``p`` is not in [0, 1).
    """
    refuse_inplace(inplace, "dropout")
    if not 0 <= p < 1:
        raise ValueError(
            f"dropout: p is a probability in [0, 1), got {p}; with p = 1 nothing is left to scale"
        )
    if not training or p == 0:
        return input
    return scale_elementwise(F.dropout, (1 - p) ** 0.5, (1 - p) ** 0.5)(input, p)


def _silu(x: Tensor, mult: float) -> Tensor:
    return F.silu(x) if mult == 1 else x * torch.sigmoid(x * mult)


def _multiplied(x: Tensor, mult: float) -> Tensor:
    return x if mult == 1 else x * mult


def _divided(x: Tensor, mult: float) -> Tensor:
    return x if mult == 1 else x / mult


def refuse_inplace(inplace: bool, function: str) -> None:
    """Raises a ValueError that names ``function`` if ``inplace``."""
    if inplace:
        raise ValueError(
            f"{function}: inplace=True cannot be unit-scaled, whose factors differ between the "
            "value and its gradient; pass inplace=False"
        )
