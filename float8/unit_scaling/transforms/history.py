"""The history of a forward: its calls, the inputs of each tensor, and what each addition means.

Each call of a function is a `ModelCall`, each floating-point tensor a `Value` with a number. A view
of a tensor, its copy in another precision and the like (`is_alias`) have the tensor's number and
make no call; a tensor that an in-place function changes gets a new value. `History` holds numbers
only and keeps no tensor, so it can be filled while ``torch.compile`` traces, and be kept until the
backward pass.

**Additions.** Unit scaling divides a sum of independent signals by the root of their number, and
gives a residual sum ``x + f(x)`` weights of its own. A formula that happens to contain a plus, the
``x * cos + rotate(x) * sin`` of rotary embeddings or the ``x + 0.044715 * x**3`` of a hand-written
gelu, must stay as it is. `History.classify` tells them apart by what the operands were computed
from:

    KEEP      left as it is: the addition of a number, a bias vector or a mask (added to attention
              scores, and independent of parameters), or an addition inside a formula, where both
              operands are arithmetic of one value
    RESIDUAL  one operand, the skip, is what the other, the branch, was computed from; or the sum
              of such a skip and other branches of it
    SUM       the rest: signals that are taken for independent

A value is *arithmetic* of those that it was computed from by functions that hold no parameter and
that unit scaling has no unit-scaled function for. The results of contractions, norms, activations,
softmax, sums and residual layers are new signals. *Scores* are arithmetic of a product of two
activations, or a sum with one: ``q k^T`` before its softmax.

A residual addition computes ``y = (tau f(x) + x) / sqrt(1 + tau**2)``. **tau** is that of
`core.functional.transformer_residual_scaling_rule` (u-muP, arXiv 2407.17465, appendix G, both
multipliers 1) for all residual layers of the model in the order of their additions,
``tau_i = 1 / sqrt(L/2 + i)``. The stream's first value, all branches at even places and all at odd
places (a transformer's attention and feed-forward layers) then contribute the same variance to the
end of the stream. With these multipliers the rule gives the ``i``-th branch the same ``tau``
whether it is attention or not.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from float8.unit_scaling.core.functional import transformer_residual_scaling_rule
from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.contractions import Path, argument, may_contract_activations

KEEP, SUM, RESIDUAL = "keep", "sum", "residual"  # roles of additions
SCALED, READOUT = "scaled", "readout"  # of other calls, which have KEEP too
BOTH_INPUTS = (argument(0, "input"), argument(1, "other"))
# Names of functions whose result is their first operand in another view, shape or precision.
_ALIASES = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous"),
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "__get__"),
        *("squeeze", "unsqueeze", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("clone", "alias"),
    }
)
tau_of = transformer_residual_scaling_rule()
Edge = tuple[int, Path]  # a call, and the path in its arguments at which it reads a value


@dataclass(slots=True)
class Value:
    """A floating-point tensor at one time of a forward, and its views.

    Args:
        number: its place among the values of the forward.
        origins: the values that it was computed from, directly or not: bit n stands for value n.
        terms: those of the origins that it is plain arithmetic of, and itself, as bits too.
        is_learned: whether it was computed from parameters alone.
        has_parameters: whether a parameter is among its origins, or it is one.
        is_scores: whether it is arithmetic of a product of two activations, as attention scores.
        parameter: the parameter's name, "" for a trained one of another model; None if it is none.
        is_trained: whether it is a parameter that requires a gradient.
        call: the number of the call that returned it; None for parameters and inputs.
    """

    number: int
    origins: int = 0
    terms: int = 0
    is_learned: bool = False
    has_parameters: bool = False
    is_scores: bool = False
    parameter: str | None = None
    is_trained: bool = False
    call: int | None = None


@dataclass(slots=True)
class CallInput:
    """A floating-point operand of a call: its path, its value and its number of dimensions."""

    path: Path
    value: Value
    dims: int


@dataclass(slots=True)
class ModelCall:
    """One call of a function.

    Args:
        function: what the model calls; ``torch.add`` in place too.
        inputs: its floating-point operands.
        reads_integers: whether it has tensor operands of integers or booleans, which are no values.
        outputs: its floating-point results.
        role: of an addition what it means, of other calls what `decisions` says.
        skip: of a residual addition, which operand is the skip, 0 or 1.
        root: the value at which branch and skip part: the skip operand itself, or the input of the
            residual layer that returned it (``x + attention(x) + mlp(x)``).
        tau: the weight of the branch.
    """

    function: Function
    inputs: list[CallInput]
    reads_integers: bool = False
    outputs: list[Value] = field(default_factory=list)
    role: str = KEEP
    skip: int = 0
    root: int = -1
    tau: float = 0.0

    def operand(self, which: tuple[Path, Path]) -> CallInput | None:
        """The floating-point operand that was given as this argument."""
        return next((operand for operand in self.inputs if operand.path in which), None)

    def gradient_factor(self, operand: int) -> float:
        """The factor of the gradient of operand 0 or 1 where branch and skip separate."""
        weight = 1.0 if operand == self.skip else self.tau
        return weight / math.sqrt(1 + self.tau**2)


@dataclass(eq=False)
class History:
    """The calls of a forward, and its values.

    ``residuals`` are the calls that are residual additions, ``readers`` the edges that read values.
    """

    calls: list[ModelCall] = field(default_factory=list, init=False)
    values: list[Value] = field(default_factory=list, init=False)
    residuals: list[int] = field(default_factory=list, init=False)
    readers: dict[int, list[Edge]] = field(default_factory=lambda: defaultdict(list), init=False)

    def leaf(self, parameter: str | None, is_trained: bool) -> int:
        """The number of a tensor that no call has returned; arguments as of `Value`."""
        is_learned = parameter is not None
        return self._add(
            is_learned=is_learned,
            has_parameters=is_learned,
            parameter=parameter,
            is_trained=is_trained,
        ).number

    def _add(self, **fields: Any) -> Value:
        number = len(self.values)
        self.values.append(Value(number, **{"terms": 1 << number, **fields}))
        return self.values[-1]

    def add_result(self, is_new_signal: bool) -> int:
        """The number of a new value that the last call has returned.

        ``is_new_signal`` says whether it counts as a signal of its own, and not as plain arithmetic
        of the operands.
        """
        call = self.calls[-1]
        sources = [operand.value for operand in call.inputs]
        of_learned = bool(sources) and not call.reads_integers
        new = self._add(
            origins=_union(value.origins | 1 << value.number for value in sources),
            is_learned=of_learned and all(value.is_learned for value in sources),
            has_parameters=any(value.has_parameters for value in sources),
            call=len(self.calls) - 1,
        )
        if sources and not is_new_signal:
            new.terms = _union(value.terms for value in sources)
        if may_contract_activations(call.function):
            new.is_scores = all(value.parameter is None for value in sources)
        elif not is_new_signal or call.function is torch.add:
            new.is_scores = any(value.is_scores for value in sources)
        call.outputs.append(new)
        return new.number

    def classify(self, call: ModelCall, is_plain: bool) -> None:
        """Set the role of an addition; ``is_plain``: of operands of one shape, with alpha 1."""
        left, right = (call.operand(operand) for operand in BOTH_INPUTS)
        if left is None or right is None or _is_kept(left, right):
            return
        call.role = SUM
        operands = (left.value, right.value)
        if is_plain:
            # The nearest value at which the two part.
            for roots in zip_longest(*[self._stream(value) for value in operands]):
                for skip, root in enumerate(roots):
                    if root is not None and operands[1 - skip].origins >> root & 1:
                        call.role, call.skip, call.root = RESIDUAL, skip, root
                        return

    def _stream(self, value: Value) -> Iterator[int]:
        """A value, and the inputs of the residual layers that it is the result of."""
        while True:
            yield value.number
            call = None if value.call is None else self.calls[value.call]
            skip = call.operand(BOTH_INPUTS[call.skip]) if call and call.role == RESIDUAL else None
            if skip is None:
                return
            value = skip.value


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _is_kept(left: CallInput, right: CallInput) -> bool:
    if any(operand.value.is_learned and operand.dims <= 1 for operand in (left, right)):
        return True
    pairs = ((left.value, right.value), (right.value, left.value))
    return bool(left.value.terms & right.value.terms) or any(
        scores.is_scores
        and scores.has_parameters
        and not mask.has_parameters
        and not scores.origins >> mask.number & 1
        for scores, mask in pairs
    )


def name_of(function: Any) -> str:
    """A function's name, one for a method and its operator: ``mul`` for ``Tensor.__mul__``."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name == "__get__" else name.rstrip("_").removeprefix("__") or name


def is_in_place(function: Any) -> bool:
    """Whether a function leaves its result in its first operand."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def is_alias(function: Any) -> bool:
    """Whether a function returns its first operand in another view, shape or precision."""
    return name_of(function) in _ALIASES and not is_in_place(function)


# torch.compile calls them while it traces and takes their results for constants.
for _function in (is_in_place, is_alias):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
