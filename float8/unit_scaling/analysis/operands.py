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
over T tokens divides every gradient by T, which is why the gradients of an ordinary model flush,
and the more the larger its batch; unit scaling (arXiv 2303.11257, section 4) takes such factors
out::

    print(format_operands(operand_table(model, tokens, targets)))
    print(format_operands(operand_table(unit_scale(model), tokens, targets)))

Listed are the contractions of kind "linear" (`transforms.contractions`), and those of kind "matrix"
whose right operand is a parameter or a view of one.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.formats import E4M3, E5M2, Format
from float8.tensor import Float8Tensor
from float8.unit_scaling.transforms.contractions import CONTRACTIONS, Contraction, Function
from float8.unit_scaling.transforms.history import tensors_in
from float8.unit_scaling.transforms.transformed import (
    Mode,
    Transform,
    is_in_functorch,
    transformed,
)

FORMATS = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}


@dataclass(frozen=True)
class Operand:
    """What a cast at a scale of 1 would make of one operand.

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
    """The operands of every linear product of one forward and one backward pass.

    Args:
        model: plain, unit-scaled or transformed. It stays as it is: a copy runs, whose gradients
            are thrown away.
        inputs, kwargs: what the model is called with, under the caller's autocast if there is one.
        backward: is given what the model returns and runs the backward pass; by default
            ``backward()`` of a scalar, the loss, and of another tensor with a gradient of N(0, 1).

    Returns:
        Three rows per product, in the order of the calls; no "grad_output" where no gradient came.

    Raises:
        TypeError: the model is none, or was compiled, or returns no tensor and ``backward`` is not
            given.
        ValueError: no linear product ran, or the model is converted to float8: its layers call no
            function that could be watched. ``convert_from_float8_training`` makes it plain.
    """
    watched = transformed(model, WatchOperands())
    record = _Record({id(p): n for n, p in watched.named_parameters()})
    watched._operands = record  # type: ignore[assignment]
    output = watched(*inputs, **kwargs)
    (backward or _backward)(output)
    if not record.calls:
        raise ValueError(
            f"{type(model).__name__} ran no linear product: neither F.linear nor a matrix product "
            "by a parameter"
        )
    return [row for call in record.calls for row in call]


def median_flushed(rows: Sequence[Operand]) -> dict[str, float]:
    """For each kind of operand, the median over all products of the fraction that is flushed."""
    kinds = [kind for kind in FORMATS if any(row.operand == kind for row in rows)]
    return {
        kind: statistics.median(row.flushed for row in rows if row.operand == kind)
        for kind in kinds
    }


def format_operands(rows: Sequence[Operand]) -> str:
    """The rows as text, and their medians below; tab-separated where tabulate is not installed."""
    headers = ["product", "operand", "format", "std", "flushed", "saturated"]
    lines = [
        [r.product, r.operand, r.format, f"{r.std:.2g}", f"{r.flushed:.1%}", f"{r.saturated:.1%}"]
        for r in rows
    ]
    medians = ", ".join(f"{kind} {share:.1%}" for kind, share in median_flushed(rows).items())
    try:
        from tabulate import tabulate
    except ImportError:
        table = "\n".join("\t".join(line) for line in [headers, *lines])
    else:
        align = ["left"] * 3 + ["right"] * 3
        table = tabulate(lines, headers, disable_numparse=True, colalign=align)
    return f"{table}\n\nflushed to zero, median over products: {medians}"


class WatchOperands(Transform):
    """The transform of `operand_table`: notes the operands of each product, changes nothing.

    It stands where functions are unit-scaled already, and not in float8 yet.
    """

    depth: ClassVar[int] = 2

    def mode(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Mode:
        """The mode that writes to the model's record."""
        record: _Record = model._operands  # type: ignore[assignment]
        return Mode(
            {
                function: functools.partial(_see_call, record, function, contraction)
                for function, contraction in CONTRACTIONS.items()
                if contraction.kind in ("linear", "matrix")
            }
        )


class _Record:
    """The rows of each call, and how often each weight was used."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.uses = names, Counter[str]()
        self.calls: list[list[Operand]] = []

    def is_parameter(self, weight: Tensor) -> bool:
        """Whether a tensor is a parameter of the model, or views one."""
        return self._parameter(weight) in self.names

    def add(self, input: Tensor, weight: Tensor, output: Tensor) -> None:
        """Notes two operands, and the third when the backward pass brings it."""
        name = self.names.get(self._parameter(weight), "").rpartition(".")[0] or "linear"
        self.uses[name] += 1
        name = name if self.uses[name] == 1 else f"{name}#{self.uses[name]}"
        rows = [_row(name, "input", input), _row(name, "weight", weight)]
        self.calls.append(rows)
        if output.requires_grad:
            output.register_hook(lambda g: rows.append(_row(name, "grad_output", g)))

    @staticmethod
    def _parameter(weight: Tensor) -> int:
        """The identity of the parameter that a weight is, or views."""
        return id(weight if weight._base is None else weight._base)


def _see_call(
    record: _Record, function: Function, contraction: Contraction, *args: Any, **kwargs: Any
) -> Any:
    output = function(*args, **kwargs)
    if is_in_functorch():  # tensors have no values there
        return output
    tensors = dict(tensors_in((args, kwargs)))
    left, right = (
        next(tensors[path] for path in argument.paths if path in tensors)
        for argument in contraction.operands
    )
    with torch._C.DisableTorchFunction():  # no transform sees the statistics
        if contraction.kind == "linear" or record.is_parameter(right):
            record.add(left, right, output)
    return output


def _row(product: str, operand: str, x: Tensor) -> Operand:
    fmt = FORMATS[operand]
    flushed, saturated = lost(x, fmt)
    with torch.no_grad():
        values = _plain(x)
        std = float(values.std(correction=0)) if x.numel() else 0.0
    return Operand(product, operand, tuple(x.shape), fmt.name, std, flushed, saturated)


@torch.no_grad()
def lost(x: Tensor, fmt: Format) -> tuple[float, float]:
    """The fractions of a tensor that a cast at a scale of 1 flushes to zero, and saturates.

    Args:
        x: any shape and floating dtype.
        fmt: `E4M3`, `E5M2` or one of their twins.

    Returns:
        The fraction of the nonzero elements that become zero, and the fraction of all elements
        beyond the maximum, both 0 for no elements.
    """
    size = _plain(x).abs()
    nonzero = int((size > 0).sum())
    flushed = int(((size > 0) & (size <= fmt.smallest_subnormal / 2)).sum())
    saturated = int((size > fmt.max).sum())
    return flushed / max(nonzero, 1), saturated / max(size.numel(), 1)


def _plain(x: Any) -> Tensor:
    dense: Tensor = x.dequantize() if isinstance(x, Float8Tensor) else x.detach()
    return dense if dense.dtype == torch.float64 else dense.float()


def _backward(output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returns {type(output).__name__}: say how to run the backward pass, "
            "operand_table(..., backward=lambda output: output[0].backward())"
        )
    if output.numel() == 1:
        output.sum().backward()
        return
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    output.backward(grad)
