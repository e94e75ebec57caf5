"""The picture shows two models on the same axes, side by side."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch.fx import Graph

from float8.unit_scaling.transforms import prune_same_scale_tensors
from scripts import scale_plot
from scripts.training.options import options_from, parser

TINY = ["--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]


def test_it_writes_one_picture_of_two_panels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = str(Path(scale_plot.__file__).parent), tmp_path / "new" / "scales.png"
    assert scale_plot.main([*TINY, "--data", data, "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def made(*more: str) -> dict[str, Graph]:
    arguments = parser("").parse_args([*TINY, "--device", "cpu", "--layers", "1", *more])
    arguments.data = Path(scale_plot.__file__).parent
    return scale_plot.graphs(options_from(arguments))


def test_both_panels_have_the_same_rows_and_show_every_tensor() -> None:
    graphs = made()
    figure = scale_plot.draw(graphs)
    for axes, graph in zip(figure.axes, graphs.values(), strict=True):
        nodes = [n for n in prune_same_scale_tensors(graph).nodes if n.op != "output"]
        drawn = [x for line in axes.get_lines() for x in line.get_xdata()]
        shown = [n.meta["metrics"].fwd.mean_abs for n in nodes]
        shown += [n.meta["metrics"].bwd.mean_abs for n in nodes if n.meta["metrics"].bwd]
        assert sorted(drawn) == sorted(x for x in shown if x > 0)
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names[:4] == ["embedding", "norm", "q, k, v", "attention"]
    assert names[-2:] == ["head", "loss"]
    assert list(right.get_yticks()) == list(range(len(names)))
    assert left.get_xlim() == right.get_xlim()


def test_unit_scaling_brings_every_tensor_into_its_format() -> None:
    graphs = made("--width", "64", "--batch", "16")
    low = {}
    for name, graph in graphs.items():
        gradients = [n.meta["metrics"].bwd for n in graph.nodes if "metrics" in n.meta]
        low[name] = min(g.mean_abs for g in gradients if g is not None and g.mean_abs > 0)
    assert low["GPT as it is"] < 2**-14 < low["after unit_scale"]


def test_names_and_formats_are_legible_at_the_width_of_a_page() -> None:
    figure = scale_plot.draw(made())
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for axes in figure.axes for t in axes.texts] + figure.axes[0].get_yticklabels()
    assert {text.get_text() for text in texts} >= {"E4M3", "E5M2", "embedding"}
    pixels = 900 / figure.get_figwidth() / 72  # of a point
    assert min(text.get_fontsize() for text in texts) * pixels >= 11
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].get_yticklabels()]
    for one, other in itertools.pairwise(boxes):
        assert not one.overlaps(other)
    legend = figure.legends[0].get_window_extent(renderer)
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width


def test_bad_input_is_one_line() -> None:
    with pytest.raises(SystemExit, match="does not split into --heads 3"):
        scale_plot.main(["--width", "32", "--heads", "3"])
