r"""Factors of gradients that follow from a whole forward: residual branches and cut edges.

**Residual branches.** A residual layer adds its branch ``f(x)`` to the skip ``x`` with relative
weight ``tau``: ``y = (tau f(x) + x) / sqrt(1 + tau**2)``. Gradients inside the branch must have
unit scale too. So the branch's gradient is multiplied by ``tau / sqrt(1 + tau**2)`` at the
beginning of the branch, not at its end, where `U.residual_add` multiplies only in forward (unit
scaling, arXiv 2303.11257, section 4; u-muP, arXiv 2407.17465, appendix G; `U.residual_split`). With

    branch factor  b = tau / sqrt(1 + tau**2)        skip factor  s = 1 / sqrt(1 + tau**2)

every edge from ``x`` into the branch multiplies its gradient by ``b``, the edge to the addition by
``s``. Several residual layers may begin at one ``x``, nested or side by side. An edge then carries
the product of the factors of all additions on its way, as splits of splits would compute::

    y = x + i(x);  z = x + w(y)              edge to i: b_y b_z   to y: s_y b_z   to z: s_z
    z = x + a(x) + m(x)  (y = x + a(x))      edge to a: b_y s_z   to y: s_y s_z   to m: b_z

An activation that does not descend from ``x`` may enter the branch too, as the encoder's output
enters the attention of a decoder layer. Its edges carry the same factors (`_Branches.side_edges`).

If two ways from one edge ask for different factors, no factor of the edge is right; the addition
that brings the conflict is then a plain sum (`has_conflict`). ``x + a(n(x)) + m(n(x))``, where
``n`` is on both ways, has no conflict: by the rule for ``tau`` ``b_y s_z = b_z``.

**Cut edges.** On an edge that every path takes, the factor of the gradient may differ from the
factor in forward: all gradients behind the edge are multiplied by one number. On any other edge a
different factor would change the relative weights of the paths, so a constraint makes the forward
and backward factors equal. The edges of the first kind are the bridges of the undirected graph of
calls (unit scaling, section 4: cut-edges). Edges from parameters end in a leaf, so each is a
bridge; a parameter that is used twice is treated as two. All results of the model have edges to one
more node, which stands for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import networkx  # type: ignore[import-untyped]

from float8.unit_scaling.transforms.history import BOTH_INPUTS, RESIDUAL, Edge, History, Value

LOSS = -1  # the node of the loss in the graph of calls


def has_conflict(history: History, number: int) -> bool:
    """Whether the last residual addition asks for another factor than the ones before it."""
    factors = _Branches(history.calls[number].root, history).edges().values()
    return any(math.isnan(factor) for factor in factors)


def branch_factors(history: History, results: Sequence[int]) -> dict[Edge, float]:
    """The edges that multiply their gradients, with the factors.

    ``history`` has the calls so far; ``results`` are the values that the model returns.
    """
    factors: dict[Edge, float] = {}
    for root in dict.fromkeys(history.calls[n].root for n in history.residuals):
        branches = _Branches(root, history)
        for edge, factor in (branches.edges() | branches.side_edges(set(results))).items():
            factors[edge] = factors.get(edge, 1.0) * factor
    return factors


class _Branches:
    """The edges from one value, and from others, into the residual layers that begin at it.

    ``after[n]`` is the factor on all ways that leave call n and reach such a layer: None if none
    does, NaN if two of them ask for different factors.
    """

    def __init__(self, root: int, history: History) -> None:
        self.root, self.history, self.calls = root, history, history.calls
        start = history.values[root].call
        self.first = 0 if start is None else start + 1
        self.last = max(n for n in history.residuals if self.calls[n].root == root)
        self.after: dict[int, float | None] = {}
        for number in range(self.last, self.first - 1, -1):
            factors = [f for edge in self._readers(number) if (f := self.factor(edge)) is not None]
            agreed = all(math.isclose(f, factors[0], rel_tol=1e-9) for f in factors)
            self.after[number] = (factors[0] if agreed else math.nan) if factors else None

    def _readers(self, number: int) -> list[Edge]:
        """The edges that read the results of a call."""
        outputs = self.calls[number].outputs
        return [edge for value in outputs for edge in self.history.readers.get(value.number, ())]

    def factor(self, edge: Edge) -> float | None:
        """The factor on all ways that begin with an edge, None and NaN as in ``after``."""
        number, path = edge
        if number > self.last:
            return None
        call, after = self.calls[number], self.after[number]
        if call.role != RESIDUAL or call.root != self.root:
            return after
        own = call.gradient_factor(int(path not in BOTH_INPUTS[0]))
        return own if after is None else own * after

    def edges(self) -> dict[Edge, float]:
        """The edges that read the root, each with its factor."""
        edges = self.history.readers.get(self.root, ())
        return {edge: f for edge in edges if (f := self.factor(edge)) is not None}

    def side_edges(self, returned: Set[int]) -> dict[Edge, float]:
        """The edges by which other activations than the root enter its branches.

        An edge is moved up over a call if all edges that read the call's results have its factor:
        weights on the way then have gradients of unit scale. ``returned`` are the model's results.
        """
        found: dict[Edge, float] = {}
        writers: set[int] = set()

        def enter(number: int, path: tuple[object, ...], value: Value, factor: float) -> None:
            found[number, path] = factor
            if value.call is not None:
                writers.add(value.call)

        for number in range(self.first, self.last):
            if not any(map(self._descends, self.calls[number].outputs)):
                continue
            for operand in self.calls[number].inputs:
                factor = self.factor((number, operand.path))
                is_side = not (operand.value.is_learned or self._descends(operand.value))
                # Where ways ask for different factors, no factor of the edge is right.
                if is_side and factor is not None and not math.isnan(factor):
                    enter(number, operand.path, operand.value, factor)
        while writers:
            writer = max(writers)  # its readers have been moved already
            writers.remove(writer)
            edges, outputs = self._readers(writer), self.calls[writer].outputs
            factors = {found.get(edge) for edge in edges}
            factor = factors.pop() if len(factors) == 1 else None
            if factor is None or returned & {value.number for value in outputs}:
                continue
            for edge in edges:
                del found[edge]
            for operand in self.calls[writer].inputs:
                if not operand.value.is_learned:
                    enter(writer, operand.path, operand.value, factor)
        return found

    def _descends(self, value: Value) -> bool:
        return value.number == self.root or bool(value.origins >> self.root & 1)


def calls_on_cut_edges(history: History, results: Sequence[int]) -> set[int]:
    """The numbers of the calls after all residual layers whose activations come over bridges.

    ``history`` is that of a whole forward; ``results`` are the values that the model returns.
    """
    before = _before_residuals(history)

    def node(value: Value) -> int:
        """The node that computed a value; what comes before a residual layer is one node."""
        for place, values in enumerate(before):
            if values >> value.number & 1:
                return LOSS - 1 - 2 * place
        return LOSS - 2 - 2 * value.number if value.call is None else value.call

    after = [
        number
        for number, call in enumerate(history.calls)
        if not any(values >> v.number & 1 for values in before for v in call.outputs)
    ]
    inputs = [(n, x.value) for n in after for x in history.calls[n].inputs]
    links = [(n, node(value)) for n, value in inputs if not value.is_learned]
    links += [(LOSS, node(history.values[number])) for number in results]
    bridges = set(networkx.bridges(networkx.MultiGraph(links)))
    return set(after) - {a for a, b in links if not bridges & {(a, b), (b, a)}}


def _before_residuals(history: History) -> list[int]:
    """The values before residual layers and their results, as bits: connected parts of a graph."""
    learned = sum(1 << value.number for value in history.values if value.is_learned)
    parts: list[int] = []
    for number in history.residuals:
        part = 0
        for value in history.calls[number].outputs:
            part |= (value.origins & ~learned) | 1 << value.number
        for other in [p for p in parts if p & part]:
            parts.remove(other)
            part |= other
        parts.append(part)
    return parts
