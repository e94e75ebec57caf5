"""Where a model's tensors lie in the range of a format, as a table, a plot or annotated code.

    graph_to_dataframe   the metrics of every tensor, row by row
    plot                 every tensor's scale, and the ranges of E4M3 and E5M2
    visualiser           a batch of text, a tracked training step and `plot`, in one call
    analyse_module       the calls of a module, each line with the scales of its result
    operand_table        what a cast with scale 1 would lose of every linear layer's operands

The first four read the graph that ``model.scales_graph()`` returns, of a model that
`float8.unit_scaling.transforms.track_scales` returned; the table takes any model. Matplotlib and
pandas are imported when they are needed; neither is needed for the rest.
"""

from __future__ import annotations

from float8.unit_scaling.analysis.annotate import analyse_module
from float8.unit_scaling.analysis.graphs import (
    example_batch,
    graph_to_dataframe,
    plot,
    visualiser,
)
from float8.unit_scaling.analysis.operands import format_operands, operand_table

__all__ = [
    "analyse_module",
    "example_batch",
    "format_operands",
    "graph_to_dataframe",
    "operand_table",
    "plot",
    "visualiser",
]
