"""`graph_to_dataframe`: the scales of a graph as a table, a row for each tensor and direction.

================= ==============================================================================
column            what
================= ==============================================================================
``layer``         the name of the node
``weight tensor`` whether it is a trained parameter
``direction``     ``fwd`` for the tensor, ``bwd`` for its gradient
``tensor type``   ``x`` or ``w``, of gradients ``grad_x`` or ``grad_w``
the others        one for each of `Metrics.full_names`; None where there was no gradient
================= ==============================================================================
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.fx import Graph, Node

from float8.unit_scaling.transforms.metrics import Metrics

DIRECTIONS = ("fwd", "bwd")


def graph_to_rows(graph: Graph) -> list[dict[str, Any]]:
    """The table as dictionaries, in the order of the graph's nodes.

    Args:
        graph: as ``model.scales_graph()`` returns it, or pruned.

    Returns:
        two rows, ``fwd`` and ``bwd``, for each floating-point tensor.
    """
    nodes = [node for node in graph.nodes if "metrics" in node.meta]
    return [_row(node, direction) for node in nodes for direction in DIRECTIONS]


def graph_to_dataframe(g: Graph) -> Any:
    """The table as a ``pandas.DataFrame``; where pandas is not installed, as `graph_to_rows`.

    Args:
        g: as ``model.scales_graph()`` returns it, or pruned.
    """
    table = graph_to_rows(g)
    if importlib.util.find_spec("pandas") is None:
        return table
    pandas = importlib.import_module("pandas")
    columns = ["layer", "weight tensor", "direction", "tensor type", *Metrics.full_names()]
    return pandas.DataFrame(table, columns=columns)


def _row(node: Node, direction: str) -> dict[str, Any]:
    is_weight = node.meta["requires_grad"]
    data = getattr(node.meta["metrics"], direction)
    return {
        "layer": node.meta["clean_name"],
        "weight tensor": is_weight,
        "direction": direction,
        "tensor type": ("grad_" if direction == "bwd" else "") + ("w" if is_weight else "x"),
        **{Metrics.get_full_name(name): getattr(data, name, None) for name in Metrics.names()},
    }
