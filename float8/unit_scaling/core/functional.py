"""The parts of unit-scaled operations: interpolated factors, the depth rule, `scale_elementwise`.

A unit-scaled operation of your own is a function, two factors and an entry in the registry::

    from float8.unit_scaling.core.functional import scale_elementwise

    def tanh(input, constraint="to_output_scale"):
        return scale_elementwise(torch.tanh, 1.59, 1.47, constraint)(input)

    U.register(torch.tanh, tanh)

``1.59 = 1 / std(tanh(x))`` and ``1.47 = 1 / rms(tanh'(x))`` for x ~ N(0, 1).

**Interpolation.** The scale of a nonlinear function has no closed form, but its limits have: as the
multiplier ``m`` inside the function goes to 0 the function becomes linear (gelu) or flat (softmax),
as m grows it becomes a ramp or a step. u-muP interpolates between the two geometrically
(arXiv 2407.17465, appendix B):

    s(m) = upper ** alpha * lower ** (1 - alpha)
    alpha = sigmoid(log(c m**2)) = 1 / (1 + 1/(c m**2))

It is written with powers, not with ``exp`` and ``log``: sizes may be symbolic under
``torch.compile``, which keeps a power of a size symbolic. `log` does the same for a logarithm.

**Depth.** A residual layer adds its branch with weight ``tau`` to the skip:
``x' = (tau f(x) + x) / sqrt(1 + tau**2)``. Layers alternate between attention and feed-forward, L
of them after an embedding. ``r`` is the contribution of the average kind of branch relative to the
embedding's, ``rho`` that of attention relative to feed-forward (arXiv 2407.17465, appendix G). With
A and B the attention and feed-forward layers before layer i:

    a_ffn**2 = 2 r**2 / (1 + rho**2)        a_attn**2 = rho**2 a_ffn**2
    tau_i**2 = a_i**2 / (L/2 + A a_attn**2 + B a_ffn**2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.scale import scale_bwd, scale_fwd

__all__ = [
    "ResidualScalingFn",
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]

ResidualScalingFn = Callable[[int, int], float]
"""(index of the residual branch, number of branches) -> its weight ``tau``."""


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: Constraint = "to_output_scale",
) -> Callable[..., Tensor]:
    """A function of one tensor, with a factor for its result and one for its gradient.

    Args:
        f: a function of a tensor and of further arguments that get no gradient.
        output_scale: a, one over the scale of ``f(x)`` for x of unit scale.
        grad_input_scale: b, one over that of ``f'(x) g`` for x and g of unit scale.
        constraint: ties the two; see `float8.unit_scaling.constraints`.

    Returns:
        ``scale_fwd(f(scale_bwd(x, b), ...), a)``, as a function of x and the further arguments.
    """
    output, grad_input = apply_constraint(constraint, output_scale, grad_input_scale)

    def scaled(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scale_fwd(f(scale_bwd(input, grad_input), *args, **kwargs), output)

    return scaled


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """``lower ** (1 - alpha) * upper ** alpha``; both limits are greater than 0."""
    return lower ** (1 - alpha) * upper**alpha


def rms(
    x: Tensor, dims: tuple[int, ...] | None = None, keepdim: bool = False, eps: float = 0.0
) -> Tensor:
    """``sqrt(mean(x**2, dims) + eps)``, computed in float32 or better, in the dtype of ``x``."""
    wide = x if x.dtype.itemsize >= 4 else x.float()
    mean = wide.square().mean(dims, keepdim=keepdim)
    return (mean + eps).sqrt().to(x.dtype)


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualScalingFn:
    """The residual weights ``tau`` of a transformer (u-muP, arXiv 2407.17465, appendix G).

    All attention layers contribute the same scale to the last residual stream, and so do all
    feed-forward layers. With both arguments 1 the embedding, the attention layers together and the
    feed-forward layers together contribute equally.

    Args:
        residual_mult: r, the contribution of the branches relative to the embedding.
        residual_attn_ratio: rho, that of attention relative to feed-forward layers.

    Returns:
        ``tau(index, layers)``: the weight of residual branch ``index`` of ``layers``, counted from
        0, attention first; ``layers`` is twice the number of transformer blocks.
    """
    ffn = residual_mult**2 * 2 / (1 + residual_attn_ratio**2)
    attn = residual_attn_ratio**2 * ffn

    def tau(index: int, layers: int) -> float:
        before = (index + 1) // 2 * attn + index // 2 * ffn
        own = ffn if index % 2 else attn
        return float((own / (layers / 2 + before)) ** 0.5)

    return tau


def check_mult(mult: float, caller: str) -> None:
    """Raise ValueError unless ``mult``, which multiplies an input, is positive and finite.

    Nor may it be a bool or a tensor, for example torch's ``inplace`` at its position.
    """
    is_number = not isinstance(mult, bool | Tensor) and 0 < mult < math.inf
    refuse(not is_number, caller, f"mult={mult!r}", "it is a finite number greater than 0")


def refuse(is_given: bool, caller: str, argument: str, instead: str) -> None:
    """Raise a ValueError if an argument is given that has no unit-scaled meaning."""
    if is_given:
        raise ValueError(f"{caller}: {argument} cannot be unit-scaled; {instead}")
