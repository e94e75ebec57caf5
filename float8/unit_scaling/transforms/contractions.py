"""Every function of torch that contracts two tensors: one table for all transforms.

A contraction sums products of two operands over dimensions that both have and the result has not:

    linear       y_MN = x_MK @ w_NK.T + b_N      the right operand is a weight
    matrix       y_MN = x_MK @ y_KN              either operand may be a weight or an activation
    einsum       as its equation says
    convolution  sums over input channels and the kernel
    attention    softmax(q k^T) v: two contractions in one call

`CONTRACTIONS` lists for each function its operands, the argument that it adds to the result, and
the function that unit scaling calls instead. Functions with an entry in `registry.torch_map`
(``F.linear``, ``F.conv1d``, attention) are replaced by that entry. Methods and operators are other
spellings of these functions (`registry.SPELLINGS`).

The unit-scaled functions below take their factors from one of two rules. `U.linear` applies where
the right operand is a weight: its gradient is a cut edge and has a factor of its own. `U.matmul`
applies where both operands are activations: a constraint ties their factors. Each function has
the signature of its torch namesake and up to two more arguments: ``weight`` (the right operand is a
matrix computed from parameters alone) and ``mix`` (the added tensor is a signal of its own, not a
bias or a mask). ``alpha`` and ``beta`` are multipliers of the model and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.functional.convolution import Sizes, convolved
from float8.unit_scaling.functional.products import power_of_terms, product_of, scaled_linear
from float8.unit_scaling.scale import scale_bwd, scale_fwd

Function = Callable[..., Any]
Path = tuple[Any, ...]  # of an argument inside (args, kwargs): (0, 1), (1, "weight"), (0, 1, 0)
DEFAULT: Constraint = "to_output_scale"


def matmul(
    input: Tensor, other: Tensor, *, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.matmul``; ``weight`` only where ``other`` is a matrix."""
    if weight:
        return U.linear(input, other.t(), None, constraint)
    return U.matmul(input, other, constraint)


