"""A plot shows every scale and the ranges of the formats at the right positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis.scale_plot import plot
from float8.unit_scaling.formats import FPFormat
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


def test_another_metric_goes_by_either_name(graph):
    assert dots(plot(graph, metric="std")) == dots(plot(graph, metric="standard deviation"))
    assert plot(graph, metric="std").get_xlabel() == "standard deviation"
    assert dots(plot(graph, metric="std")) != dots(plot(graph))


def test_views_and_integers_are_left_out_and_views_shown_on_request(graph):
    assert "view" not in rows(plot(graph))
    assert "view" in rows(plot(graph, prune_same_scale=False))
    assert "argmax" not in rows(plot(graph, prune_same_scale=False))


def spans(axes):
    return sorted(
        (p.get_x(), p.get_x() + p.get_width()) for p in axes.patches if isinstance(p, Rectangle)
    )


def test_the_ground_is_shaded_where_the_formats_lose_values(graph):
    axes = plot(graph, xmin=2**-20, xmax=2**20)
    assert spans(axes) == sorted([(2**-20, 2**-9), (448, 2**20), (2**-20, 2**-16), (57344, 2**20)])
    texts = {text.get_text().strip(): text.get_position()[0] for text in axes.texts}
    assert texts["E4M3 max"] == 448
    assert texts["E4M3 min"] == 2**-9
    assert texts["E4M3 min normal"] == 2**-6
    assert texts["E5M2 max"] == 57344
    assert texts["E5M2 min"] == 2**-16
    assert texts["E5M2 min normal"] == 2**-14
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "E4M3 over- or underflows" in legend
    assert "forward pass, weight" in legend


def test_other_formats_and_none_can_be_shown(graph):
    axes = plot(graph, xmin=2**-8, xmax=2**8, fwd_format=FPFormat(2, 1), bwd_format=None)
    assert spans(axes) == [(2**-8, 0.5), (6.0, 2**8)]
    assert spans(plot(graph, metric="numel")) == []


def arrows(axes):
    return [t for t in axes.texts if isinstance(t, Annotation) and t.arrow_patch is not None]


def test_arrows_follow_the_data_forward_and_the_gradients_backward(graph):
    axes = plot(graph)
    names = rows(axes)
    found = {(names[int(a.xyann[1])], names[int(a.xy[1])]) for a in arrows(axes)}
    assert ("up_weight", "linear") in found
    assert ("linear", "up_weight") in found
    assert ("linear", "relu") in found
    assert ("relu", "linear") in found
    assert ("x", "up_weight") not in found
    assert arrows(plot(graph, show_arrows=False)) == []


def test_error_bars_reach_from_the_smallest_to_the_largest_magnitude(graph):
    axes = plot(graph)
    data = next(n for n in graph.nodes if n.name == "linear").meta["metrics"].fwd
    bars = [tuple(map(float, line.get_xdata())) for line in axes.get_lines()]
    low = axes.get_xlim()[0]
    assert (max(data.abs_min, low), data.abs_max) in bars
    without = plot(graph, show_error_bars=False)
    assert len(without.get_lines()) < len(axes.get_lines())


def test_zero_tensors_are_marked_on_request(graph):
    def zeros(axes):
        return [text for text in axes.texts if text.get_text() == "0"]

    assert zeros(plot(graph)) == []
    assert len(zeros(plot(graph, show_zero_tensors=True))) >= 1


def test_a_title_is_shown_and_a_picture_written(graph, tmp_path):
    axes = plot(graph, "of scales")
    assert axes.get_title() == "of scales"
    axes.figure.savefig(tmp_path / "plot.png", dpi=40)
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_what_cannot_be_plotted_is_refused_by_name(graph):
    with pytest.raises(ValueError, match="'scale' is not a metric"):
        plot(graph, metric="scale")
    with pytest.raises(ValueError, match="0 < xmin < xmax"):
        plot(graph, xmin=-1.0)
    with pytest.raises(ValueError, match="call the model before"):
        plot(track_scales(Net()).scales_graph())
