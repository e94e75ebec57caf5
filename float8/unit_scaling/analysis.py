"""Where a model's tensors lie in the range of a format, as a table, a plot or annotated code.

The functions read the graph that ``model.scales_graph()`` returns, of a model that
`float8.unit_scaling.transforms.track_scales` returned. Matplotlib and pandas are imported when they
are needed; neither is needed for the rest. What casts with scale 1 lose of a model's operands,
`float8.inspect` shows of ``transforms.float8(model, "unit")``.

**The table** of `graph_to_dataframe` has a row for each tensor and direction:

================= ==============================================================================
column            what
================= ==============================================================================
``layer``         the name of the node
``weight tensor`` whether it is a trained parameter
``direction``     ``fwd`` for the tensor, ``bwd`` for its gradient
``tensor type``   ``x`` or ``w``, of gradients ``grad_x`` or ``grad_w``
the others        one for each of `Metrics.full_names`; None where there was no gradient
================= ==============================================================================

**The plot** has a row for each tensor, in the order of the calls. A filled dot marks the scale of a
tensor, a hollow one that of its gradient, and weights have triangles. The faint line through a dot
reaches from the smallest to the largest magnitude. Arrows go from each tensor to those computed
from it, forward and backward. The bands are the formats, each in the colour of the pass that uses
it. A format keeps all its bits in the normal range and loses some of them in the subnormal range,
which is paler. Outside both it saturates, or flushes to zero. A tensor suits float8 if its whole
line lies in the format's band.

    tracked = track_scales(model)
    loss_of(tracked, batch).backward()
    plot(tracked.scales_graph())

**The code** of `analyse_module` is the calls of a module, with the scales of its tensors beside it:

    def forward(self, x):  x (-> 1.0, <- 0.58)
        fc1_weight = self.fc1.weight  (-> 0.036, <- 16.1)
        linear = F.linear(x, fc1_weight, None)  (-> 0.577, <- 1.01)
        return linear

It is the code that ran, one call per line: loops are unrolled, and the calls of submodules are
inlined. Each line ends with the standard deviation of its result, ``->``, and of the gradient with
respect to the result, ``<-``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from float8.formats import E4M3, E5M2
from float8.unit_scaling.transforms import (
    Metrics,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["analyse_module", "graph_to_dataframe", "plot"]

# direction -> what, its format, its colour (told apart with any form of colour blindness)
_PASSES = {
    "fwd": ("forward pass", E4M3, "#0072B2"),
    "bwd": ("backward pass", E5M2, "#D55E00"),
}


def graph_to_dataframe(g: Graph) -> Any:
    """The table as a ``pandas.DataFrame``; where pandas is not installed, as a list of dicts.

    Args:
        g: as ``model.scales_graph()`` returns it, or pruned.
    """
    rows = []
    for node in g.nodes:
        metrics, kind = node.meta.get("metrics"), "w" if node.meta["requires_grad"] else "x"
        for direction in _PASSES if metrics else ():
            data = getattr(metrics, direction)
            first = {
                "layer": node.meta["clean_name"],
                "weight tensor": node.meta["requires_grad"],
                "direction": direction,
                "tensor type": f"grad_{kind}" if direction == "bwd" else kind,
            }
            numbers = [getattr(data, name, None) for name in Metrics.names()]
            rows.append(first | dict(zip(Metrics.full_names(), numbers, strict=True)))
    try:
        from pandas import DataFrame  # type: ignore[import-untyped]
    except ImportError:
        return rows
    return DataFrame(rows)


def plot(
    g: Graph,
    title: str = "",
    metric: str = "mean_abs",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    axes: Axes | None = None,
) -> Axes:
    """Plot the scales of a graph against the ranges of the formats E4M3 and E5M2.

    Args:
        g: as ``model.scales_graph()`` returns it. Integer tensors are left out, and of other
            tensors the scales that are 0 or not finite.
        title: above the plot.
        metric: one of `Metrics.names`, or its long name.
        prune_same_scale: leave out views of other tensors.
        show_arrows: from each tensor to those computed from it.
        show_error_bars: from the smallest to the largest magnitude.
        axes: where to draw, to compare several models in one figure; if None, a new figure with a
            legend is made.

    Returns:
        the axes. A new figure is not shown in a window: call ``axes.figure.savefig(...)``, or end a
        notebook's cell with ``axes.figure``.
    """
    metric = dict(zip(Metrics.full_names(), Metrics.names(), strict=True)).get(metric, metric)
    g = prune_non_float_tensors(g)
    g = prune_same_scale_tensors(g) if prune_same_scale else g
    nodes = [node for node in g.nodes if node.op != "output"]
    names, places = [node.meta["clean_name"] for node in nodes], {n: i for i, n in enumerate(nodes)}
    is_new = axes is None
    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=(9, 2 + len(names) / 4), layout="constrained").subplots()
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=Metrics.get_full_name(metric), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", alpha=0.3)
    for direction, (what, fmt, colour) in _PASSES.items():
        data = {n: d for n in places if (d := getattr(n.meta["metrics"], direction)) is not None}
        shown = {n: x for n, d in data.items() if 0 < (x := getattr(d, metric)) < math.inf}
        if metric != "numel":
            tiny, normal = fmt.smallest_subnormal, torch.finfo(fmt.dtype).smallest_normal
            axes.axvspan(normal, fmt.max, color=colour, alpha=0.15, label=f"_{fmt}")
            axes.axvspan(tiny, normal, color=colour, alpha=0.07, label=f"_{fmt}")
            top: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "va": "bottom"}
            axes.text(fmt.max, 1, str(fmt).upper(), ha="right", color=colour, **top)
        if show_error_bars and metric != "numel":
            y = [places[n] + (0.12 if direction == "bwd" else -0.12) for n in shown]
            low = [max(data[n].abs_min, E5M2.smallest_subnormal / 4) for n in shown]
            axes.hlines(y, low, [data[n].abs_max for n in shown], color=colour, alpha=0.4, lw=1)
        fill = "white" if direction == "bwd" else colour
        for marker, kind in (("o", "tensor"), ("v", "weight")):
            dots = {n: x for n, x in shown.items() if n.meta["requires_grad"] == (kind == "weight")}
            if dots:
                rows, label = [places[n] for n in dots], f"{what}, {kind}"
                axes.plot(list(dots.values()), rows, marker, label=label, color=colour, mfc=fill)
        arrow = {"arrowstyle": "->" if direction == "fwd" else "<-", "color": colour, "alpha": 0.5}
        for node in shown if show_arrows else ():
            for source in node.all_input_nodes:
                if source in shown:
                    start, end = ((shown[n], places[n]) for n in (source, node))
                    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
    if is_new:
        handles = axes.get_legend_handles_labels()
        axes.figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    return axes


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    backward: Tensor | None = None,
    syntax_highlight: bool = False,
) -> str:
    """The calls that a module makes, each with the scales of its result, forward and backward.

    Args:
        module: what to run; a copy is run, the module and its gradients stay as they are.
        inputs: its argument, or a tuple of them.
        backward: the gradient of its output; None where the output is a scalar.
        syntax_highlight: colour for terminals; needs pygments.

    Returns:
        the code.
    """
    tracked = track_scales(module)
    output = tracked(*inputs) if isinstance(inputs, tuple) else tracked(inputs)
    output.backward(backward)
    graph = tracked.scales_graph()  # type: ignore[operator]
    given = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    names = ", ".join(["self", *(node.name for node in given)])
    written = graph.python_code("self").src.rstrip().split("\n")[-len(nodes) :]
    lines = [_annotated(f"def forward({names}):", given, names=True)]
    for node, line in zip(nodes, written, strict=True):
        lines.append(_annotated(f"    {_readable(line)}", [node]))
    code = "\n".join(lines)
    if not syntax_highlight:
        return code
    from pygments import formatters, highlight, lexers  # type: ignore[import-untyped]

    return str(highlight(code, lexers.PythonLexer(), formatters.TerminalFormatter()))


def _readable(line: str) -> str:
    """A line that torch.fx wrote, without the variables that it frees, and with short names."""
    name, equals, call = line.strip().partition(" = ")
    call = re.sub(r";  [\w =]+ = None$", "", call).replace(" = ", "=")
    call = re.sub(r"\btorch\.(_C\._nn|nn\.functional)\.", "F.", call)
    call = re.sub(r"\bfloat8_unit_scaling_functional_[a-z]+_", "U.", call)
    call = re.sub(r'getattr\(([^(),]+), "(\d+)"\)', r"\1[\2]", call)
    return name + equals + call


def _annotated(code: str, nodes: Iterable[Node], names: bool = False) -> str:
    """A line of code with the standard deviations of tensors and of their gradients."""
    scales = []
    for node in nodes:
        if (metrics := node.meta.get("metrics")) is not None:
            backward = "n/a" if metrics.bwd is None else f"{metrics.bwd.std:.3}"
            name = f"{node.name} " if names else ""
            scales.append(f"{name}(-> {metrics.fwd.std:.3}, <- {backward})")
    return f"{code}  {', '.join(scales)}" if scales else code
