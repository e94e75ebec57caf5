"""Matrix products in all the forms that torch has, as `U.linear` and `U.matmul`.

Whatever it is called, a product of two tensors is a matrix product over the dimensions that both
have and the result has not. It takes its three factors from one of two rules: `U.linear` where the
right operand is a weight, whose gradient is a cut edge and keeps a factor of its own; `U.matmul`
where both are activations, whose factors a constraint ties together. Each function here has the
signature of its torch namesake and two more arguments: ``weight`` (the right operand is a matrix
computed from parameters alone) and ``mix`` (what is added to the product is a signal of its own,
not a bias or a mask).

``alpha`` and ``beta`` are multipliers of the model and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.transforms.convolutions import conv2d, conv3d

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
    product = matmul(mat1, mat2, constraint=constraint, weight=weight)
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # torch does not read the input then, not even a NaN
        return product
    added = input if beta == 1 else input * beta
    return U.add(added, product, constraint) if mix else added + product


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, **options: Any) -> Tensor:
    """``torch.baddbmm``."""
    return addmm(input, batch1, batch2, **options)


def einsum(
    equation: str, *operands: Any, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.einsum`` of two operands that sums over dimensions of both.

    Other ones, of one operand, of three, with an index twice in one operand, or without a sum over
    both, are left as they are.
    """
    tensors = operands[0] if isinstance(operands[0], list | tuple) else operands
    layout = _contraction(equation, [t.dim() for t in tensors])
    if layout is None:
        return torch.einsum(equation, *operands)
    batch, rows, inner, columns, result = layout
    left, right = tensors
    names_left, names_right = _names(equation, [t.dim() for t in tensors])
    sizes = dict(zip(names_left, left.shape, strict=True))
    for index, size in zip(names_right, right.shape, strict=True):
        if index.isdigit() and sizes.get(index, size) != size:  # "..." may broadcast
            return torch.einsum(equation, *operands)
        sizes[index] = size
    left = _grouped(left, names_left, (batch, rows, inner), sizes)
    right = _grouped(right, names_right, (batch, inner, columns), sizes)
    if weight and not batch:
        product = U.linear(left[0], right[0].t(), None, constraint)
    else:
        product = U.matmul(left, right, constraint)
    product = product.reshape([sizes[i] for i in batch + rows + columns])
    return product.permute([(batch + rows + columns).index(i) for i in result])


def _grouped(x: Tensor, names: str, groups: tuple[str, ...], sizes: dict[str, int]) -> Tensor:
    """x with its dimensions gathered into groups, each as one dimension."""
    x = x.permute([names.index(i) for group in groups for i in group])
    shape = []
    for group in groups:
        size = 1
        for index in group:
            size = size * sizes[index]
        shape.append(size)
    return x.reshape(shape)


def _names(equation: str, dims: list[int]) -> list[str]:
    """An index for every dimension of every operand; those of ``...`` are digits."""
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    names = []
    for term, dim in zip(inputs, dims, strict=True):
        rest = dim - len(term.replace("...", ""))
        names.append(term.replace("...", "9876543210"[10 - rest :] if rest else ""))
    return names


def _contraction(equation: str, dims: list[int]) -> tuple[str, str, str, str, str] | None:
    """Indices of batch, rows, inner and columns, and the result's; None if it is no product."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    if inputs.count(",") != 1 or len(dims) != 2 or (not arrow and "..." in inputs):
        return None
    left, right = _names(equation, dims)
    if any(len(set(names)) != len(names) for names in (left, right)):
        return None
    both = [i for i in left if i in right]
    if not arrow:
        result = "".join(sorted(i for i in set(left + right) if i not in both))
    dots = [i for i in sorted(set(left + right), reverse=True) if i.isdigit()]
    result = result.replace("...", "".join(dots))
    batch = "".join(i for i in both if i in result)
    inner = "".join(i for i in both if i not in result)
    rows = "".join(i for i in left if i not in both)
    columns = "".join(i for i in right if i not in both)
    if not inner or any(i not in result for i in rows + columns):
        return None
    return batch, rows, inner, columns, result


# torch function -> what unit scaling makes of it, beside `registry.torch_map`
PRODUCTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.matmul: matmul,
    torch.mm: mm,
    torch.bmm: mm,
    torch.addmm: addmm,
    torch.baddbmm: baddbmm,
    torch.einsum: einsum,
    F.conv2d: conv2d,
    F.conv3d: conv3d,
}

# Products without a version of their own, by name. A weight of unit scale makes them explode.
UNSCALED = frozenset(
    {
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "bilinear"),
        "embedding_bag",
        *("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
        *("mv", "addmv", "addbmm", "inner", "tensordot", "chain_matmul", "multi_dot"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    }
)

# torch function -> the position and name of the operand that may be a weight
RIGHT: dict[Callable[..., Any], tuple[int, str]] = {
    torch.matmul: (1, "other"),
    torch.mm: (1, "mat2"),
    torch.addmm: (2, "mat2"),
    torch.einsum: (2, "operands"),
}

# torch function -> the position and name of what it adds to the product
ADDED: dict[Callable[..., Any], tuple[int, str]] = {
    torch.addmm: (0, "input"),
    torch.baddbmm: (0, "input"),
}
