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
enters the attention of a decoder layer. Its edges carry the same factors (`_Root.side_edges`).

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

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence, Set

from float8.unit_scaling.transforms.additions import OPERANDS, Addition
from float8.unit_scaling.transforms.contractions import Path
from float8.unit_scaling.transforms.history import ALIASES, Call, History, Value

LOSS = -1  # the node of the loss in the graph of calls
Edge = tuple[int, Path]  # a call, and the path in its arguments at which it reads a value
Reads = dict[int, list[Edge]]  # value -> the edges that read it


class Conflict(Exception):
    """Two residual additions ask for different factors of one edge."""


def has_conflict(history: History, residuals: Sequence[Addition]) -> bool:
    """Whether the last residual addition asks for another factor than the ones before it."""
    root = residuals[-1].root
    if all(r.root != root for r in residuals[:-1]):
        return False
    try:
        list(_Root(root, history, _Graph(history), residuals).edges())
    except Conflict:
        return True
    return False


def branch_factors(
    history: History, residuals: Sequence[Addition], results: Sequence[Value] = ()
) -> dict[Edge, float]:
    """The edges that multiply their gradients, with the factors.

    ``residuals`` are the residual additions of the calls so far; ``results`` are the values that
    the model returns.
    """
    graph, factors = _Graph(history), dict[Edge, float]()
    returned = {value.alias for value in results}
    for root in dict.fromkeys(r.root for r in residuals):
        of_root = _Root(root, history, graph, residuals)
        for edge, factor in (*of_root.edges(), *of_root.side_edges(returned)):
            factors[edge] = factors.get(edge, 1.0) * factor
    return factors


class _Graph:
    """The edges of a history by the values that they read."""

    def __init__(self, history: History) -> None:
        self.reads: Reads = {}  # of a value itself
        self.reads_of_aliases: Reads = {}  # of a value or an alias, by calls that make no alias
        for number, call in enumerate(history.calls):
            for path, value in call.inputs:
                self.reads.setdefault(value.number, []).append((number, path))
                if call.name not in ALIASES:
                    self.reads_of_aliases.setdefault(value.alias, []).append((number, path))


