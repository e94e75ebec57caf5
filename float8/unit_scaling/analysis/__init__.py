"""Where a model's tensors are in the range of a format, as a table, a plot or annotated code.

    graph_to_dataframe   the metrics of every tensor, row by row
    plot                 every tensor's scale, and the ranges of E4M3 and E5M2
    visualiser           the two steps before `plot`: a batch of text, a tracked training step
    analyse_module       what a module calls, each line with the scales of its result

All of them read the graph that ``model.scales_graph()`` returns, of a model that
`float8.unit_scaling.transforms.track_scales` returned. Matplotlib and pandas are imported when they
are needed; neither is needed for the rest.
"""

from __future__ import annotations

from float8.unit_scaling.analysis.annotate import analyse_module
from float8.unit_scaling.analysis.dataframe import graph_to_dataframe, graph_to_rows
from float8.unit_scaling.analysis.scale_plot import plot
from float8.unit_scaling.analysis.visualise import example_batch, visualiser

__all__ = [
    "analyse_module",
    "example_batch",
    "graph_to_dataframe",
    "graph_to_rows",
    "plot",
    "visualiser",
]
