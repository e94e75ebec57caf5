"""The table has a row per tensor and direction, with the graph's own numbers."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

from float8.unit_scaling.analysis import dataframe
from float8.unit_scaling.analysis.dataframe import graph_to_dataframe, graph_to_rows
from float8.unit_scaling.transforms.metrics import Metrics
from float8.unit_scaling.transforms.track_scales import track_scales


def tracked(backward=True):
    torch.manual_seed(1)
    model = track_scales(nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()))
    y = model(torch.randn(4, 5))
    if backward:
        y.backward(torch.randn(4, 3))
    return model.scales_graph()


def test_each_tensor_has_two_rows_in_the_order_of_the_calls():
    graph = tracked()
    rows = graph_to_rows(graph)
    assert [(r["layer"], r["direction"], r["tensor type"], r["weight tensor"]) for r in rows] == [
        (name, direction, kind, kind.endswith("w"))
        for name, letter in (("input_1", "x"), ("_0_weight", "w"), ("linear", "x"), ("relu", "x"))
        for direction, kind in (("fwd", letter), ("bwd", f"grad_{letter}"))
    ]
    nodes = {node.name: node for node in graph.nodes}
    for row in rows:
        data = getattr(nodes[row["layer"]].meta["metrics"], row["direction"])
        for name in Metrics.names():
            assert row[Metrics.get_full_name(name)] == getattr(data, name)


def test_pandas_is_used_where_it_is_installed(monkeypatch):
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = lambda rows, columns: ("frame", rows, columns)
    graph = tracked()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", pandas)
        patch.setattr(dataframe.importlib.util, "find_spec", lambda name: pandas)
        kind, rows, columns = graph_to_dataframe(graph)
        assert kind == "frame"
        assert rows == graph_to_rows(graph)
        assert columns == list(rows[0])
        patch.setattr(dataframe.importlib.util, "find_spec", lambda name: None)
        assert graph_to_dataframe(graph) == rows
