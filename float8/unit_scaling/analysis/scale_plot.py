"""`plot`: the scales of a model's tensors against the ranges of float8 formats.

Each tensor of the graph has a row, in the order of the calls. One dot marks the scale of the
tensor; a dot of another colour marks the scale of its gradient. Weights have triangles instead of
dots. The faint line through a dot reaches from the smallest to the largest magnitude. Arrows go
from each tensor to those computed from it, forward and backward.

The horizontal axis is logarithmic. The background shows the two formats, each in the colour of the
pass that uses it. It is shaded where a format overflows, beyond its largest value, and where it
underflows, below its smallest subnormal one. The dashed line marks its smallest normal value, below
which it loses bits. A tensor suits float8 if its whole line lies between the shaded parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx import Graph, Node

from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.transforms.metrics import Metrics
from float8.unit_scaling.transforms.prune import prune_non_float_tensors, prune_same_scale_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

E4M3, E5M2 = FPFormat(4, 3, "nearest"), FPFormat(5, 2, "nearest")
_COLOURS = {"fwd": "tab:blue", "bwd": "tab:orange"}
_PASSES = {"fwd": "forward pass", "bwd": "backward pass"}


class _Tensor(NamedTuple):
    """A dot: one direction of one node."""

    node: Node
    direction: str
    row: int
    value: float
    data: Metrics.Data

    @property
    def is_shown(self) -> bool:
        return math.isfinite(self.value) and self.value > 0


def plot(
    g: Graph,
    title: str = "",
    metric: str = "mean_abs",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    show_zero_tensors: bool = False,
    xmin: float | None = None,
    xmax: float | None = None,
    fwd_format: FPFormat | None = E4M3,
    bwd_format: FPFormat | None = E5M2,
) -> Axes:
    """Plot the scales of a graph against the ranges of the formats.

    Args:
        g: as ``model.scales_graph()`` returns it. Integer tensors are left out.
        title: above the plot.
        metric: one of `Metrics.names`, or its long name.
        prune_same_scale: leave out views of other tensors.
        show_arrows: from each tensor to those computed from it.
        show_error_bars: from the smallest to the largest magnitude.
        show_zero_tensors: write "0" for tensors that are all zero, and "nan" for tensors that are
            not finite, at the left end.
        xmin, xmax: the ends of the axis; if None, the axis shows all dots and formats.
        fwd_format, bwd_format: the ranges to show; None for none.

    Returns:
        the axes of a new figure, which is not shown in a window: call
        ``axes.figure.savefig(...)``, or end a notebook's cell with ``axes.figure``.

    Raises:
        ValueError: the metric is unknown; the ends are not a positive range; or the graph is not
            from `track_scales`, or has no tensor to show.
        ImportError: matplotlib is not installed.
    """
    metric = _metric(metric)
    g = prune_non_float_tensors(g)
    g = prune_same_scale_tensors(g) if prune_same_scale else g
    tensors = _tensors(g, metric)
    if not tensors:
        raise ValueError("the graph has no floating-point tensor: call the model before plotting")
    formats = {"fwd": fwd_format, "bwd": bwd_format}
    ranges = {d: f for d, f in formats.items() if f is not None and metric != "numel"}
    low, high = _limits(tensors, ranges, xmin, xmax)
    axes = _axes(g, title, metric, low, high)
    for direction, fmt in ranges.items():
        _draw_range(axes, direction, fmt, low, high)
    if show_error_bars and metric != "numel":
        for tensor in tensors:
            _draw_bar(axes, tensor, low)
    if show_arrows:
        _draw_arrows(axes, tensors)
    _draw_dots(axes, tensors)
    if show_zero_tensors:
        _draw_zeros(axes, tensors, low)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize=8)
    return axes


def _metric(name: str) -> str:
    names = dict(zip(Metrics.full_names(), Metrics.names(), strict=True))
    short = names.get(name, name)
    Metrics.get_full_name(short)  # raises for another name
    return short


def _tensors(g: Graph, metric: str) -> list[_Tensor]:
    found = []
    for row, node in enumerate(n for n in g.nodes if n.op != "output"):
        for direction in _COLOURS:
            data = getattr(node.meta["metrics"], direction)
            if data is not None:
                found.append(_Tensor(node, direction, row, getattr(data, metric), data))
    return found


def _limits(
    tensors: list[_Tensor], ranges: dict[str, FPFormat], xmin: float | None, xmax: float | None
) -> tuple[float, float]:
    values = [t.value for t in tensors if t.is_shown]
    values += [f.min_absolute_subnormal / 4 for f in ranges.values()]
    values += [f.max_absolute_value * 4 for f in ranges.values()]
    values = values or [1.0]
    low = min(values) / 2 if xmin is None else xmin
    high = max(values) * 2 if xmax is None else xmax
    if not 0 < low < high:
        raise ValueError(f"xmin={low:g}, xmax={high:g}: the axis is logarithmic, 0 < xmin < xmax")
    return low, high


def _axes(g: Graph, title: str, metric: str, low: float, high: float) -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot draws with matplotlib: pip install matplotlib") from error
    names = [node.meta["clean_name"] for node in g.nodes if node.op != "output"]
    figure = Figure(figsize=(11, 2 + len(names) / 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.xaxis.set_ticks_position("top")
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(Metrics.get_full_name(metric))
    axes.grid(axis="y", alpha=0.3)
    if title:
        axes.set_title(title, fontweight="bold")
    return axes


def _draw_range(axes: Axes, direction: str, fmt: FPFormat, low: float, high: float) -> None:
    name = str(fmt).partition("-")[0]
    colour = _COLOURS[direction]
    label = f"{name} over- or underflows"
    for start, end in (
        (low, min(fmt.min_absolute_subnormal, high)),
        (max(fmt.max_absolute_value, low), high),
    ):
        if start < end:
            axes.axvspan(start, end, color=colour, alpha=0.15, lw=0, label=label)
            label = "_"  # one entry in the legend
    marks = {
        "min": fmt.min_absolute_subnormal,
        "min normal": fmt.min_absolute_normal,
        "max": fmt.max_absolute_value,
    }
    for what, value in marks.items():
        if not low <= value <= high:
            continue
        if what == "min normal":
            axes.axvline(value, color=colour, ls="--", lw=0.8, alpha=0.7)
        axes.text(
            value, -0.01, f"{name} {what} ", rotation=90, va="top", ha="center", fontsize=7,
            color=colour, transform=axes.get_xaxis_transform(),
        )  # fmt: skip


def _draw_bar(axes: Axes, tensor: _Tensor, low: float) -> None:
    start, end = tensor.data.abs_min, tensor.data.abs_max
    if not (math.isfinite(end) and end > 0):
        return
    y = tensor.row + (-0.12 if tensor.direction == "fwd" else 0.12)
    axes.plot([max(start, low), end], [y, y], color=_COLOURS[tensor.direction], lw=1, alpha=0.4)


def _draw_arrows(axes: Axes, tensors: list[_Tensor]) -> None:
    shown = {(t.node, t.direction): t for t in tensors if t.is_shown}
    for tensor in shown.values():
        for source in tensor.node.all_input_nodes:
            other = shown.get((source, tensor.direction))
            if other is None:
                continue
            start, end = (other, tensor) if tensor.direction == "fwd" else (tensor, other)
            style = {"arrowstyle": "->", "color": _COLOURS[tensor.direction], "alpha": 0.5}
            axes.annotate(
                "", xy=(end.value, end.row), xytext=(start.value, start.row), arrowprops=style,
                annotation_clip=True,
            )  # fmt: skip


def _draw_dots(axes: Axes, tensors: list[_Tensor]) -> None:
    for direction, colour in _COLOURS.items():
        for is_weight, marker, what in ((False, "o", "tensor"), (True, "v", "weight")):
            chosen = [
                t
                for t in tensors
                if t.is_shown
                and t.direction == direction
                and t.node.meta["requires_grad"] == is_weight
            ]
            if chosen:
                axes.plot(
                    [t.value for t in chosen], [t.row for t in chosen], marker, color=colour,
                    ms=5, label=f"{_PASSES[direction]}, {what}",
                )  # fmt: skip


def _draw_zeros(axes: Axes, tensors: list[_Tensor], low: float) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "clip_on": True}
    for tensor in tensors:
        if not tensor.is_shown:
            text = f"{tensor.value:.3g}"
            side = "left" if tensor.direction == "fwd" else "right"
            colour = _COLOURS[tensor.direction]
            x = low * (1.2 if side == "left" else 2.5)
            axes.text(x, tensor.row, text, ha=side, color=colour, **style)
