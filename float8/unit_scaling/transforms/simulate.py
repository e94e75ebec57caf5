"""What a model does when its products are in a narrow format, computed in wide numbers.

Let q_f and q_b round to the formats of the forward and of the backward pass. A product is simulated
as a GEMM on hardware that multiplies those formats and accumulates in wide numbers (arXiv
2209.05433, section 3)::

    y  = q_f(x) @ q_f(w).T + b
    gx = q_b(g) @ q_f(w)
    gw = q_b(g).T @ q_f(x)
    gb = g.sum(0)                  neither bias nor its gradient is an operand of a product

All products are: linear layers, ``@``, ``mm``, ``bmm``, ``addmm``, ``addbmm``, ``baddbmm``,
``einsum``, convolutions, and attention: q_f on query, key and value, q_b on the gradient of its
output. The probabilities inside attention are not rounded: they are operands of a product too, but
a fused kernel never writes them down, and float8 attention kernels scale them per tile, which no
format says. Attention that a model spells out, softmax and ``@``, is rounded at both products.
Contractions inside an ``einsum`` of three operands and inside a fused recurrent layer are not
visible and stay wide.

There is no scale in this simulation: values out of a format's range saturate or vanish. That is the
point of it. A unit-scaled model loses little (arXiv 2303.11257, section 5.2), others may lose all.

Under autocast, operands are rounded to autocast's dtype first, as they would be on their way to the
product. What is not a plain tensor of float32, bfloat16, float16 or float64, a `Float8Tensor`, say,
is left alone. Functions of ``U`` are looked into, so that their products are simulated between
their scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.linear.autograd import autocasts
from float8.tensor import Float8Tensor
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.transforms.transformed import Mode, Transform, transformed

M = TypeVar("M", bound=nn.Module)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Product(NamedTuple):
    """Which arguments of a function it multiplies, each by its names, and which it adds."""

    operands: tuple[tuple[str, ...], ...]
    addend: str = ""
    trailing: int = 0  # how many dimensions of the output come after the addend's

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the leading arguments, in order; an addend is first, or after the others."""
        if self.addend == "input":
            return (("input", "self"), *self.operands)
        return (*self.operands, (self.addend,)) if self.addend else self.operands


_LEFT, _WEIGHT = ("input", "self"), ("weight",)
_ATTENTION = Product((("query",), ("key",), ("value",)))
_PLAIN_PRODUCT = Product((_LEFT, ("mat2", "other")))
_ADDMM = Product((("mat1",), ("mat2",)), addend="input")
_ADDBMM = Product((("batch1",), ("batch2",)), addend="input")

PRODUCTS: dict[Callable[..., Any], Product] = {
    F.linear: Product((_LEFT, _WEIGHT), "bias"),
    F.scaled_dot_product_attention: _ATTENTION,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _PLAIN_PRODUCT),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm), _PLAIN_PRODUCT),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _ADDMM),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addbmm), _ADDBMM),
    **dict.fromkeys((F.conv1d, F.conv_transpose1d), Product((_LEFT, _WEIGHT), "bias", 1)),
    **dict.fromkeys((F.conv2d, F.conv_transpose2d), Product((_LEFT, _WEIGHT), "bias", 2)),
    **dict.fromkeys((F.conv3d, F.conv_transpose3d), Product((_LEFT, _WEIGHT), "bias", 3)),
}


def simulate_format(module: M, fwd_format: FPFormat, bwd_format: FPFormat) -> M:
    """A copy of a model whose products are in the formats, simulated; the model stays as it is.

    Args:
        module: any module.
        fwd_format: of the operands of each product: activations and weights.
        bwd_format: of the gradient that comes to each product.

    Returns:
        the copy, of the same class in every respect but this. It composes with the other
        transforms in any order, with ``torch.compile``, deepcopy and pickle.

    Raises:
        TypeError: ``module`` is not a module, or was compiled; transform first.
        ValueError: it simulates a format already.
    """
    return transformed(module, SimulateFormat(fwd_format, bwd_format))


