"""What a forward has computed so far: its calls, and what each tensor was computed from.

Each call of a function is a `Call`. Each floating-point tensor is a `Value` with a number; a tensor
that an in-place function changes gets a new value. No tensor is kept here: `History` holds numbers
only, so it can be filled while ``torch.compile`` traces, and kept until the backward pass.

Of each value is known

    origins     the values that it was computed from, all the way up: bit n stands for value n
    terms       those among them that it is plain arithmetic of (see `sums`), as bits too
    alias       the value that it is another view, shape or precision of; itself if there is none
    learned     whether it was computed from parameters alone
    trained     whether it is a parameter that is trained
    scores      whether it is arithmetic of a product of two activations, as attention scores are
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]

# Functions whose result is their first operand in another view, shape or precision.
ALIASES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous"),
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "__get__"),
        *("squeeze", "unsqueeze", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("clone", "alias"),
    }
)


# Products whose operands may both be activations.
MATRIX_PRODUCTS = frozenset({torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.einsum})


@dataclass(slots=True)
class Value:
    """What a tensor holds at one time; see the module."""

    number: int
    alias: int
    origins: int = 0
    terms: int = 0
    learned: bool = False
    trained: bool = False
    scores: bool = False
    parameter: str | None = None
    call: int | None = None
    dims: int = 0


@dataclass(slots=True)
class Call:
    """One call of a function; ``inputs`` are its floating-point operands, each with its path in
    ``(args, kwargs)``."""

    name: str
    function: Callable[..., Any]
    inputs: list[tuple[Path, Value]]
    reads_integers: bool = False  # or booleans: tensors that are no values
    outputs: list[Value] = field(default_factory=list)

    def operand(self, position: int, name: str) -> Value | None:
        """The floating-point operand at a position or of a name."""
        for path, value in self.inputs:
            if path in ((0, position), (1, name)):
                return value
        return None


class History:
    """The calls of a forward, and its values."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.learned = 0  # the values that are learned, as bits

    def outside(self, dims: int, parameter: str | None = None, trained: bool = False) -> Value:
        """A value that no call has made: a parameter, a buffer, an input."""
        new = self._new(dims, learned=parameter is not None)
        new.parameter, new.trained = parameter, trained
        return new

    def result(self, dims: int, mixes: bool) -> Value:
        """A value that the last call has made.

        Args:
            dims: how many dimensions the tensor has.
            mixes: whether the result is no arithmetic of the operands but something new.
        """
        call = self.calls[-1]
        sources = [value for _, value in call.inputs]
        learned = bool(sources) and not call.reads_integers and all(v.learned for v in sources)
        new = self._new(dims, learned)
        new.call = len(self.calls) - 1
        for value in sources:
            new.origins |= value.origins | 1 << value.number
        is_alias = call.name in ALIASES and bool(sources) and not is_in_place(call.function)
        if is_alias:
            new.alias = sources[0].alias
        if sources and (is_alias or not mixes):
            new.terms = 0
            for value in sources:
                new.terms |= value.terms
        if call.function in MATRIX_PRODUCTS:
            new.scores = all(self.values[v.alias].parameter is None for v in sources)
        elif is_alias or not mixes or call.name == "add":
            new.scores = any(v.scores for v in sources)
        call.outputs.append(new)
        return new

    def _new(self, dims: int, learned: bool) -> Value:
        number = len(self.values)
        new = Value(number, alias=number, terms=1 << number, learned=learned, dims=dims)
        self.values.append(new)
        self.learned |= learned << number
        return new

    def is_learned(self, value: Value) -> bool:
        """Whether a value depends on a parameter."""
        return value.learned or bool(value.origins & self.learned)


def name_of(function: Any) -> str:
    """A function's name, one for a method and its operator: ``mul`` for ``Tensor.__mul__``."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name == "__get__" else name.rstrip("_").removeprefix("__") or name


def is_in_place(function: Any) -> bool:
    """Whether a function leaves its result in its first operand."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# torch.compile calls them while tracing and takes their results for constants.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_in_place._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tensors_in(arguments: Any, path: Path = ()) -> list[tuple[Path, Tensor]]:
    """The tensors in nested lists, tuples and dicts, with the way to each."""
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


def with_tensors(whole: Any, new: dict[Path, Tensor], path: Path = ()) -> Any:
    """Nested lists, tuples and dicts with other tensors at some paths."""
    if path in new:
        return new[path]
    if isinstance(whole, dict):
        return {name: with_tensors(item, new, (*path, name)) for name, item in whole.items()}
    if type(whole) in (list, tuple):
        items = [with_tensors(item, new, (*path, i)) for i, item in enumerate(whole)]
        return items if isinstance(whole, list) else tuple(items)
    return whole


def line_of_caller() -> str:
    """Where the model calls, as ``file:line``: the innermost line outside torch and float8."""
    return next(_lines(traceback.walk_stack(None)), "an unknown line")


def _lines(frames: Iterator[tuple[Any, int]]) -> Iterator[str]:
    torch_files, own_files = str(torch.__path__[0]), __file__.rpartition("/transforms/")[0]
    for frame, line in frames:
        name = frame.f_code.co_filename
        if not name.startswith((torch_files, own_files, "<")):
            yield f"{name}:{line}"
