"""Copies of a graph of `track_scales` with fewer nodes.

The users of a removed node read its one floating-point input instead, so that the rest stays
connected; where it has no such input, or several, they read None. Metrics are shared with the given
graph, not copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from float8.unit_scaling.registry import respelt


def prune_non_float_tensors(graph: Graph) -> Graph:
    """The graph without the nodes whose result is no floating-point tensor.

    Args:
        graph: as ``model.scales_graph()`` returns it.
    """
    return _without(graph, lambda node: not node.meta["outputs_float_tensor"])


def prune_same_scale_tensors(graph: Graph, rtol: float = 2**-16) -> Graph:
    """The graph without the nodes whose tensor has the same scale as their input: views.

    A node with several floating-point inputs stays.

    Args:
        graph: as ``model.scales_graph()`` returns it.
        rtol: how far the two mean absolute values may differ, relatively, and those of the
            gradients, where there are any. Slices change them a little.
    """

    def is_same(node: Node) -> bool:
        source = _source(node)
        if source is None or not node.meta["outputs_float_tensor"]:
            return False
        old, new = (n.meta["metrics"] for n in (source, node))
        return all(
            x is y or (x and y and math.isclose(x.mean_abs, y.mean_abs, rel_tol=rtol))
            for x, y in ((old.fwd, new.fwd), (old.bwd, new.bwd))
        )

    return _without(graph, is_same)


def prune_selected_nodes(graph: Graph, targets: Iterable[Any]) -> Graph:
    """The graph without the calls of some functions.

    Args:
        graph: as ``model.scales_graph()`` returns it.
        targets: functions, ``torch.abs``; methods, ``torch.Tensor.view`` or ``"view"``; names of
            parameters.
    """
    chosen = {respelt(target) for target in targets}
    chosen |= {target.__name__ for target in chosen if _is_method(target)}
    return _without(graph, lambda node: node.target in chosen)


def _without(graph: Graph, is_pruned: Callable[[Node], bool]) -> Graph:
    graph = copy.deepcopy(graph)
    for node in list(graph.nodes):
        if node.op != "output" and is_pruned(node):
            node.replace_all_uses_with(_source(node))
            graph.erase_node(node)
    graph.lint()
    return graph


def _is_method(target: Any) -> bool:
    return callable(target) and getattr(Tensor, target.__name__, None) is target


def _source(node: Node) -> Node | None:
    """The one floating-point input of a node, if it has just one."""
    found = [n for n in node.all_input_nodes if n.meta["outputs_float_tensor"]]
    return found[0] if len(found) == 1 else None
