"""`operand_table`: what a cast to float8 with scale 1 would lose of every operand of a model.

A linear layer is three GEMMs of three tensors (`float8.linear.autograd`)::

    y_MN  = x_MK @ w_NK.T        input, weight
    gx_MK = g_MN @ w_NK          grad_output, weight
    gw_NK = g_MN.T @ x_MK        grad_output, input

Input and weight are cast to E4M3, grad_output to E5M2. At a scale of 1 such a cast keeps what lies
in the format's range, and of the rest (arXiv 2209.05433, table 1; nearest, ties to even)::

    flushed     0 < |x| <= m / 2    becomes zero; m is the smallest subnormal: 2**-9, 2**-16
    saturated   |x| > max           becomes the maximum: 448, 57344

`operand_table` runs a model forward and backward once, without training it, and counts both. A mean
over T tokens divides every gradient by T, so the gradients of an ordinary model flush, and the more
the larger its batch. Unit scaling (arXiv 2303.11257, section 4) removes such factors::

    print(format_operands(operand_table(model, tokens, targets)))
    print(format_operands(operand_table(unit_scale(model), tokens, targets)))

Listed are the contractions of kind "linear" (`transforms.contractions`), and those of kind "matrix"
whose right operand is a parameter or a view of one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.formats import E4M3, E5M2
from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.contractions import CONTRACTIONS, tensors_in
from float8.unit_scaling.transforms.track_scales import as_wide
from float8.unit_scaling.transforms.transformed import (
    OnProducts,
    is_in_functorch,
    parameter_of,
    transformed,
)

TRAINING_FORMATS = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}


@dataclass(frozen=True)
class Operand:
    """The losses of one operand in a cast with scale 1.

    Args:
        product: the name of the module that has the weight; ``#2`` where it is used again.
        operand: "input", "weight" or "grad_output".
        shape: of the tensor.
        format: "e4m3" or "e5m2".
        std: the standard deviation of its elements.
        flushed: the fraction of its nonzero elements that become zero.
        saturated: the fraction of its elements beyond the format's maximum.
    """

    product: str
    operand: str
    shape: tuple[int, ...]
    format: str
    std: float
    flushed: float
    saturated: float


def operand_table(
    model: nn.Module, *inputs: Any, backward: Callable[[Any], None] | None = None, **kwargs: Any
) -> list[Operand]:
    """The operands of every linear layer of one forward and one backward pass.

    Args:
        model: plain, unit-scaled or transformed. It stays as it is: a copy runs, whose gradients
            are thrown away.
        inputs, kwargs: what the model is called with, under the caller's autocast if there is one.
        backward: is given what the model returns and runs the backward pass; by default
            ``backward()`` of a scalar, the loss, and of another tensor with a gradient of N(0, 1).
            Give one for a model that returns something else.

    Returns:
        Three operands per linear layer, in the order of the calls; no "grad_output" where no
        gradient came.

    Raises:
        TypeError: the model is not a module.
        ValueError: the model is compiled or converted: its layers call no function that could be
            watched. ``convert_from_float8_training`` makes it plain.
    """
    watch = WatchOperands()
    output = transformed(model, watch)(*inputs, **kwargs)
    (backward or _backward)(output)
    return [operand for call in watch.calls for operand in call]


def format_operands(operands: Sequence[Operand]) -> str:
    """The operands as a table of text, and below it the medians over all layers.

    Args:
        operands: as `operand_table` returns them.
    """
    lines = [("product", "operand", "format", "std", "flushed", "saturated")]
    for x in operands:
        numbers = f"{x.std:.2g}", f"{x.flushed:.1%}", f"{x.saturated:.1%}"
        lines.append((x.product, x.operand, x.format, *numbers))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<<<>>>"
    cells = [[f"{c:{s}{w}}" for c, s, w in zip(x, sides, widths, strict=True)] for x in lines]
    table = "\n".join(map("  ".join, cells))
    shares = {kind: [x.flushed for x in operands if x.operand == kind] for kind in TRAINING_FORMATS}
    medians = ", ".join(f"{k} {statistics.median(v):.1%}" for k, v in shares.items() if v)
    return f"{table}\n\nflushed to zero, median over products: {medians}"


class WatchOperands(OnProducts):
    """The transform of `operand_table`: records the operands of each call, changes nothing.

    Its depth puts it below unit scaling and above float8. ``uses`` says how often each weight was
    used.
    """

    depth: ClassVar[int] = 2
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "scaled linear", "matrix"})

    def __init__(self) -> None:
        self.calls: list[list[Operand]] = []
        self.uses = Counter[str]()

    def product(self, state: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Calls a function and records its operands, if the right one is a weight."""
        output = function(*args, **kwargs)
        tensors = dict(tensors_in((args, kwargs)))
        left, right = (
            next(tensors[path] for path in argument if path in tensors)
            for argument in CONTRACTIONS[function].operands
        )
        parameter = parameter_of(state, right)
        if is_in_functorch() or (parameter is None and CONTRACTIONS[function].kind == "matrix"):
            return output  # tensors have no values there
        name = (parameter or "").rpartition(".")[0] or "linear"
        self.uses[name] += 1
        name = name if self.uses[name] == 1 else f"{name}#{self.uses[name]}"
        with torch._C.DisableTorchFunction():  # no transform sees the statistics
            found = [_operand(name, "input", left), _operand(name, "weight", right)]
            if output.requires_grad:
                output.register_hook(lambda g: found.append(_operand(name, "grad_output", g)))
        self.calls.append(found)
        return output


@torch.no_grad()
def _operand(product: str, operand: str, x: Tensor) -> Operand:
    fmt = TRAINING_FORMATS[operand]
    wide = as_wide(x)
    std, size = float(wide.std(correction=0)) if x.numel() else 0.0, wide.abs()
    nonzero = int((size > 0).sum())
    flushed = int(((size > 0) & (size <= fmt.smallest_subnormal / 2)).sum()) / max(nonzero, 1)
    saturated = int((size > fmt.max).sum()) / max(size.numel(), 1)
    return Operand(product, operand, tuple(x.shape), fmt.name, std, flushed, saturated)


def _backward(output: Any) -> None:
    if output.numel() == 1:
        output.sum().backward()
        return
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    output.backward(grad)
