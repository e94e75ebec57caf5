"""Which calls may scale their gradients freely.

A factor for the gradient that differs from the factor forward is harmless on an edge of the
computation that every path takes: all that lies behind has its gradient multiplied by the same
number. On any other edge it changes how much one path counts against another, so that forward and
backward factors have to be equal there: that is what a constraint is for. The edges of the first
kind are the bridges of the graph of calls, taken without directions (unit scaling, arXiv
2303.11257, section 4: cut-edges). Edges from parameters end in a leaf, hence each is a bridge:
the gradient of a weight has its own factor anyway; a parameter that is used twice is taken for two.

`cut_edges` finds the calls all of whose activations come over bridges. The model's results meet in
one more node, the loss that will be computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable

from float8.unit_scaling.transforms.recording import Call, Value

LOSS = -1


def calls_on_cut_edges(calls: list[Call], results: Iterable[Value]) -> set[int]:
    """The calls (indices) whose activations all come over bridges of the graph.

    Args:
        calls: what `recording.Recorder` wrote.
        results: the values that the model returns.
    """
    links: list[tuple[int, int]] = []  # (reader, writer); inputs are written by nodes below LOSS
    for index, call in enumerate(calls):
        links += [(index, _writer(v)) for _, v in call.inputs if not v.learned]
    links += [(LOSS, _writer(v)) for v in results]
    free = set(range(len(calls)))
    for edge in set(range(len(links))) - bridges(links):
        free.discard(links[edge][0])
    return free


def _writer(value: Value) -> int:
    return LOSS - 1 - value.number if value.call is None else value.call


def bridges(links: list[tuple[int, int]]) -> set[int]:
    """The edges (indices) of an undirected multigraph without which it falls apart further.

    Tarjan's algorithm (1974): walk depth first, number nodes as they are met, and let ``low`` be
    the least number that a node's descendants reach by an edge off the walk. The edge into a node
    is a bridge if ``low`` of the node is its own number.
    """
    neighbours: dict[int, list[tuple[int, int]]] = {}
    for edge, (a, b) in enumerate(links):
        neighbours.setdefault(a, []).append((b, edge))
        neighbours.setdefault(b, []).append((a, edge))
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    found: set[int] = set()
    for start in list(neighbours):
        if start in number:
            continue
        number[start] = low[start] = len(number)
        walk = [(start, -1, iter(neighbours[start]))]
        while walk:
            node, came_by, rest = walk[-1]
            for other, edge in rest:
                if edge == came_by:
                    continue
                if other in number:
                    low[node] = min(low[node], number[other])
                    continue
                number[other] = low[other] = len(number)
                walk.append((other, edge, iter(neighbours[other])))
                break
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    low[parent] = min(low[parent], low[node])
                    if low[node] == number[node]:
                        found.add(came_by)
    return found