def simulate_fp8(module: M, rounding: str = "nearest") -> M:
    """`simulate_format` with E4M3 forward and E5M2 backward (arXiv 2209.05433, section 3).

    Args:
        module: any module.
        rounding: "nearest", as GPUs cast, or "stochastic".
    """
    return simulate_format(module, FPFormat(4, 3, rounding), FPFormat(5, 2, rounding))


@dataclass(frozen=True)
class SimulateFormat(Transform):
    """The transform of `simulate_format`."""

    depth: ClassVar[int] = 2
    fwd_format: FPFormat
    bwd_format: FPFormat

    def mode(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Mode:
        """Multiplies what is quantised."""
        handlers: dict[Callable[..., Any], Callable[..., Any]] = {
            function: functools.partial(self.multiply, function, product)
            for function, product in PRODUCTS.items()
        }
        handlers[torch.einsum] = self.contract
        return Mode(handlers)

    def multiply(
        self, function: Callable[..., Any], product: Product, *args: Any, **kwargs: Any
    ) -> Any:
        """A product of a known number of operands, given by position or by name."""
        positional, named = list(args), dict(kwargs)
        names = product.names
        addend = None
        for place, spellings in enumerate(names):
            holder, key = _find(positional, named, place, spellings)
            if holder is None:
                continue
            if product.addend in spellings and isinstance(holder[key], Tensor):
                addend = holder[key]
                holder[key] = addend.detach()
            elif spellings in product.operands:
                holder[key] = self.quantise_operand(holder[key])
        output = function(*positional, **named)
        if addend is not None:
            addend = addend.reshape(addend.shape + (1,) * product.trailing)
            beta = kwargs.get("beta", 1)
            addend = addend if beta == 1 else addend * beta
        return self.quantise_gradient(output, addend)

    def contract(self, *args: Any) -> Any:
        """``torch.einsum``: operands separately or in a list."""
        equation, *rest = args
        operands = rest[0] if isinstance(rest[0], (list, tuple)) else rest
        if len(operands) < 2:  # a transpose, a sum: no product
            return torch.einsum(*args)
        quantised = [self.quantise_operand(x) for x in operands]
        return self.quantise_gradient(torch.einsum(equation, *quantised), None)

    def quantise_operand(self, x: Any) -> Any:
        """An operand as the product reads it; anything else as it is."""
        if not isinstance(x, Tensor) or isinstance(x, Float8Tensor) or x.dtype not in _PLAIN:
            return x
        return self.fwd_format.quantise_fwd(_autocast(x))

    def quantise_gradient(self, output: Tensor, addend: Tensor | None) -> Tensor:
        """The output of a product, whose gradient is quantised on its way to the operands."""
        if isinstance(output, Float8Tensor) or output.dtype not in _PLAIN:
            return output
        return _Gradients.apply(output, addend, self.bwd_format)


class _Gradients(torch.autograd.Function):
    """The output as it is; its gradient, quantised, to the operands and, wide, to the addend."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, addend: Tensor | None, fmt: FPFormat) -> Tensor:
        ctx.fmt = fmt
        ctx.addend = None if addend is None else (addend.shape, addend.dtype)
        # Not a view: autograd would refuse an in-place activation that follows.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        to_addend = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.addend
            to_addend = grad.sum_to_size(shape).to(dtype)
        # Straight through once more, for gradients of gradients.
        return ctx.fmt.quantise_fwd(grad), to_addend, None


def _find(
    positional: list[Any], named: dict[str, Any], place: int, spellings: Iterable[str]
) -> tuple[Any, Any]:
    """What holds an argument, and under which key; (None, None) where it was not given."""
    if place < len(positional):
        return positional, place
    for name in spellings:
        if name in named:
            return named, name
    return None, None


def _autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast, if it is on, would multiply it in."""
    if x.dtype == torch.float64 or not autocasts(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
