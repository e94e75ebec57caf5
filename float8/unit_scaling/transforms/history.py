"""The history of a forward: its calls, and the inputs of each tensor.

Each call of a function is a `Call`. Each floating-point tensor is a `Value` with a number; a tensor
that an in-place function changes gets a new value. `History` holds numbers only and keeps no
tensor, so it can be filled while ``torch.compile`` traces, and be kept until the backward pass.
"""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from float8.unit_scaling.transforms.contractions import CONTRACTIONS, Argument, Function, Path

# Functions whose result is their first operand in another view, shape or precision.
ALIASES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous"),
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "__get__"),
        *("squeeze", "unsqueeze", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("clone", "alias"),
    }
)
Edge = tuple[int, Path]  # a call, and the path in its arguments at which it reads a value


@dataclass(slots=True)
class Value:
    """A floating-point tensor at one time of a forward.

    Args:
        number: its place among the values of the forward.
        alias: the value that it is another view, shape or precision of; its own number if none.
        origins: the values that it was computed from, directly or not: bit n stands for value n.
        terms: those of the origins that it is plain arithmetic of (see `additions`), as bits too.
        is_learned: whether it was computed from parameters alone.
        is_trained: whether it is a parameter that requires a gradient.
        is_scores: whether it is arithmetic of a product of two activations, as attention scores.
        parameter: the parameter's name, "" for a trained one of another model; None if it is none.
        call: the number of the call that returned it; None for parameters and inputs.
        shape: of a parameter; ``dims`` says of every value how many dimensions it has.
    """

    number: int
    alias: int
    dims: int
    origins: int = 0
    terms: int = 0
    is_learned: bool = False
    is_trained: bool = False
    is_scores: bool = False
    parameter: str | None = None
    call: int | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Call:
    """One call of a function.

    For ``name`` see `name_of`; ``function`` is what the model calls. ``inputs`` are its
    floating-point operands, each with its path in ``(args, kwargs)``. ``reads_integers`` says
    whether it has tensor operands of integers or booleans, which are no values. ``outputs`` are its
    floating-point results. The other fields are of additions (see `additions`).
    """

    name: str
    function: Function
    inputs: list[tuple[Path, Value]]
    reads_integers: bool = False
    outputs: list[Value] = field(default_factory=list)
    kind: str = ""
    skip: int = 0
    root: int = -1
    tau: float = 0.0

    def operand(self, argument: Argument) -> Value | None:
        """The floating-point operand that was given as this argument."""
        return next((value for path, value in self.inputs if path in argument.paths), None)

    def gradient_factor(self, operand: int) -> float:
        """The factor of the gradient of operand 0 or 1 where branch and skip separate."""
        weight = 1.0 if operand == self.skip else self.tau
        return weight / math.sqrt(1 + self.tau**2)


class History:
    """The calls of a forward, and its values."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.residuals: list[int] = []  # the calls that are residual additions
        self.learned = 0  # the values that are learned, as bits
        # The edges that read a value; and those by which calls that make no alias read it or one of
        # its aliases.
        self.reads: dict[int, list[Edge]] = defaultdict(list)
        self.reads_of_aliases: dict[int, list[Edge]] = defaultdict(list)

    def add_leaf(self, dims: int, parameter: str | None = None, is_trained: bool = False) -> Value:
        """A new value that no call has returned: a parameter, a buffer, an input."""
        new = self._new(dims, is_learned=parameter is not None)
        new.parameter, new.is_trained = parameter, is_trained
        return new

    def add_call(self, call: Call) -> int:
        """The number of a new call, which has no results yet."""
        number = len(self.calls)
        self.calls.append(call)
        for path, value in call.inputs:
            self.reads[value.number].append((number, path))
            if call.name not in ALIASES:
                self.reads_of_aliases[value.alias].append((number, path))
        return number

    def add_result(self, dims: int, is_new_signal: bool) -> Value:
        """A new value, with ``dims`` dimensions, that the last call has returned.

        ``is_new_signal`` says whether it counts as a signal of its own, and not as plain arithmetic
        of the operands.
        """
        call = self.calls[-1]
        sources = [value for _, value in call.inputs]
        is_learned = bool(sources) and not call.reads_integers
        new = self._new(dims, is_learned and all(v.is_learned for v in sources))
        new.call = len(self.calls) - 1
        for value in sources:
            new.origins |= value.origins | 1 << value.number
        is_alias = call.name in ALIASES and bool(sources) and not is_in_place(call.function)
        if is_alias:
            new.alias = sources[0].alias
        if sources and (is_alias or not is_new_signal):
            new.terms = 0
            for value in sources:
                new.terms |= value.terms
        if may_contract_activations(call.function):
            new.is_scores = all(self.values[v.alias].parameter is None for v in sources)
        elif is_alias or not is_new_signal or call.name == "add":
            new.is_scores = any(v.is_scores for v in sources)
        call.outputs.append(new)
        return new

    def _new(self, dims: int, is_learned: bool) -> Value:
        number = len(self.values)
        new = Value(number, number, dims, terms=1 << number, is_learned=is_learned)
        self.values.append(new)
        self.learned |= is_learned << number
        return new

    def depends_on_parameters(self, value: Value) -> bool:
        """Whether a parameter is among the origins of a value, or is the value."""
        return value.is_learned or bool(value.origins & self.learned)


def may_contract_activations(function: Function) -> bool:
    """Whether both operands of a function may be activations that it contracts."""
    contraction = CONTRACTIONS.get(function)
    return contraction is not None and contraction.kind in ("matrix", "einsum")


def name_of(function: Any) -> str:
    """A function's name, one for a method and its operator: ``mul`` for ``Tensor.__mul__``."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name == "__get__" else name.rstrip("_").removeprefix("__") or name


def is_in_place(function: Any) -> bool:
    """Whether a function leaves its result in its first operand."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# torch.compile calls them while it traces and takes their results for constants.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_in_place._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tensors_in(arguments: Any, path: Path = ()) -> list[tuple[Path, Tensor]]:
    """The tensors in nested lists, tuples and dicts, each with its path."""
    if isinstance(arguments, Tensor):
        return [(path, arguments)]
    found: list[tuple[Path, Tensor]] = []
    if isinstance(arguments, list | tuple):
        for i, item in enumerate(arguments):
            found += tensors_in(item, (*path, i))
    elif isinstance(arguments, dict):
        for name, item in arguments.items():
            found += tensors_in(item, (*path, name))
    return found


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


def line_of_caller() -> str:
    """Where the model calls, as ``file:line``: the innermost line outside torch and float8."""
    own = (str(torch.__path__[0]), __file__.rpartition("/transforms/")[0], "<")
    lines = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return next((f"{file}:{n}" for file, n in lines if not file.startswith(own)), "an unknown line")
