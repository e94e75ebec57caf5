"""Tables, plots and annotated code have the numbers of the graph and the calls of the module."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis import analyse_module, graph_to_dataframe, plot
from float8.unit_scaling.transforms import Metrics, prune_non_float_tensors, track_scales

# --- tables


def tracked(backward=True):
    torch.manual_seed(1)
    model = track_scales(nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()))
    y = model(torch.randn(4, 5))
    if backward:
        y.backward(torch.randn(4, 3))
    return model.scales_graph()


def test_each_tensor_has_two_rows_in_the_order_of_the_calls(monkeypatch):
    graph = tracked()
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    rows = graph_to_dataframe(graph)
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


def test_rows_are_a_dataframe_where_pandas_is_installed(monkeypatch):
    pytest.importorskip("pandas")
    table = graph_to_dataframe(tracked(backward=False))
    assert table["mean absolute value"][table["direction"] == "bwd"].isna().all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = graph_to_dataframe(tracked(backward=False))
    assert list(table.columns) == [*rows[0]] and len(table) == len(rows)


# --- plots


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x):
        h = F.relu(self.up(x)).view(-1)
        return h * 0.0, h.argmax(), h.square().sum()


@pytest.fixture(scope="module")
def graph():
    pytest.importorskip("matplotlib")
    torch.manual_seed(1)
    model = track_scales(Net())
    model(torch.randn(4, 8))[-1].backward()
    return model.scales_graph()


def rows(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def dots(axes):
    """(row, value) of every dot of a pass, from what is drawn."""
    found = {"forward": set(), "backward": set()}
    for line in axes.get_lines():
        if " pass, " in str(line.get_label()):
            pairs = zip(line.get_ydata(), line.get_xdata(), strict=True)
            found[line.get_label().split()[0]] |= {(int(y), float(x)) for y, x in pairs}
    return found


def test_every_scale_is_a_dot_in_its_tensors_row(graph):
    axes = plot(graph, prune_same_scale=False)
    nodes = [n for n in prune_non_float_tensors(graph).nodes if n.op != "output"]
    assert rows(axes) == [n.name for n in nodes]
    expected = {"forward": set(), "backward": set()}
    for row, node in enumerate(nodes):
        metrics = node.meta["metrics"]
        if metrics.fwd.mean_abs > 0:
            expected["forward"].add((row, metrics.fwd.mean_abs))
        if metrics.bwd is not None and metrics.bwd.mean_abs > 0:
            expected["backward"].add((row, metrics.bwd.mean_abs))
    assert dots(axes) == expected
    assert axes.get_xscale() == "log"


def test_another_metric_is_drawn_by_either_name(graph):
    for name in ("std", "standard deviation"):
        assert plot(graph, metric=name).get_xlabel() == "standard deviation"
    with pytest.raises(KeyError):
        plot(graph, metric="scale")


# --- code


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList([nn.Linear(8, 24, bias=False), nn.Linear(8, 8)])
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q, k, v = self.layers[0](self.norm(x)).chunk(3, -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = torch.cat([a, a.mT.mT], 1)[..., : x.shape[1], :]
        return x + self.layers[1](y) * self.gain


def without_scales(code):
    return re.sub(r"\(-> [^)]*\)", "(..)", code)


def analysed(**kwargs):
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8)
    return analyse_module(Block(), x, torch.randn(2, 5, 8), **kwargs)


def test_the_code_is_the_calls_in_order():
    expected = """
    def forward(self, x):  x (..)
        norm_weight = self.norm.weight  (..)
        norm_bias = self.norm.bias  (..)
        layer_norm = F.layer_norm(x, (8,), weight=norm_weight, bias=norm_bias, eps=1e-05)  (..)
        layers_0_weight = self.layers[0].weight  (..)
        linear = F.linear(layer_norm, layers_0_weight, None)  (..)
        chunk = linear.chunk(3, -1)
        getitem = chunk[0]  (..)
        getitem_1 = chunk[1]  (..)
        getitem_2 = chunk[2]  (..)
        scaled_dot_product_attention = F.scaled_dot_product_attention(getitem, getitem_1, getitem_2, is_causal=True)  (..)
        getattr_1 = scaled_dot_product_attention.mT  (..)
        getattr_2 = getattr_1.mT  (..)
        cat = torch.cat([scaled_dot_product_attention, getattr_2], 1)  (..)
        getitem_3 = cat[(Ellipsis, slice(None, 5, None), slice(None, None, None))]  (..)
        layers_1_weight = self.layers[1].weight  (..)
        layers_1_bias = self.layers[1].bias  (..)
        linear_1 = F.linear(getitem_3, layers_1_weight, layers_1_bias)  (..)
        gain = self.gain  (..)
        mul = linear_1.mul(gain)  (..)
        add = torch.add(x, mul)  (..)
        return add
    """  # noqa: E501
    assert without_scales(analysed()) == textwrap.dedent(expected).strip()


def test_the_numbers_are_standard_deviations_of_tensors_and_gradients():
    torch.manual_seed(2)
    layer, x, grad = nn.Linear(6, 4), torch.randn(9, 6), torch.randn(9, 4)
    code = analyse_module(layer, x, grad)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    pairs = {
        "input_1": (x, grad @ weight),
        "weight": (weight, grad.t() @ x),
        "bias": (bias, grad.sum(0)),
        "linear": (x @ weight.t() + bias, grad),
    }
    for name, (tensor, gradient) in pairs.items():
        fwd, bwd = re.search(rf"{name}\b.*\(-> ([^,]*), <- ([^)]*)\)", code).groups()
        assert float(fwd) == pytest.approx(tensor.std().item(), rel=6e-3), name
        assert float(bwd) == pytest.approx(gradient.std().item(), rel=6e-3), name


def test_code_is_coloured_on_request():
    pytest.importorskip("pygments")
    plain, coloured = analysed(), analysed(syntax_highlight=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).strip() == plain
