"""The table of ops that save less for backward: `OPS`, name -> `CopyOp` or `MaskOp`.

A row says which torch functions call the op and how their arguments are read, which tensors
backward reads, and the gradient. To add an op, add a row to the table and one to
``CASES`` in ``test/activations/gradient_error.py``.

**Readers.** A torch function mode sees the method behind an operator (``a * b`` is ``Tensor.mul``)
and the functions of `torch.nn.functional`, or those that torch.compile calls for them. A reader
returns the op's inputs and options. It returns None for calls that are left to torch: in-place
forms, which write to memory that others may read, and calls that save nothing. Calls with ``out=``
are torch's always.

**Gradients** are torch's own derivatives, at the values of the copy instead of the tensor:
``grad_x = f'(dequantize(cast(x))) * g``. Values that are cheap to recompute (mean and rstd of a
norm, a sigmoid) are not saved. Elementwise ops call the aten kernels of torch's own backward.

Left out on purpose:

- ``scaled_dot_product_attention``: backward recomputes probabilities as ``exp(q k^T - logsumexp)``.
  With rounded q and k they no longer sum to 1: an error of 6 % of a logit of 20 multiplies a
  probability by 3.
- cross entropy and ``log_softmax``: they save log-probabilities y, and backward takes exp(y). An
  error of 6 % of y = -10 is a factor of 1.8. The norm of the gradient hides it (38 dB), since it is
  mostly the target's element. A loss over chunks of tokens saves more memory and loses nothing.
- softmax: backward reads its output, of which a copy has 15 dB where inputs have outliers. In
  attention that is written out the following product saves that output in full anyway.
- ``linear``: convert the layer, which then saves its input in float8.
- divisions and roots: their derivatives are infinite where a small element's copy is 0.
- sums, views, ``cat``, rotations by a table without gradient: they save nothing large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions

from float8.activations.autograd import Arguments, CopyOp, Grads, MaskOp, Needs, Reader, with_mask

aten = torch.ops.aten


def _read_by(reader: Reader, *functions: Callable[..., Any]) -> dict[Callable[..., Any], Reader]:
    return dict.fromkeys(functions, reader)


# --- elementwise ops of one tensor


def _one(input: Tensor, inplace: bool = False) -> Arguments | None:
    return None if inplace else ((input,), {})


def _gelu(input: Tensor, *, approximate: str = "none") -> Arguments:
    return (input,), {"approximate": approximate}


def _pow(input: Tensor, exponent: Any = 2) -> Arguments | None:
    # Below 1 the derivative is infinite at 0, which the copy of a small element may be.
    is_smooth = isinstance(exponent, (int, float)) and exponent > 1
    return ((input,), {"exponent": exponent}) if is_smooth else None


def _elementwise(backward: Callable[..., Tensor]) -> Callable[..., Grads]:
    """The gradient of an op of one input, from ``backward(g, x, **options)`` in one dtype."""

    def gradient(g: Tensor, saved: list[Tensor], needs: Needs, **options: Any) -> Grads:
        dtype = torch.promote_types(g.dtype, saved[0].dtype)
        return (backward(g.to(dtype), saved[0].to(dtype), **options),)

    return gradient


# --- products


def _two(input: Tensor, other: Any) -> Arguments | None:
    are_real = all([isinstance(x, Tensor) and not x.is_complex() for x in (input, other)])
    return ((input, other), {}) if are_real else None


def _saves_factors(needs: Needs) -> tuple[int, ...]:
    """The right factor for the left one's gradient, and the reverse."""
    return (1,) * needs[0] + (0,) * needs[1]


def _mul_gradient(g: Tensor, saved: list[Tensor], needs: Needs) -> Grads:
    """``(g b, g a)``."""
    factors = iter(saved)
    return tuple([g * next(factors) if need else None for need in needs])


# --- norms


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Arguments:
    return (input, weight), {"normalized_shape": tuple(normalized_shape), "eps": eps}


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Arguments:
    return (input, weight, bias), {"normalized_shape": tuple(normalized_shape), "eps": eps}


def _saves_norm(needs: Needs) -> tuple[int, ...]:
    return (0, 1) if needs[0] or needs[1] else ()


