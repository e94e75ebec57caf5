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

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from float8.linear.plan import autocasts
from float8.tensor import Float8Tensor
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.transforms.contractions import CONTRACTIONS, Function, Path
from float8.unit_scaling.transforms.history import tensors_in, with_tensors
from float8.unit_scaling.transforms.transformed import Mode, Transform, transformed

M = TypeVar("M", bound=nn.Module)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
class SimulateFormat(Transform):
    """The transform of `simulate_format`."""

    depth: ClassVar[int] = 2
    fwd_format: FPFormat
    bwd_format: FPFormat

    def mode(self, model: nn.Module, forward: Function, args: Any, kwargs: Any) -> Mode:
        """The mode for one call; it looks inside functions of ours, `scaled_linear` too."""
        functions = [f for f in CONTRACTIONS if not hasattr(f, "implementation")]
        return Mode({f: functools.partial(self.contract, f) for f in functions})

    def contract(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """A contraction of rounded operands."""
        contraction, tensors = CONTRACTIONS[function], dict(tensors_in((args, kwargs)))
        if contraction.kind == "einsum":
            operands = list(tensors)
            if len(operands) < 2:  # a transpose or a sum
                return function(*args, **kwargs)
        else:
            operands = [p for argument in contraction.operands for p in argument.paths]
        new: dict[Path, Tensor] = {
            path: self.quantise_operand(tensors[path]) for path in operands if path in tensors
        }
        paths = () if contraction.added is None else contraction.added.paths
        added = next(((path, tensors[path]) for path in paths if path in tensors), None)
        if added is not None:
            new[added[0]] = added[1].detach()
        args, kwargs = with_tensors((args, kwargs), new)
        output = function(*args, **kwargs)
        if added is None:
            return self.quantise_gradient(output, None)
        addend = added[1].reshape(added[1].shape + (1,) * contraction.dims_after_added)
        beta = kwargs.get("beta", 1)
        return self.quantise_gradient(output, addend if beta == 1 else addend * beta)

    def quantise_operand(self, x: Tensor) -> Tensor:
        """An operand, rounded if it is a plain tensor."""
        if isinstance(x, Float8Tensor) or x.dtype not in _PLAIN:
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


def _autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast, if it is on, would multiply it in."""
    if x.dtype == torch.float64 or not autocasts(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