def mm(
    input: Tensor, mat2: Tensor, *, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.mm`` and ``torch.bmm``."""
    return matmul(input, mat2, constraint=constraint, weight=weight)


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    constraint: Constraint = DEFAULT,
    weight: bool = False,
    mix: bool = False,
) -> Tensor:
    """``torch.addmm`` and ``torch.baddbmm``: ``beta * input + alpha * (mat1 @ mat2)``."""
    if weight and input.dim() == 1 and beta == alpha == 1:
        return U.linear(mat1, mat2.t(), input, constraint)
    output = matmul(mat1, mat2, constraint=constraint, weight=weight)
    output = output if alpha == 1 else output * alpha
    if beta == 0:  # torch does not read the input then, not even a NaN
        return output
    added = input if beta == 1 else input * beta
    return U.add(added, output, constraint) if mix else added + output


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, **options: Any) -> Tensor:
    """``torch.baddbmm``."""
    return addmm(input, batch1, batch2, **options)


def einsum(
    equation: str, *operands: Any, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.einsum``; of two operands it has factors for its result and both gradients.

    The equation makes as many products as its indices have values. Each element of a tensor is, or
    its gradient is, a sum of equally many of them. Other equations stay as they are: those of one
    or three operands, and those with an index twice in one operand.
    """
    tensors = operands[0] if isinstance(operands[0], list | tuple) else operands
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    names = [_names(term, x.dim()) for term, x in zip(inputs, tensors, strict=True)]
    if len(tensors) != 2 or any(len(set(term)) != len(term) for term in names):
        return torch.einsum(equation, *operands)
    sizes: dict[str, int] = {}
    for term, x in zip(names, tensors, strict=True):
        for index, size in zip(term, x.shape, strict=True):
            sizes[index] = size if sizes.get(index, 1) == 1 else sizes[index]  # "..." broadcasts
    summed = _summed(equation, names)
    products = product_of(tuple(sizes.values()))
    terms = (
        product_of(tuple(sizes[i] for i in summed)),
        *(products / max(x.numel(), 1) for x in tensors),
    )
    factors = tuple(power_of_terms(n, 0.5) for n in terms)
    if weight:
        tied = (*apply_constraint(constraint, *factors[:2]), factors[2])
    else:
        tied = apply_constraint(constraint, *factors)
    left, right = (scale_bwd(x, f) for x, f in zip(tensors, tied[1:], strict=True))
    return scale_fwd(torch.einsum(equation, left, right), tied[0])


def _names(term: str, dim: int) -> str:
    """The indices of an operand, one character per dimension; those of ``...`` are digits."""
    rest = dim - len(term.replace("...", ""))
    return term.replace("...", "9876543210"[10 - rest :])


def _summed(equation: str, names: list[str]) -> str:
    """The indices that the result does not have."""
    left, right = names
    _, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:  # those that occur once
        return "".join(i for i in left if i in right and not i.isdigit())
    kept = result + ("0123456789" if "..." in result else "")
    return "".join(i for i in dict.fromkeys(left + right) if i not in kept)


def _convolution(
    function: Function,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    constraint: Constraint = DEFAULT,
) -> Tensor:
    """A convolution of input (N, Cin, ...) or (Cin, ...), weight (Cout, Cin / groups, ...)."""
    options = (stride, padding, dilation, groups)
    return convolved(function, (input, weight, bias), options, constraint)


conv2d = partial(_convolution, F.conv2d)
conv3d = partial(_convolution, F.conv3d)


class Argument(NamedTuple):
    """An argument of a function, given by position or by name."""

    position: int
    name: str

    @property
    def paths(self) -> tuple[Path, Path]:
        """The two paths at which it may be inside ``(args, kwargs)``."""
        return (0, self.position), (1, self.name)


class Contraction(NamedTuple):
    """How one function contracts its arguments.

    ``kind`` is "linear", "matrix", "einsum", "convolution" or "attention"; see the module.
    ``operands`` are the arguments that it multiplies, the left one first; of einsum the first two.
    ``added`` is the argument that it adds to the result, and ``dims_after_added`` the number of
    dimensions of the result after those of ``added``. Unit scaling calls ``unit_scaled`` instead,
    unless `registry.torch_map` has a function.
    """

    kind: str
    operands: tuple[Argument, ...]
    added: Argument | None = None
    dims_after_added: int = 0
    unit_scaled: Function | None = None


_LINEAR = (Argument(0, "input"), Argument(1, "weight"))
_MATMUL = (Argument(0, "input"), Argument(1, "other"))
_MM = (Argument(0, "input"), Argument(1, "mat2"))
_ADDMM = (Argument(1, "mat1"), Argument(2, "mat2"))
_ADDBMM = (Argument(1, "batch1"), Argument(2, "batch2"))
_EINSUM = (Argument(1, "operands"), Argument(2, "operands"))
_ATTENTION = (Argument(0, "query"), Argument(1, "key"), Argument(2, "value"))
_INPUT, _BIAS = Argument(0, "input"), Argument(2, "bias")


def _of_convolution(spatial_dims: int, unit_scaled: Function | None = None) -> Contraction:
    return Contraction("convolution", _LINEAR, _BIAS, spatial_dims, unit_scaled)


CONTRACTIONS: dict[Function, Contraction] = {
    F.linear: Contraction("linear", _LINEAR, _BIAS),
    scaled_linear: Contraction("linear", _LINEAR, _BIAS),
    torch.matmul: Contraction("matrix", _MATMUL, unit_scaled=matmul),
    torch.mm: Contraction("matrix", _MM, unit_scaled=mm),
    torch.bmm: Contraction("matrix", _MM, unit_scaled=mm),
    torch.addmm: Contraction("matrix", _ADDMM, _INPUT, unit_scaled=addmm),
    torch.baddbmm: Contraction("matrix", _ADDBMM, _INPUT, unit_scaled=baddbmm),
    torch.addbmm: Contraction("matrix", _ADDBMM, _INPUT),
    torch.einsum: Contraction("einsum", _EINSUM, unit_scaled=einsum),
    F.conv1d: _of_convolution(1),
    F.conv2d: _of_convolution(2, conv2d),
    F.conv3d: _of_convolution(3, conv3d),
    F.conv_transpose1d: _of_convolution(1),
    F.conv_transpose2d: _of_convolution(2),
    F.conv_transpose3d: _of_convolution(3),
    F.scaled_dot_product_attention: Contraction("attention", _ATTENTION),
}

# Names of the other functions that contract a weight. No transform covers them, and unit scaling
# refuses them as it refuses a contraction without a unit-scaled function.
OTHER_CONTRACTIONS = frozenset(
    {
        *("conv_tbc", "bilinear", "embedding_bag", "mv", "addmv", "inner"),
        *("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
        *("tensordot", "chain_matmul", "multi_dot"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    }
)
