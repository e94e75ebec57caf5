"""The error that float8 copies cause in the gradients of each op: SQNR in dB.

``10 log10(sum(exact^2) / sum((gradient - exact)^2))`` of an op's worst gradient. The exact
gradients are float64 without float8; grad_output is random. Inputs are normal, or have outliers:
one element of each 64 is 1000 times larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.activations.scope import saved_activations

ROWS, COLS = 64, 512
_X = (ROWS, COLS)


class Case(NamedTuple):
    """A call of an op, and the shapes of its inputs."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = (_X,)


CASES = {
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (COLS,), w, 1e-5), (_X, (COLS,))),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (COLS,), w, b), (_X, (COLS,), (COLS,))),
    "silu": Case(F.silu),
    "gelu": Case(F.gelu),
    "gelu (tanh)": Case(lambda x: F.gelu(x, approximate="tanh")),
    "sigmoid": Case(torch.sigmoid),
    "tanh": Case(torch.tanh),
    "mul": Case(torch.mul, (_X, _X)),
    "silu(a) * b": Case(lambda a, b: F.silu(a) * b, (_X, _X)),
    "pow": Case(torch.square),
    "pow (x^3)": Case(lambda x: x**3),
    "relu": Case(F.relu),
    "dropout": Case(lambda x: F.dropout(x, 0.25)),
}


def inputs_of(
    case: Case, outliers: bool = False, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Leaves, the same values in each call."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in case.shapes]
    if outliers:
        inputs[0][:, ::64] *= 1000
    return [x.to(dtype).requires_grad_() for x in inputs]


def gradients(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of all inputs; grad_output and dropout masks are the same in each call."""
    torch.manual_seed(0)
    out = case.function(*inputs)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return list(torch.autograd.grad(out, inputs, g))


def sqnr(found: Tensor, exact: Tensor) -> float:
    """The signal to noise ratio in dB; above 120, float32's own rounding, it is inf."""
    noise = (found.double() - exact).square().sum()
    decibel = float(10 * torch.log10(exact.square().sum() / noise))
    return decibel if decibel < 120 else torch.inf


def sqnr_of(name: str) -> list[float]:
    """The SQNR in dB of the op's worst gradient: of normal inputs, and of inputs with outliers."""
    case, worst = CASES[name], []
    for outliers in (False, True):
        exact = gradients(case, inputs_of(case, outliers, torch.float64))
        with saved_activations(min_size=8192):
            found = gradients(case, inputs_of(case, outliers))
        worst.append(min(map(sqnr, found, exact)))
    return worst
