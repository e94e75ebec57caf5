"""Arithmetic of scales: interpolation between two limits, and the depth rule of u-muP.

**Interpolation.** The scale of a nonlinear function has no closed form, but its two limits have:
as the multiplier ``m`` inside the function goes to 0 the function becomes linear (gelu) or flat
(softmax), as it grows the function becomes a ramp or a step. Between them u-muP's models go
smoothly, with constant ratio (arXiv 2407.17465, appendix B):

    s(m) = upper ** alpha * lower ** (1 - alpha)
    alpha = sigmoid(log(c m**2)) = 1 / (1 + 1/(c m**2))

Written with powers rather than with ``exp`` and ``log``: sizes may be symbolic under
``torch.compile``, which keeps a power of a size symbolic. `log` does the same for a logarithm.

**Depth.** A residual layer adds its branch with weight ``tau`` to the skip:
``x' = (tau f(x) + x) / sqrt(1 + tau**2)``. Layers alternate between attention and feed-forward, L
of them after an embedding. With ``r`` the contribution of the average kind of branch relative to
the embedding's and ``rho`` that of attention relative to feed-forward (arXiv 2407.17465,
appendix G), and A and B the attention and feed-forward layers before layer i:

    a_ffn**2 = 2 r**2 / (1 + rho**2)        a_attn**2 = rho**2 a_ffn**2
    tau_i**2 = a_i**2 / (L/2 + A a_attn**2 + B a_ffn**2)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

# (index of the residual branch, number of branches) -> tau
ResidualScalingFn = Callable[[int, int], float]


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """Between ``lower`` (alpha = 0) and ``upper`` (alpha = 1), in steps of constant ratio.

    Args:
        alpha: the weight of the upper limit.
        lower: the limit at alpha = 0, greater than 0.
        upper: the limit at alpha = 1, greater than 0.

    Returns:
        ``lower ** (1 - alpha) * upper ** alpha``: at alpha = 1/2 the geometric mean.
    """
    return lower ** (1 - alpha) * upper**alpha


def log(x: float) -> float:
    """The natural logarithm of a size, which may be symbolic: ``math.log`` would make it a constant
    and recompile for the next one."""
    return math.log2(x) * math.log(2)


def rms(
    x: Tensor, dims: tuple[int, ...] | None = None, keepdim: bool = False, eps: float = 0.0
) -> Tensor:
    """The root of ``mean(x**2) + eps``, computed in float32 or better.

    Args:
        x: any shape.
        dims: the dimensions to average over; None for all.
        keepdim: whether they stay, with size 1.
        eps: added under the root.

    Returns:
        The root mean square, of the dtype of ``x``.
    """
    wide = x if x.dtype.itemsize >= 4 else x.float()
    mean = wide.square().mean(dims, keepdim=keepdim)
    return (mean + eps).sqrt().to(x.dtype)


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualScalingFn:
    """The residual weights ``tau`` of a transformer (u-muP, appendix G; formulas above).

    Every attention layer contributes the same scale to the last residual stream, every feed-forward
    layer too; with both arguments 1 the embedding, all attention layers together and all
    feed-forward layers together contribute equally.

    Args:
        residual_mult: r, the contribution of the branches relative to the embedding.
        residual_attn_ratio: rho, that of attention relative to feed-forward layers.

    Returns:
        ``tau(index, layers)``: the weight of residual branch ``index`` of ``layers``, counted from
        0, attention first; ``layers`` is twice the number of transformer blocks.

    Raises:
        ValueError: an argument is negative.
    """
    for name, value in (
        ("residual_mult", residual_mult),
        ("residual_attn_ratio", residual_attn_ratio),
    ):
        if not value >= 0:
            raise ValueError(f"{name} is a ratio of scales, at least 0, got {value}")
    ffn = residual_mult**2 * 2 / (1 + residual_attn_ratio**2)
    attn = residual_attn_ratio**2 * ffn

    def tau(index: int, layers: int) -> float:
        before = (index + 1) // 2 * attn + index // 2 * ffn
        own = ffn if index % 2 else attn
        return float((own / (layers / 2 + before)) ** 0.5)

    return tau
