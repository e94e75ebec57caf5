"""What an addition in a model means: residual layer, mix of signals, or part of a formula.

Unit scaling divides a sum of independent signals by the root of their number, and gives a residual
sum ``x + f(x)`` weights of its own. A formula that happens to contain a plus, the
``x * cos + rotate(x) * sin`` of rotary embeddings or the ``x + 0.044715 * x**3`` of a hand-written
gelu, must stay what it is. `kinds` tells them apart, for each addition of a recorded forward:

    KEEP      left as it is: a number, a bias vector, a mask (what is added to the argument of a
              softmax without depending on a parameter), or an addition inside a formula: both
              operands are arithmetic of one value
    RESIDUAL  one operand, the skip, is what the other, the branch, was computed from; or the sum
              of such a skip and other branches of it
    SUM       the rest: signals that are taken for independent

A value is *arithmetic* of those that it was computed from by functions that hold no parameter and
that unit scaling has no rule for. What has a rule (a product, norm, activation, softmax) makes a
new value of its own, and so do sums and residual layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from float8.unit_scaling.transforms.recording import ALIASES, Call, Value

KEEP, SUM, RESIDUAL = "keep", "sum", "residual"
ADDITIONS = (torch.add, Tensor.add_)


@dataclass(frozen=True)
class Kind:
    """What an addition is; of a residual one, which operand is the skip and what the branch reads.

    ``root`` is the value at which branch and skip part: the skip operand itself, or what came into
    the residual layer whose result it is (``x + attention(x) + mlp(x)``).
    """

    name: str
    skip: int = 0
    root: int = -1


def kinds(
    calls: list[Call],
    values: list[Value],
    has_rule: Callable[[Callable[..., Any]], bool],
    demoted: Collection[int] = (),
) -> dict[int, Kind]:
    """The kind of every addition of a recorded forward.

    Args:
        calls, values: what `recording.Recorder` wrote.
        has_rule: whether unit scaling replaces a function.
        demoted: additions (indices of calls) that are not to be taken for residual ones.

    Returns:
        index of the call -> its kind, for the calls of ``torch.add`` in any spelling.
    """
    return _Classification(calls, values, has_rule, demoted).run()


class _Classification:
    def __init__(
        self,
        calls: list[Call],
        values: list[Value],
        has_rule: Callable[[Callable[..., Any]], bool],
        demoted: Collection[int],
    ) -> None:
        self.calls, self.values, self.has_rule, self.demoted = calls, values, has_rule, demoted
        self.found: dict[int, Kind] = {}
        self.arithmetic: dict[int, frozenset[int]] = {}
        self.of_softmax = {
            value.alias
            for call in calls
            if call.name in ("softmax", "log_softmax")
            for _, value in call.inputs
        }

    def run(self) -> dict[int, Kind]:
        for index, call in enumerate(self.calls):
            if call.function in ADDITIONS:
                self.found[index] = self._kind(index, call)
            for value in call.outputs:
                self.arithmetic[value.number] = self._arithmetic(index, call, value)
        return self.found

    def _terms(self, value: Value) -> frozenset[int]:
        return self.arithmetic.get(value.number, frozenset({value.number}))

    def _arithmetic(self, index: int, call: Call, value: Value) -> frozenset[int]:
        own = frozenset({value.number})
        if index in self.found:
            mixes = self.found[index].name != KEEP
        else:
            mixes = self.has_rule(call.function) or any(v.learned for _, v in call.inputs)
        if mixes and call.name not in ALIASES:
            return own
        return frozenset().union(*(self._terms(v) for _, v in call.inputs)) or own

    def _kind(self, index: int, call: Call) -> Kind:
        left, right = call.operand(0, "input"), call.operand(1, "other")
        if left is None or right is None or self._is_kept(call, left, right):
            return Kind(KEEP)
        plain = call.arguments[1].get("alpha", 1) == 1 and left.shape == right.shape
        if plain and index not in self.demoted:
            for root, skip in self._roots(left, right):
                return Kind(RESIDUAL, skip, root)
        return Kind(SUM)

    def _is_kept(self, call: Call, left: Value, right: Value) -> bool:
        if any(v.learned and len(v.shape) <= 1 for v in (left, right)):
            return True
        if self._terms(left) & self._terms(right):
            return True
        read_by_softmax = any(v.alias in self.of_softmax for v in call.outputs)
        return read_by_softmax and self._is_learned(left) != self._is_learned(right)

    def _is_learned(self, value: Value) -> bool:
        return value.learned or any(self.values[o].learned for o in value.origins)

    def _roots(self, left: Value, right: Value) -> Iterator[tuple[int, int]]:
        """Where branch and skip part, and which operand is the skip; the nearest first."""
        operands = (left, right)
        streams = [self._stream(left), self._stream(right)]
        for depth in range(max(map(len, streams))):
            for skip, stream in enumerate(streams):
                if depth < len(stream) and stream[depth] in operands[1 - skip].origins:
                    yield stream[depth], skip

    def _stream(self, value: Value) -> list[int]:
        """A value, and what came into the residual layers that it is the result of."""
        found = [value.alias]
        while (call := self.values[found[-1]].call) is not None:
            kind = self.found.get(call)
            if kind is None or kind.name != RESIDUAL:
                break
            name = ("input", "other")[kind.skip]
            skip = self.calls[call].operand(kind.skip, name)
            assert skip is not None
            found.append(skip.alias)
        return found
