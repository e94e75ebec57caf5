"""Every function of torch that contracts two tensors: one table for all transforms.

A contraction sums products of two operands over dimensions that both have and the result has not:

    linear       y_MN = x_MK @ w_NK.T + b_N      the right operand is a weight; with the factors of
                                                 `scaled_linear`, "scaled linear"
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

`tensors_in` and `with_tensors` find and replace the tensors of a call, each at its `Path`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.products import factors_of, product_of_sizes, scaled_linear
from float8.unit_scaling.registry import Function
from float8.unit_scaling.scale import scale_bwd, scale_fwd

Path = tuple[Any, ...]  # of an argument inside (args, kwargs): (0, 1), (1, "weight"), (0, 1, 0)
Replacements = Mapping[Function, Function]
Argument = tuple[Path, Path]  # an argument's path if it is given by position, and by name
DEFAULT: Constraint = "to_output_scale"


def weighted_matmul(
    input: Tensor, other: Tensor, *, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.matmul``; ``weight`` only where ``other`` is a matrix."""
    if weight:
        return U.linear(input, other.t(), None, constraint)
    return U.matmul(input, other, constraint)


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
    output = weighted_matmul(mat1, mat2, constraint=constraint, weight=weight)
    output = output if alpha == 1 else output * alpha
    if beta == 0:  # torch does not read the input then, not even a NaN
        return output
    added = input if beta == 1 else input * beta
    return U.add(added, output, constraint) if mix else added + output


def residual_sum(input: Tensor, other: Tensor, *, skip: int, tau: float, alpha: int = 1) -> Tensor:
    """``torch.add`` of a residual layer, ``alpha`` 1; operand ``skip``, 0 or 1, is the skip."""
    branch, kept = (input, other) if skip else (other, input)
    return U.residual_add(branch, kept, tau)


def einsum(
    equation: str, *operands: Any, constraint: Constraint = DEFAULT, weight: bool = False
) -> Tensor:
    """``torch.einsum``; of two operands it has factors for its result and both gradients.

    The equation makes as many products as its indices have values. Each element of a tensor is, or
    its gradient is, a sum of equally many of them. Other equations stay as they are: those of one
    or three operands, and those with an index twice in one operand.
    """
    tensors = operands[0] if isinstance(operands[0], list | tuple) else operands
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names: list[str] = []
    sizes: dict[str, int] = {}
    for term, x in zip(inputs.split(","), tensors, strict=True):
        # One character per dimension; those of "..." are digits, and broadcast.
        names.append(term.replace("...", "9876543210"[7 + len(term) - x.dim() :]))
        for index, size in zip(names[-1], x.shape, strict=True):
            sizes[index] = size if sizes.get(index, 1) == 1 else sizes[index]
    if len(tensors) != 2 or any(len(set(term)) != len(term) for term in names):
        return torch.einsum(equation, *operands)
    if not arrow:  # the result has the indices that occur once
        result = "..." + "".join(i for i in sizes if (i in names[0]) != (i in names[1]))
    kept = result + ("0123456789" if "..." in result else "")
    products = product_of_sizes(tuple(sizes.values()))
    terms = (
        product_of_sizes(tuple(size for i, size in sizes.items() if i not in kept)),
        *(products / max(x.numel(), 1) for x in tensors),
    )
    output, grad_left, grad_right = factors_of(terms, constraint, tied=2 if weight else 3)
    left, right = scale_bwd(tensors[0], grad_left), scale_bwd(tensors[1], grad_right)
    return scale_fwd(torch.einsum(equation, left, right), output)


