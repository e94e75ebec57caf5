"""Bridges, against the definition: without the edge, the graph falls apart further."""

from __future__ import annotations

import random

import pytest

from float8.unit_scaling.transforms.cut_edges import bridges, calls_on_cut_edges
from float8.unit_scaling.transforms.recording import Call, Value


def parts(nodes, links):
    """How many connected components a graph has."""
    left, count = set(nodes), 0
    while left:
        count += 1
        front = [left.pop()]
        while front:
            node = front.pop()
            for a, b in links:
                for one, other in ((a, b), (b, a)):
                    if one == node and other in left:
                        left.discard(other)
                        front.append(other)
    return count


@pytest.mark.parametrize("seed", range(30))
def test_an_edge_is_a_bridge_if_the_graph_has_more_parts_without_it(seed):
    rng = random.Random(seed)
    nodes = range(rng.randint(1, 9))
    links = [(rng.choice(nodes), rng.choice(nodes)) for _ in range(rng.randint(0, 12))]
    whole = parts(nodes, links)
    expected = {i for i in range(len(links)) if parts(nodes, links[:i] + links[i + 1 :]) > whole}
    assert bridges(links) == expected


def test_a_chain_of_ten_thousand_calls_is_no_matter_of_recursion():
    links = [(i, i + 1) for i in range(10_000)]
    assert bridges(links) == set(range(10_000))


def call(inputs, output):
    return Call("f", len, [((0, i), v) for i, v in enumerate(inputs)], outputs=[output])


def test_calls_between_two_ways_are_not_on_cut_edges_and_weights_do_not_count():
    x, w = Value(0, 0), Value(1, 1, learned=True)
    a, b, c, d = (Value(2 + i, 2 + i, call=i) for i in range(4))
    # a = f(x, w); b = f(a, w); c = f(a, w); d = f(b, c): the ways part at a
    calls = [call([x, w], a), call([a, w], b), call([a, w], c), call([b, c], d)]
    assert calls_on_cut_edges(calls, [d]) == {0}
    # returning both ways joins them in the loss
    assert calls_on_cut_edges(calls[:3], [b, c]) == {0}
    assert calls_on_cut_edges(calls[:2], [b]) == {0, 1}