def _norm_gradient(
    g: Tensor,
    saved: list[Tensor],
    needs: Needs,
    normalized_shape: tuple[int, ...],
    eps: float | None,
    *,
    centred: bool,
) -> Grads:
    """Gradients of x, weight and bias; saved are x and the weight, if there is one.

    ``y = (x - mean) rstd w + b``, ``rstd = 1 / sqrt(var + eps)`` (arXiv 1607.06450, 3); without the
    mean if not ``centred`` (arXiv 1910.07467, equation 4). Torch's kernels compute mean, rstd and
    the gradients. On a CPU they would round mean and rstd to the inputs' dtype, which is float32
    there. Without eps torch takes float32's epsilon for every dtype, since it normalises in
    float32.
    """
    dtypes = (g.dtype, *[each.dtype for each in saved])
    dtype = functools.reduce(torch.promote_types, (torch.float32,) if g.is_cpu else dtypes)
    g, x, *rest = [each.to(dtype) for each in (g, *saved)]
    weight, shape = rest[0] if rest else None, list(normalized_shape)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if not centred:
        _, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        backward: Any = aten._fused_rms_norm_backward.default
        if g.is_cpu:  # torch has its definition alone there
            backward = get_decompositions([backward])[backward]
        return backward(g, x, shape, rstd, weight, list(needs))
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, None, eps)
    asked = [needs[0], needs[1], False]
    found = aten.native_layer_norm_backward(g, x, shape, mean, rstd, weight, None, asked)
    of_bias = g.reshape(-1, *shape).sum(0, dtype=torch.float32) if needs[2] else None
    return found[0], found[1], of_bias


# --- relu, dropout


def _relu(x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.logical_not(x <= 0)  # torch passes the gradient of a NaN
    return with_mask("relu", torch.relu, x, mask)


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Arguments | None:
    is_dropped = training and train and 0.0 < p < 1.0  # the latter as torch.dropout calls it
    return ((input,), {"p": p}) if is_dropped and not inplace else None


def _dropout_forward(x: Tensor, p: float) -> Tensor:
    """Draws and scales as torch does: one kernel on CUDA, elsewhere a tensor of noise.

    torch.compile draws other numbers for this than for torch's function.
    """
    if x.is_cuda:
        with torch.no_grad():
            out, mask = torch.native_dropout(x, p, True)
        return with_mask("dropout", lambda _: out, x, mask, 1 / (1 - p))
    noise = torch.empty_like(x, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    factor = float(torch.ones((), dtype=x.dtype).div_(1 - p))
    return with_mask("dropout", lambda x: x * noise, x, noise != 0, factor)


_TABLE: tuple[CopyOp | MaskOp, ...] = (
    CopyOp(
        "rms_norm", _read_by(_rms_norm, F.rms_norm, torch.rms_norm),
        lambda x, w, **options: F.rms_norm(x, weight=w, **options),
        functools.partial(_norm_gradient, centred=False), _saves_norm, exact=(1,),
    ),
    CopyOp(
        "layer_norm", _read_by(_layer_norm, F.layer_norm, torch.layer_norm),
        lambda x, w, b, **options: F.layer_norm(x, weight=w, bias=b, **options),
        functools.partial(_norm_gradient, centred=True), _saves_norm, exact=(1, 2),
    ),
    CopyOp(
        "silu", _read_by(_one, F.silu, torch._C._nn.silu),
        F.silu, _elementwise(aten.silu_backward), recompute=True,
    ),
    CopyOp(
        "gelu", _read_by(_gelu, F.gelu), F.gelu, _elementwise(aten.gelu_backward), recompute=True
    ),
    # sigmoid and tanh save the input: of a float8 output y, 1 - y is mostly noise.
    CopyOp(
        "sigmoid", _read_by(_one, torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit),
        torch.sigmoid, _elementwise(lambda g, x: aten.sigmoid_backward(g, x.sigmoid())),
        recompute=True,
    ),
    CopyOp(
        "tanh", _read_by(_one, torch.tanh, Tensor.tanh, F.tanh),
        torch.tanh, _elementwise(lambda g, x: aten.tanh_backward(g, x.tanh())), recompute=True,
    ),
    CopyOp(
        "mul", _read_by(_two, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply,
                        Tensor.__mul__, Tensor.__rmul__),
        torch.mul, _mul_gradient, _saves_factors,
    ),
    CopyOp(
        "pow", _read_by(_pow, torch.pow, Tensor.pow, torch.square, Tensor.square),
        torch.pow, _elementwise(lambda g, x, exponent: g * (exponent * x.pow(exponent - 1))),
    ),
    MaskOp("relu", _read_by(_one, F.relu, torch.relu, Tensor.relu), _relu),
    MaskOp(
        "dropout", _read_by(_dropout, F.dropout, torch.dropout), _dropout_forward,
    ),
)  # fmt: skip
OPS = {op.name: op for op in _TABLE}
