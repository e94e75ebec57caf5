"""`plot`: the scales of a model's tensors against the ranges of float8 formats.

Each tensor of the graph has a row, in the order of the calls; with ``rows="layers"`` all tensors of
a layer share one. A filled dot marks the scale of a tensor, a hollow one that of its gradient, and
weights have triangles. The faint line through a dot reaches from the smallest to the largest
magnitude. Arrows go from each tensor to those computed from it, forward and backward.

The horizontal axis is logarithmic. The two bars at the top are the formats, each in the colour of
the pass that uses it, and their ranges go on below as bands. A format keeps all its bits in the
normal range and loses some of them in the subnormal range, which is paler. Outside both it
saturates, or flushes to zero. A tensor suits float8 if its whole line lies in the format's band.
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
_COLOURS = {"fwd": "#0072B2", "bwd": "#D55E00"}  # told apart with any form of colour blindness
# Of the bands: the normal range and the subnormal one. Opaque, so that the bands do not mix: the
# narrower format's lies on the wider one's.
_TINTS = {"fwd": ("#d3e6f2", "#e6f1f8"), "bwd": ("#fae3d4", "#fdf2ea")}
_BARS = {"fwd": -2.1, "bwd": -1.3}  # where the formats' bars are, in rows
_BAR, _TOP = 0.7, -2.55  # how high a bar is, and where the rows end
_FONT = 9
ROWS = ("tensors", "layers")
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
    rows: str = "tensors",
    axes: Axes | None = None,
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
        rows: "tensors" for a row per tensor; "layers" for one per layer, which is shorter.
        axes: where to draw, to compare several models in one figure, with a legend of its own; if
            None, a new figure with a legend is made.

    Returns:
        the axes. A new figure is not shown in a window: call ``axes.figure.savefig(...)``, or end a
        notebook's cell with ``axes.figure``.

    Raises:
        ValueError: the metric or ``rows`` is unknown; the ends are not a positive range; or the
            graph is not from `track_scales`, or has no tensor to show.
    """
    long = dict(zip(Metrics.full_names(), Metrics.names(), strict=True))
    metric = long.get(metric, metric)
    label = Metrics.get_full_name(metric)
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r} must be one of {', '.join(map(repr, ROWS))}")
    g = prune_non_float_tensors(g)
    g = prune_same_scale_tensors(g) if prune_same_scale else g
    names, places = _rows([n for n in g.nodes if n.op != "output"], rows == "layers")
    tensors = _tensors(places, metric)
    if not tensors:
        raise ValueError("the graph has no floating-point tensor: call the model before plotting")
    formats = {"fwd": fwd_format, "bwd": bwd_format}
    ranges = {d: f for d, f in formats.items() if f is not None and metric != "numel"}
    low, high = _limits(tensors, ranges, xmin, xmax)
    is_new = axes is None
    axes = _new_axes(len(names)) if axes is None else axes
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.set_ylim(len(names) - 0.5, _TOP if ranges else -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=_FONT)
    axes.tick_params(axis="x", labelsize=_FONT, top=True, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(label, fontsize=_FONT)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(title, fontweight="bold")
    for order, direction in enumerate(sorted(ranges, key=lambda d: -_width(ranges[d]))):
        _draw_range(axes, direction, ranges[direction], len(names), order)
    if show_error_bars and metric != "numel":
        _draw_bars(axes, tensors, low)
    if show_arrows:
        _draw_arrows(axes, tensors)
    _draw_dots(axes, tensors)
    if show_zero_tensors:
        _draw_zeros(axes, tensors, low)
    if is_new:
        axes.figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center", ncols=4, fontsize=_FONT, frameon=False,
        )  # fmt: skip
    return axes


def _rows(nodes: list[Node], by_layer: bool) -> tuple[list[str], dict[Node, int]]:
    """The names of the rows, and each node's row.

    A layer's row has all that one module computes without a call of another in between.
    """
    paths = [node.meta.get("modules", ()) if by_layer else () for node in nodes]
    containers = {path for inside in paths for path in inside[:-1]}
    names: list[str] = []
    places: dict[Node, int] = {}
    last: object = None
    for node, path in zip(nodes, paths, strict=True):
        layer = path[-1] if path else node
        name = str(path[-1]) if path else node.meta["clean_name"]
        if path and layer in containers:  # what it computes itself, named by the last call
            name = f"{name}: {node.meta['clean_name']}"
        names[len(names) - (layer == last) :] = [name]
        places[node], last = len(names) - 1, layer
    return names, places


def _tensors(places: dict[Node, int], metric: str) -> list[_Tensor]:
    found = []
    for node, row in places.items():
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


def _new_axes(count: int) -> Axes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 + count / 4), layout="constrained")
    axes: Axes = figure.subplots()
    return axes


def _width(fmt: FPFormat) -> float:
    """How many times larger the largest value is than the smallest."""
    return fmt.max_absolute_value / fmt.min_absolute_subnormal


def _draw_range(axes: Axes, direction: str, fmt: FPFormat, count: int, order: int) -> None:
    name, y = str(fmt).partition("-")[0], _BARS[direction]
    low, normal, high = fmt.min_absolute_subnormal, fmt.min_absolute_normal, fmt.max_absolute_value
    parts = ((normal, high, 1.0), (low, normal, 0.5))
    for (start, end, alpha), tint in zip(parts, _TINTS[direction], strict=True):
        below = (y + _BAR / 2, count - 0.5)
        band = axes.fill_between((start, end), *below, color=tint, lw=0, zorder=0.1 + order / 10)
        band.set_label(f"_{name}")
        axes.barh(y, end - start, _BAR, left=start, color=_COLOURS[direction], alpha=alpha)
    axes.text(
        math.sqrt(normal * high), y, name, ha="center", va="center", color="white",
        fontsize=_FONT, fontweight="bold", clip_on=True,
    )  # fmt: skip


def _draw_bars(axes: Axes, tensors: list[_Tensor], low: float) -> None:
    for tensor in tensors:
        start, end = max(tensor.data.abs_min, low), tensor.data.abs_max
        if math.isfinite(end) and end > 0:
            y = tensor.row + (-0.12 if tensor.direction == "fwd" else 0.12)
            axes.plot([start, end], [y, y], color=_COLOURS[tensor.direction], lw=1, alpha=0.4)


def _draw_arrows(axes: Axes, tensors: list[_Tensor]) -> None:
    shown = {(t.node, t.direction): t for t in tensors if t.is_shown}
    for tensor in shown.values():
        for source in tensor.node.all_input_nodes:
            other = shown.get((source, tensor.direction))
            if other is None or other.row == tensor.row:
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
                    [t.value for t in chosen], [t.row for t in chosen], marker, color=colour, ms=6,
                    mfc=colour if direction == "fwd" else "white", mew=1.4,
                    label=f"{_PASSES[direction]}, {what}",
                )  # fmt: skip


def _draw_zeros(axes: Axes, tensors: list[_Tensor], low: float) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": _FONT, "clip_on": True}
    for tensor in tensors:
        if not tensor.is_shown:
            text = f"{tensor.value:.3g}"
            side = "left" if tensor.direction == "fwd" else "right"
            colour = _COLOURS[tensor.direction]
            x = low * (1.2 if side == "left" else 2.5)
            axes.text(x, tensor.row, text, ha=side, color=colour, **style)
