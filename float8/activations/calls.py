"""How calls of torch functions are read: which spellings an op has, and what its arguments mean.

A torch function mode sees the method behind an operator (``a * b`` is ``Tensor.mul``), and what
`torch.nn.functional` names or, under torch.compile, what it calls. A reader takes a spelling's
arguments and returns the op's inputs and options, or None for a call that is left to torch:
in-place and ``out=`` forms, which write where others may look, and calls that save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Read = tuple[tuple[Tensor | None, ...], dict[str, Any]]
Reader = Callable[..., Read | None]
Readers = dict[Callable[..., Any], Reader]  # by spelling


def _one(input: Tensor, inplace: bool = False, out: Tensor | None = None) -> Read | None:
    return None if inplace or out is not None else ((input,), {})


def _gelu(input: Tensor, *, approximate: str = "none") -> Read:
    return (input,), {"approximate": approximate}


def _two(input: Tensor, other: Any, *, out: Tensor | None = None) -> Read | None:
    if out is not None or not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return None
    return None if input.is_complex() or other.is_complex() else ((input, other), {})


def _pow(input: Tensor, exponent: Any, *, out: Tensor | None = None) -> Read | None:
    # Below 1 the derivative is infinite at 0, which a small element may be in a copy.
    if out is not None or not isinstance(exponent, (int, float)) or not exponent > 1:
        return None
    return ((input,), {"exponent": exponent})


def _square(input: Tensor, *, out: Tensor | None = None) -> Read | None:
    return _pow(input, 2, out=out)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Read:
    return (input, weight), {"normalized_shape": tuple(normalized_shape), "eps": eps}


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Read:
    return (input, weight, bias), {"normalized_shape": tuple(normalized_shape), "eps": eps}


def _f_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Read | None:
    return None if dim is None else ((input,), {"dim": dim, "dtype": dtype})


def _softmax(
    input: Tensor, dim: Any, dtype: Any = None, *, out: Tensor | None = None
) -> Read | None:
    return None if out is not None else ((input,), {"dim": dim, "dtype": dtype})


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Read:
    return (input, weight, bias), {}


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Read | None:
    # Inductor draws the same numbers again in backward and saves nothing.
    if inplace or not training or not 0.0 < p < 1.0 or torch.compiler.is_compiling():
        return None
    return (input,), {"p": p}


def _aten_dropout(input: Tensor, p: float, train: bool) -> Read | None:
    return _dropout(input, p, train)


def _spelt(reader: Reader, *spellings: Callable[..., Any]) -> Readers:
    return dict.fromkeys(spellings, reader)


MUL = _spelt(
    _two, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__
)
POW = _spelt(_pow, torch.pow, Tensor.pow, Tensor.__pow__) | _spelt(
    _square, torch.square, Tensor.square
)
RMS_NORM = _spelt(_rms_norm, F.rms_norm, torch.rms_norm)
LAYER_NORM = _spelt(_layer_norm, F.layer_norm, torch.layer_norm)
SILU = _spelt(_one, F.silu, torch._C._nn.silu)
SIGMOID = _spelt(_one, torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit)
TANH = _spelt(_one, torch.tanh, Tensor.tanh, F.tanh)
GELU = _spelt(_gelu, F.gelu)
RELU = _spelt(_one, F.relu, torch.relu, Tensor.relu)
DROPOUT = _spelt(_dropout, F.dropout) | _spelt(_aten_dropout, torch.dropout)
LINEAR = _spelt(_linear, F.linear)
SOFTMAX = _spelt(_f_softmax, F.softmax) | _spelt(
    _softmax, torch.softmax, Tensor.softmax, torch.special.softmax
)
