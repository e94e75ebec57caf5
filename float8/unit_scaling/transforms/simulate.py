"""`simulate_format`: a model whose contractions round their operands to narrow formats.

Let q_f and q_b round to the formats of the forward and of the backward pass. A product is simulated
as a GEMM on hardware that multiplies those formats and accumulates in wide numbers (arXiv
2209.05433, section 3)::

    y  = q_f(x) @ q_f(w).T + b
    gx = q_b(g) @ q_f(w)
    gw = q_b(g).T @ q_f(x)
    gb = g.sum(0)                  neither bias nor its gradient is an operand of a product

All functions of the table `contractions.CONTRACTIONS` are simulated. Of attention, q_f rounds
query, key and value, q_b the gradient of its output. The probabilities are operands of a product
too, but are not rounded: a fused kernel does not store them, and float8 attention kernels scale
them per tile. Attention that a model spells out, softmax and ``@``, is rounded at both products.
Products inside an ``einsum`` of three operands and inside a fused recurrent layer cannot be seen
and stay wide.

There is no scale in this simulation: values out of a format's range saturate or vanish. That shows
whether a model needs scales. A unit-scaled model loses little (arXiv 2303.11257, section 5.2),
others may lose all.

Under autocast, operands are rounded to autocast's dtype first, as they would be before the product.
Only plain tensors of float32, bfloat16, float16 or float64 are rounded; a `Float8Tensor`, for
example, stays as it is. The mode looks inside functions of ``U``, so that their products are
simulated between their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from float8.linear.plan import autocasts
from float8.tensor import Float8Tensor
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.contractions import CONTRACTIONS, tensors_in, with_tensors
from float8.unit_scaling.transforms.transformed import OnProducts, transformed

M = TypeVar("M", bound=nn.Module)


def simulate_format(module: M, fwd_format: FPFormat, bwd_format: FPFormat) -> M:
    """A copy of a model that rounds the operands of its contractions; the model stays as it is.

    Args:
        module: any module.
        fwd_format: of the operands of each product: activations and weights.
        bwd_format: of the gradient that comes to each product.

    Returns:
        the copy, of a subclass of the same class. It composes with the other transforms in any
        order, with ``torch.compile``, deepcopy and pickle.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: it simulates a format already, or was compiled: transform first.
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
class SimulateFormat(OnProducts):
    """The transform of `simulate_format`; it looks inside `scaled_linear`."""

    depth: ClassVar[int] = 2
    kinds: ClassVar[frozenset[str]] = frozenset(
        {"linear", "matrix", "einsum", "convolution", "attention"}
    )
    fwd_format: FPFormat
    bwd_format: FPFormat

    def product(self, state: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        """A contraction of rounded operands, whose gradient is rounded on its way to them."""
        contraction, tensors = CONTRACTIONS[function], dict(tensors_in((args, kwargs)))
        paths = {path for argument in contraction.operands for path in argument}
        if contraction.kind == "einsum":
            paths = set(tensors) if len(tensors) > 1 else set()  # one: a transpose or a sum
        new = {path: self.rounded(x) for path, x in tensors.items() if path in paths}
        if not new:
            return function(*args, **kwargs)
        addend = None
        for path in contraction.added or ():
            if path in tensors:
                new[path], addend = tensors[path].detach(), tensors[path]
        args, kwargs = with_tensors((args, kwargs), new)
        output = function(*args, **kwargs)
        if not _is_plain(output):
            return output
        if addend is not None and contraction.kind == "convolution":
            # After the channels, of which it has one value each, come the kernel's dimensions.
            kernel = next(tensors[p] for p in contraction.operands[1] if p in tensors).dim() - 2
            addend = addend.reshape(-1, *(1,) * kernel)
        elif addend is not None and (beta := kwargs.get("beta", 1)) != 1:
            addend = addend * beta
        return _Gradients.apply(output, addend, self.bwd_format)

    def rounded(self, x: Tensor) -> Tensor:
        """An operand, rounded if it is a plain tensor; under autocast, to its dtype first."""
        if not _is_plain(x):
            return x
        if x.dtype != torch.float64 and autocasts(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.fwd_format.quantise_fwd(x)


def _is_plain(x: Tensor) -> bool:
    return x.is_floating_point() and not isinstance(x, Float8Tensor)


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