def _renamed(function: Function, names: Mapping[str, str]) -> Function:
    """A function that takes keywords of other names: name -> the function's own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{names.get(name, name): x for name, x in kwargs.items()})

    return call


class Contraction(NamedTuple):
    """How one function contracts its arguments.

    ``kind`` is one of those that the module lists.
    ``operands`` are the arguments that it multiplies, the left one first; of einsum the first two.
    ``added`` is the argument that it adds to the result. Unit scaling calls ``unit_scaled``
    instead, unless `registry.torch_map` has a function.
    """

    kind: str
    operands: tuple[Argument, ...]
    added: Argument | None = None
    unit_scaled: Function | None = None


def argument(position: int, name: str) -> Argument:
    """The two paths at which an argument may be inside ``(args, kwargs)``."""
    return (0, position), (1, name)


def _pair(kind: str, first: int, left: str, right: str, **options: Any) -> Contraction:
    """A contraction of two arguments, the left one at the position ``first``."""
    return Contraction(kind, (argument(first, left), argument(first + 1, right)), **options)


_INPUT, _BIAS = argument(0, "input"), argument(2, "bias")
_MM = _pair("matrix", 0, "input", "mat2", unit_scaled=_renamed(weighted_matmul, {"mat2": "other"}))
_ADDBMM = _pair("matrix", 1, "batch1", "batch2", added=_INPUT)
_CONVOLUTION = _pair("convolution", 0, "input", "weight", added=_BIAS)
_BADDBMM = _renamed(addmm, {"batch1": "mat1", "batch2": "mat2"})

CONTRACTIONS: dict[Function, Contraction] = {
    F.linear: _pair("linear", 0, "input", "weight", added=_BIAS),
    scaled_linear: _pair("scaled linear", 0, "input", "weight", added=_BIAS),
    torch.matmul: _pair("matrix", 0, "input", "other", unit_scaled=weighted_matmul),
    torch.mm: _MM,
    torch.bmm: _MM,
    torch.addmm: _pair("matrix", 1, "mat1", "mat2", added=_INPUT, unit_scaled=addmm),
    torch.baddbmm: _ADDBMM._replace(unit_scaled=_BADDBMM),
    torch.addbmm: _ADDBMM,
    torch.einsum: _pair("einsum", 1, "operands", "operands", unit_scaled=einsum),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION._replace(unit_scaled=U.conv1d)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _CONVOLUTION),
    F.scaled_dot_product_attention: Contraction(
        "attention", (argument(0, "query"), argument(1, "key"), argument(2, "value"))
    ),
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


def replacements_of(users: Replacements) -> dict[Function, Function]:
    """Function of a model -> what unit scaling calls in its place.

    The user's come first, then the registered ones, then those of `CONTRACTIONS`.
    """
    replacements = {f: c.unit_scaled for f, c in CONTRACTIONS.items() if c.unit_scaled is not None}
    for function, ours in registry.torch_map.items():
        if ours is not U.matmul:  # the table's knows about weights
            replacements[function] = ours
    for function, other in users.items():
        replacements[function] = other if other is function else replacements.get(other, other)
    return replacements


@functools.lru_cache(maxsize=256)
def signature_of(function: Function) -> Mapping[str, inspect.Parameter] | None:
    """The arguments of a function; None if they are not known."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtin functions have no signature
        return None


def takes(function: Function, keyword: str) -> bool:
    """Whether a function has an argument of this name, as far as its arguments are known."""
    known = signature_of(function)
    return known is None or keyword in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


# torch.compile calls it while it traces and takes its result for a constant.
takes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def may_contract_activations(function: Function) -> bool:
    """Whether both operands of a function may be activations that it contracts."""
    contraction = CONTRACTIONS.get(function)
    return contraction is not None and contraction.kind in ("matrix", "einsum")


def tensors_in(arguments: Any, path: Path = ()) -> list[tuple[Path, Tensor]]:
    """The tensors in nested lists, tuples and dicts, each with its path."""
    if isinstance(arguments, Tensor):
        return [(path, arguments)]
    items: Any = ()
    if isinstance(arguments, list | tuple):
        items = enumerate(arguments)
    elif isinstance(arguments, dict):
        items = arguments.items()
    return [found for key, item in items for found in tensors_in(item, (*path, key))]


def with_tensors(arguments: Any, new: dict[Path, Tensor], path: Path = ()) -> Any:
    """Nested lists, tuples and dicts with other tensors at some paths."""
    if path in new:
        return new[path]
    if isinstance(arguments, dict):
        return {name: with_tensors(item, new, (*path, name)) for name, item in arguments.items()}
    if type(arguments) in (list, tuple):
        items = [with_tensors(item, new, (*path, i)) for i, item in enumerate(arguments)]
        return items if isinstance(arguments, list) else tuple(items)
    return arguments
