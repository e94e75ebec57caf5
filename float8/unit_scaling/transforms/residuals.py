r"""The gradient factors of residual layers, wherever their branches begin.

A residual layer adds its branch ``f(x)`` to the skip ``x`` with relative weight ``tau``:

    y = (tau f(x) + x) / sqrt(1 + tau**2)

Unit scaling wants gradients of unit scale inside the branch too, so it does not multiply the
branch's gradient by ``tau / sqrt(1 + tau**2)`` where the branch ends (`U.residual_add` multiplies
forward only) but where it begins (unit scaling, arXiv 2303.11257, section 4; u-muP, arXiv
2407.17465, appendix G; `U.residual_split`). With

    branch factor  b = tau / sqrt(1 + tau**2)        skip factor  s = 1 / sqrt(1 + tau**2)

every edge from ``x`` into the branch multiplies its gradient by ``b``, the edge to the addition by
``s``. A model may have more than one residual layer on one ``x``, nested or side by side. Then an
edge carries the product of the factors of all additions on its way, which is what splits of splits
would compute::

    y = x + i(x);  z = x + w(y)              edge to i: b_y b_z   to y: s_y b_z   to z: s_z
    z = x + a(x) + m(x)  (y = x + a(x))      edge to a: b_y s_z   to y: s_y s_z   to m: b_z

If two ways from one edge ask for different factors, no factor of the edge is right; the addition
that brings the conflict is then a plain sum (`conflicts`). That does not happen to
``x + a(n(x)) + m(n(x))``, where ``n`` is on both ways: by the rule for ``tau`` below
``b_y s_z = b_z``.

**tau** is that of `rules.transformer_residual_scaling_rule`, u-muP's appendix G with both of its
multipliers 1, for all residual layers of the model in the order of their additions:
``tau_i = 1 / sqrt(L/2 + i)``, whereby the stream's first value, all branches at even places and all
at odd places (a transformer's attention and feed-forward layers) contribute the same variance to
the end of the stream. With these multipliers the rule gives the ``i``-th branch the same ``tau``
whether it is attention or not. Constants such as 0.01 for attention and 0.5 for the rest, which
date from the time when tau was an interpolation weight, do not sum to any such balance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from float8.unit_scaling.rules import transformer_residual_scaling_rule
from float8.unit_scaling.transforms.recording import ALIASES, Call, History, Path


@dataclass(frozen=True)
class Residual:
    """A residual addition: its call, its skip operand, where its branch parts, its weight."""

    call: int
    skip: int
    root: int
    tau: float

    def factor(self, operand: int) -> float:
        """What the gradient of an operand is multiplied by, where the branch begins."""
        weight = 1.0 if operand == self.skip else self.tau
        return weight / math.sqrt(1 + self.tau**2)


class Conflict(Exception):
    """Two residual additions ask for different factors of one edge."""


tau_of = transformer_residual_scaling_rule()


def conflicts(history: History, found: Sequence[Residual]) -> bool:
    """Whether the last residual addition asks for another factor than the ones before it."""
    root = found[-1].root
    if all(r.root != root for r in found[:-1]):
        return False
    try:
        list(_Root(root, history, _readers(history.calls), found).edges())
    except Conflict:
        return True
    return False


def edges(history: History, found: Sequence[Residual]) -> dict[tuple[int, Path], float]:
    """The operands whose gradients are multiplied, (call, path in its arguments), and by what."""
    readers = _readers(history.calls)
    roots = dict.fromkeys(r.root for r in found)
    return {
        edge: factor
        for root in roots
        for edge, factor in _Root(root, history, readers, found).edges()
    }


Readers = dict[int, list[tuple[int, Path]]]


def _readers(calls: Sequence[Call]) -> Readers:
    readers: Readers = {}
    for index, call in enumerate(calls):
        for path, value in call.inputs:
            readers.setdefault(value.number, []).append((index, path))
    return readers


class _Root:
    """The edges from one value into its residual layers."""

    def __init__(
        self, root: int, history: History, readers: Readers, found: Sequence[Residual]
    ) -> None:
        self.calls, self.readers = history.calls, readers
        self.same = [v for v in history.values if v.alias == root]
        self.additions = {r.call: r for r in found if r.root == root}
        self.last = max(self.additions)  # calls after it lead to no other
        self.after: dict[int, float | None] = {}  # addition -> the factors of those after it

    def edges(self) -> Iterator[tuple[tuple[int, Path], float]]:
        for value in self.same:
            for call, path in self.readers.get(value.number, ()):
                if self.calls[call].name in ALIASES:
                    continue  # its result is one of these values too
                factor = self._factor([(call, path)])
                if factor is not None:
                    yield (call, path), factor

    def _factor(self, starts: list[tuple[int, Path]]) -> float | None:
        """The product of the factors on the ways that begin with these reads; None: none does."""
        agreed: float | None = None
        for call, operand in self._next_additions(starts):
            factor = self.additions[call].factor(operand)
            after = self._after(call)
            factor = factor if after is None else factor * after
            if agreed is not None and not math.isclose(factor, agreed, rel_tol=1e-9):
                raise Conflict
            agreed = factor if agreed is None else agreed
        return agreed

    def _after(self, call: int) -> float | None:
        if call not in self.after:
            outputs = self.calls[call].outputs
            starts = [read for v in outputs for read in self.readers.get(v.number, ())]
            self.after[call] = self._factor(starts)
        return self.after[call]

    def _next_additions(self, starts: list[tuple[int, Path]]) -> Iterator[tuple[int, int]]:
        """The additions of this root that are met first, and the operands by which."""
        seen: set[tuple[int, int]] = set()
        waiting = list(starts)
        while waiting:
            call, path = waiting.pop()
            if call > self.last:
                continue
            operand = 0 if path in ((0, 0), (1, "input")) else 1
            key = (call, operand if call in self.additions else 0)
            if key in seen:
                continue
            seen.add(key)
            if call in self.additions:
                yield key
                continue
            for value in self.calls[call].outputs:
                waiting += self.readers.get(value.number, ())
