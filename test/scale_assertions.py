"""Claims about scale. A scale is measured, so every claim has a bound, and the bound a reason.

The root mean square of n independent samples estimates their true one with a relative standard
error of ``sqrt((kurtosis - 1) / (4 n))`` (for normal samples 1/sqrt(2n)). A claim holds if the
estimate is within three of them, plus the ``band`` that the function's docstring states, where its
factor is a fitted model. Elements of a product are not independent: ``samples`` says how many
independent numbers they were made from, if fewer than there are elements (`independent`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """N(0, 1), the same values in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def scale_of(x: Tensor, stat: str = "rms") -> float:
    """The root mean square of a tensor, or with ``stat="std"`` its standard deviation; float64."""
    x = x.detach().double()
    centred = x - x.mean() if stat == "std" else x
    return float(centred.square().mean().sqrt())


def sampling_error(x: Tensor, samples: int | None = None) -> float:
    """The relative standard error of `scale_of` (see above)."""
    x = x.detach().double()
    square = x.square()
    kurtosis = float(square.square().mean() / square.mean() ** 2)
    return math.sqrt(max(kurtosis - 1, 1.0) / (4 * min(samples or x.numel(), x.numel())))


def independent(*tensors: Tensor) -> int:
    """The ``samples`` of a product of tensors: its relative error is that of all its factors."""
    return int(1 / sum(1 / x.numel() for x in tensors))


def assert_unit_scaled(
    x: Tensor | None,
    expected: float = 1.0,
    band: float = 0.0,
    stat: str = "rms",
    samples: int | None = None,
    replay: Any = "",
    what: str = "",
) -> None:
    """The scale of ``x`` is ``expected``, within ``band`` (relative) and three sampling errors."""
    if x is None:
        raise AssertionError(f"{what} {replay}: there is no tensor, was backward run?")
    found, error = scale_of(x, stat), 3 * sampling_error(x, samples)
    if not abs(found / expected - 1) <= band + error:  # a NaN is not
        raise AssertionError(
            f"{what} {replay}: {stat} {found:.4f}, claimed {expected:.4f} within {band:.1%} of "
            f"model and {error:.1%} of sampling"
        )


def gradients(
    function: Callable[..., Tensor], *inputs: Tensor, seed: int = 0
) -> tuple[Tensor, ...]:
    """The output of a function and its inputs' gradients, for a gradient of N(0, 1)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    generator = torch.Generator().manual_seed(seed + 1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return (output.detach(), *torch.autograd.grad(output, leaves, grad))


LENGTHS = (5, 8, 40)


def graphs_compiled(
    function: Callable[..., Tensor | list[Tensor]],
    calls: list[tuple[Tensor, ...]],
    backend: str = "aot_eager",
) -> int:
    """How many graphs ``torch.compile(fullgraph=True)`` makes of calls that differ in shape.

    The sizes that differ are dynamic from the first call, unless a graph makes them constants.
    Every call must agree with eager, forward and backward.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for inputs in calls:
        found, expected = _both(compiled, inputs, calls), _both(function, inputs)
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    return int(counter.frame_count)


def _both(
    function: Callable[..., Tensor | list[Tensor]],
    inputs: tuple[Tensor, ...],
    calls: list[tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """The outputs and the inputs' gradients; with ``calls`` the sizes that differ are dynamic."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    for i, leaf in enumerate(leaves):
        for dim in range(leaf.dim()):
            if calls and len({call[i].shape[dim] for call in calls}) > 1:
                torch._dynamo.maybe_mark_dynamic(leaf, dim)
    results = function(*leaves)
    outputs = [results] if isinstance(results, Tensor) else results
    wanted = [x for x in leaves if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    return (*(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, grads))
