"""Gradients of each op from what was kept of its inputs (or of its output), in plain PyTorch.

Every function here is the derivative that torch itself computes, at the decoded copy instead of at
the tensor: ``grad_x = f'(decode(encode(x))) * g``. What is cheap to compute again from the copy (a
norm's mean and rstd, a sigmoid) is not kept. Elementwise ones call the aten kernels that torch's
own backward calls.

A function takes the gradient, the kept tensors, which inputs need a gradient, and the op's options,
and returns one gradient (or None) per input, in any dtype and, where the op broadcasts, in the
shape of the output; `keeping` converts and sums.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from float8.linear.autograd import as_matrix, autocasts

aten = torch.ops.aten
Grads = tuple[Tensor | None, ...]
Needs = tuple[bool, ...]


def _alike(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(g.dtype, x.dtype)
    return g.to(dtype), x.to(dtype)


def silu(g: Tensor, kept: list[Tensor], needs: Needs) -> Grads:
    """``sigmoid(x) (1 + x (1 - sigmoid(x))) g``."""
    return (aten.silu_backward(*_alike(g, kept[0])),)


def gelu(g: Tensor, kept: list[Tensor], needs: Needs, approximate: str = "none") -> Grads:
    """``(Phi(x) + x phi(x)) g``, or its tanh approximation's derivative."""
    return (aten.gelu_backward(*_alike(g, kept[0]), approximate=approximate),)


def sigmoid(g: Tensor, kept: list[Tensor], needs: Needs) -> Grads:
    """``y (1 - y) g`` with y from the kept input: of a float8 y, 1 - y is mostly noise."""
    g, x = _alike(g, kept[0])
    return (aten.sigmoid_backward(g, x.sigmoid()),)


def tanh(g: Tensor, kept: list[Tensor], needs: Needs) -> Grads:
    """``(1 - y^2) g`` with y from the kept input."""
    g, x = _alike(g, kept[0])
    return (aten.tanh_backward(g, x.tanh()),)


def mul(g: Tensor, kept: list[Tensor], needs: Needs) -> Grads:
    """``(g b, g a)``; kept are those that are needed, b first."""
    left = iter(kept)
    return tuple(g * next(left) if need else None for need in needs)


def pow(g: Tensor, kept: list[Tensor], needs: Needs, exponent: float) -> Grads:
    """``n x^(n - 1) g``."""
    g, x = _alike(g, kept[0])
    return (g * (exponent * x.pow(exponent - 1)),)


def softmax(g: Tensor, kept: list[Tensor], needs: Needs, dim: int, dtype: Any = None) -> Grads:
    """``y (g - sum(g y))``, y being the kept output."""
    g32, y32 = g.to(torch.float32), kept[0].to(torch.float32)
    return (aten._softmax_backward_data(g32, y32, dim, torch.float32),)


def linear(g: Tensor, kept: list[Tensor], needs: Needs) -> Grads:
    """``(g w, g^T x, sum(g))``; kept: w and x, those that are needed."""
    left, g_MN = iter(kept), as_matrix(g)
    device = g.device.type
    with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
        grad_x = g @ next(left).to(g.dtype) if needs[0] else None
        grad_w = g_MN.t() @ as_matrix(next(left).to(g.dtype)) if needs[1] else None
    return grad_x, grad_w, g_MN.sum(0) if needs[2] else None


def rms_norm(
    g: Tensor,
    kept: list[Tensor],
    needs: Needs,
    normalized_shape: tuple[int, ...],
    eps: float | None,
) -> Grads:
    """``y = x rstd w``, ``rstd = 1 / sqrt(mean(x^2) + eps)`` (arXiv 1910.07467, equation 4).

    Without an eps it is torch's: that of float32, in which a narrower x is normalised too.
    """
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    x_MK = _rows(kept[0], normalized_shape)
    rstd = torch.rsqrt(x_MK.square().mean(1, keepdim=True) + eps)
    grad_x, grad_w, _ = _norm(g, x_MK * rstd, rstd, kept, (*needs, False), normalized_shape)
    return grad_x, grad_w


def layer_norm(
    g: Tensor, kept: list[Tensor], needs: Needs, normalized_shape: tuple[int, ...], eps: float
) -> Grads:
    """``y = (x - mean) rstd w + b``, ``rstd = 1 / sqrt(var + eps)`` (arXiv 1607.06450, 3)."""
    x_MK = _rows(kept[0], normalized_shape)
    centred = x_MK - x_MK.mean(1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(1, keepdim=True) + eps)
    grad_x, grad_w, grad_b = _norm(g, centred * rstd, rstd, kept, needs, normalized_shape)
    if grad_x is not None:
        grad_x = (rows := _rows(grad_x, normalized_shape)) - rows.mean(1, keepdim=True)
        grad_x = grad_x.reshape(g.shape)
    return grad_x, grad_w, grad_b


def _rows(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """(M, K) in float32, K being what is normalised over."""
    return x.to(torch.float32).reshape(-1, math.prod(normalized_shape))


def _norm(
    g: Tensor,
    normed_MK: Tensor,
    rstd: Tensor,
    kept: list[Tensor],
    needs: Needs,
    normalized_shape: tuple[int, ...],
) -> Grads:
    """Gradients of x (but for the mean), weight and bias; kept: x and the weight, if any."""
    g_MK = _rows(g, normalized_shape)
    grad_x = grad_w = grad_b = None
    if needs[1]:
        grad_w = (g_MK * normed_MK).sum(0).reshape(normalized_shape)
    if needs[2]:
        grad_b = g_MK.sum(0).reshape(normalized_shape)
    if needs[0]:
        gw = g_MK * kept[1].to(torch.float32).flatten() if len(kept) > 1 else g_MK
        along = (gw * normed_MK).mean(1, keepdim=True)
        grad_x = (rstd * (gw - normed_MK * along)).reshape(g.shape)
    return grad_x, grad_w, grad_b