class _Root:
    """The edges from one value, and from others, into the residual layers that begin at it."""

    def __init__(
        self, root: int, history: History, graph: _Graph, residuals: Sequence[Addition]
    ) -> None:
        self.root, self.history, self.calls, self.graph = root, history, history.calls, graph
        self.additions = {r.call: r for r in residuals if r.root == root}
        self.last = max(self.additions)  # calls after it lead to no other
        self.after: dict[int, float | None] = {}  # addition -> the factors of those after it

    def edges(self) -> Iterator[tuple[Edge, float]]:
        """The edges that read the root, each with its factor."""
        for edge in self.graph.reads_of_aliases.get(self.root, ()):
            factor = self._factor([edge])
            if factor is not None:
                yield edge, factor

    def side_edges(self, returned: Set[int]) -> Iterator[tuple[Edge, float]]:
        """The edges by which other activations than the root enter its branches.

        An edge is moved up over a call if all edges that read the call's results have its factor:
        weights on the way then have gradients of unit scale.
        """
        entries = dict(self._entries())
        writers = [-w for edge in entries if (w := self._base(edge).call) is not None]
        heapq.heapify(writers)  # the last call first, so that its readers have been moved already
        while writers:
            writer = -heapq.heappop(writers)
            outputs = {value.alias for value in self.calls[writer].outputs}
            edges = [e for v in outputs for e in self.graph.reads_of_aliases.get(v, ())]
            factors = {entries.get(edge) for edge in edges}
            if outputs & returned or len(factors) != 1 or None in factors:
                continue
            factor = entries[edges[0]]
            for edge in edges:
                del entries[edge]
            for path, value in self.calls[writer].inputs:
                if not value.is_learned:
                    entries[writer, path] = factor
                    if (earlier := self._base((writer, path)).call) is not None:
                        heapq.heappush(writers, -earlier)
        yield from entries.items()

    def _entries(self) -> Iterator[tuple[Edge, float]]:
        """The edges from values that do not descend from the root to calls that do."""
        start = self.history.values[self.root].call
        for number in range(0 if start is None else start + 1, self.last):
            call = self.calls[number]
            if call.name in ALIASES or not any(map(self._descends, call.outputs)):
                continue
            for path, value in call.inputs:
                if value.is_learned or self._descends(value):
                    continue
                try:
                    factor = self._factor([(number, path)])
                except Conflict:
                    continue  # the additions stay residual; no factor of this edge is right
                if factor is not None:
                    yield (number, path), factor

    def _descends(self, value: Value) -> bool:
        return value.number == self.root or bool(value.origins >> self.root & 1)

    def _base(self, edge: Edge) -> Value:
        """The value that an edge reads, or that it reads an alias of."""
        number, at = edge
        value = next(value for path, value in self.calls[number].inputs if path == at)
        return self.history.values[value.alias]

    def _factor(self, starts: list[Edge]) -> float | None:
        """The factor on all ways that begin with these reads; None if none meets an addition."""
        agreed: float | None = None
        for call, operand in self._next_additions(starts):
            factor = self.additions[call].gradient_factor(operand)
            after = self._after(call)
            factor = factor if after is None else factor * after
            if agreed is not None and not math.isclose(factor, agreed, rel_tol=1e-9):
                raise Conflict
            agreed = factor if agreed is None else agreed
        return agreed

    def _after(self, call: int) -> float | None:
        if call not in self.after:
            outputs = self.calls[call].outputs
            starts = [read for v in outputs for read in self.graph.reads.get(v.number, ())]
            self.after[call] = self._factor(starts)
        return self.after[call]

    def _next_additions(self, starts: list[Edge]) -> Iterator[tuple[int, int]]:
        """The additions of this root that are met first, each with the operand that is met."""
        seen: set[tuple[int, int]] = set()
        waiting = list(starts)
        while waiting:
            call, path = waiting.pop()
            if call > self.last:
                continue
            key = (call, int(path not in OPERANDS[0].paths) if call in self.additions else 0)
            if key in seen:
                continue
            seen.add(key)
            if call in self.additions:
                yield key
                continue
            for value in self.calls[call].outputs:
                waiting += self.graph.reads.get(value.number, ())


def calls_on_cut_edges(calls: list[Call], results: Iterable[Value]) -> set[int]:
    """The numbers of the calls whose activations all come over bridges of the graph.

    ``calls`` are those of a whole forward; ``results`` are the values that the model returns.
    """
    links: list[tuple[int, int]] = []  # (reader, writer)
    for number, call in enumerate(calls):
        links += [(number, _writer(v)) for _, v in call.inputs if not v.is_learned]
    links += [(LOSS, _writer(v)) for v in results]
    inside_cycles = set(range(len(links))) - bridges(links)
    return set(range(len(calls))) - {links[edge][0] for edge in inside_cycles}


def _writer(value: Value) -> int:
    """The node that a value comes from: its call or, for an input, one of its own below LOSS."""
    return LOSS - 1 - value.number if value.call is None else value.call


def bridges(links: list[tuple[int, int]]) -> set[int]:
    """The edges (indices) whose removal gives an undirected multigraph more components.

    Tarjan's algorithm (1974): visit the nodes depth first and number them in that order. ``low`` of
    a node is the least number that its descendants reach by an edge outside of the search tree. The
    tree edge into a node is a bridge if ``low`` of the node is its own number.
    """
    adjacent: dict[int, list[tuple[int, int]]] = {}
    for edge, (a, b) in enumerate(links):
        adjacent.setdefault(a, []).append((b, edge))
        adjacent.setdefault(b, []).append((a, edge))
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    found: set[int] = set()
    for start in list(adjacent):
        if start in number:
            continue
        number[start] = low[start] = len(number)
        walk = [(start, -1, iter(adjacent[start]))]
        while walk:
            node, came_by, rest = walk[-1]
            for other, edge in rest:
                if edge == came_by:
                    continue
                if other in number:
                    low[node] = min(low[node], number[other])
                    continue
                number[other] = low[other] = len(number)
                walk.append((other, edge, iter(adjacent[other])))
                break
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    low[parent] = min(low[parent], low[node])
                    if low[node] == number[node]:
                        found.add(came_by)
    return found
