"""A plot shows every scale and the ranges of the formats at the right positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis.scale_plot import plot
from float8.unit_scaling.transforms.prune import prune_non_float_tensors
from float8.unit_scaling.transforms.track_scales import track_scales

pytest.importorskip("matplotlib")
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x):
        h = F.relu(self.up(x)).view(-1)
        return h * 0.0, h.argmax(), h.square().sum()


@pytest.fixture(scope="module")
def graph():
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


def bands(axes):
    """Where the bands of a format begin and end: the normal range, then the subnormal one."""
    found = {}
    for band in axes.collections:
        if band.get_label().startswith("_E"):
            box = band.get_datalim(axes.transData)
            found.setdefault(band.get_label()[1:], []).append((box.x0, box.x1))
    return found


def bars(axes):
    return sorted(
        (p.get_x(), p.get_x() + p.get_width()) for p in axes.patches if isinstance(p, Rectangle)
    )


def texts(axes):
    return [text.get_text() for text in axes.texts if not isinstance(text, Annotation)]


def test_bands_show_where_the_formats_keep_all_bits_and_some(graph):
    axes = plot(graph, xmin=2**-20, xmax=2**20)
    e4m3, e5m2 = [(2**-6, 448), (2**-9, 2**-6)], [(2**-14, 57344), (2**-16, 2**-14)]
    assert bands(axes) == {"E4M3": e4m3, "E5M2": e5m2}
    assert bars(axes) == sorted(e4m3 + e5m2)
    assert texts(axes) == ["E5M2", "E4M3"]
    cut = plot(graph, xmin=2**-8, xmax=2**8, bwd_format=None)
    assert bands(cut) == {"E4M3": e4m3}
    assert bands(plot(graph, metric="numel")) == {}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return (x + self.branch(self.norm(x))).square()


def test_a_row_per_layer_has_all_its_tensors():
    torch.manual_seed(1)
    model = track_scales(nn.Sequential(Block()))
    model(torch.randn(4, 8)).sum().backward()
    graph = model.scales_graph()
    by_tensor, by_layer = plot(graph), plot(graph, rows="layers")
    names = [name.partition(": ")[0] for name in rows(by_layer)]
    assert names == ["input_1", "0.norm", "0.branch.0", "0.branch.1", "0.branch.2", "0"]
    assert rows(by_layer)[5] == "0: square"  # a module's own calls, after those of its parts
    for direction in ("forward", "backward"):
        values = [
            sorted(value for _, value in dots(axes)[direction]) for axes in (by_tensor, by_layer)
        ]
        assert values[0] == values[1]
    of_weight = next(n for n in graph.nodes if n.name.endswith("branch_0_weight"))
    assert (2, of_weight.meta["metrics"].fwd.mean_abs) in dots(by_layer)["forward"]
    ends = [(int(a.xyann[1]), int(a.xy[1])) for a in arrows(by_layer)]
    assert (1, 2) in ends and (2, 1) in ends
    assert all(start != end for start, end in ends)


def arrows(axes):
    return [t for t in axes.texts if isinstance(t, Annotation) and t.arrow_patch is not None]


def test_what_cannot_be_plotted_is_refused_by_name(graph):
    with pytest.raises(ValueError, match="'scale' is not a metric"):
        plot(graph, metric="scale")
    with pytest.raises(ValueError, match="rows='layer' must be one of 'tensors', 'layers'"):
        plot(graph, rows="layer")
    with pytest.raises(ValueError, match="0 < xmin < xmax"):
        plot(graph, xmin=-1.0)
    with pytest.raises(ValueError, match="call the model before"):
        plot(track_scales(Net()).scales_graph())


def test_zero_tensors_are_marked_on_request(graph):
    def zeros(axes):
        return [text for text in axes.texts if text.get_text() == "0"]

    assert zeros(plot(graph)) == []
    assert len(zeros(plot(graph, show_zero_tensors=True))) >= 1
