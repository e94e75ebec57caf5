"""Where a model's tensors lie in the range of a format, as a table, a plot or annotated code.

    graph_to_dataframe   the metrics of every tensor, row by row
    plot                 every tensor's scale, and the ranges of E4M3 and E5M2
    visualiser           a batch of text, a tracked training step and `plot`, in one call
    analyse_module       the calls of a module, each line with the scales of its result

They read the graph that ``model.scales_graph()`` returns, of a model that
`float8.unit_scaling.transforms.track_scales` returned. Matplotlib and pandas are imported when they
are needed; neither is needed for the rest. What casts with scale 1 lose of a model's operands,
`float8.inspect` shows of ``transforms.float8(model, "unit")``.
"""

from __future__ import annotations

from float8.unit_scaling.analysis.annotate import analyse_module
from float8.unit_scaling.analysis.graphs import (
    example_batch,
    graph_to_dataframe,
    plot,
    visualiser,
)

__all__ = [
    "analyse_module",
    "example_batch",
    "graph_to_dataframe",
    "plot",
    "visualiser",
]
