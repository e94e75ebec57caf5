"""The scales of a graph as a table, and as a plot against the ranges of float8 formats.

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

`visualiser` plots a language model's scales in one call, on a batch of text. For a model that takes
other inputs, the three steps are ::

    tracked = track_scales(model)
    loss_of(tracked, batch).backward()
    plot(tracked.scales_graph())
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from float8.formats import E4M3, E5M2
from float8.unit_scaling.transforms import (
    Metrics,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IGNORED = -100  # the label that F.cross_entropy leaves out
# direction -> what, its format, its colour (told apart with any form of colour blindness)
_PASSES = {
    "fwd": ("forward pass", E4M3, "#0072B2"),
    "bwd": ("backward pass", E5M2, "#D55E00"),
}


def graph_to_rows(graph: Graph) -> list[dict[str, Any]]:
    """The table as dictionaries, in the order of the graph's nodes.

    Args:
        graph: as ``model.scales_graph()`` returns it, or pruned.

    Returns:
        two rows, ``fwd`` and ``bwd``, for each floating-point tensor.
    """
    return [
        {
            "layer": node.meta["clean_name"],
            "weight tensor": node.meta["requires_grad"],
            "direction": direction,
            "tensor type": ("grad_" if direction == "bwd" else "")
            + ("w" if node.meta["requires_grad"] else "x"),
            **{
                Metrics.get_full_name(name): getattr(
                    getattr(node.meta["metrics"], direction), name, None
                )
                for name in Metrics.names()
            },
        }
        for node in graph.nodes
        if "metrics" in node.meta
        for direction in _PASSES
    ]


def graph_to_dataframe(g: Graph) -> Any:
    """The table as a ``pandas.DataFrame``; where pandas is not installed, as `graph_to_rows`.

    Args:
        g: as ``model.scales_graph()`` returns it, or pruned.
    """
    table = graph_to_rows(g)
    try:
        from pandas import DataFrame  # type: ignore[import-untyped]
    except ImportError:
        return table
    columns = ["layer", "weight tensor", "direction", "tensor type", *Metrics.full_names()]
    return DataFrame(table, columns=columns)


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


def example_batch(
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    texts: Sequence[str] | None = None,
    seed: int = 1472,
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of token ids of real text.

    Args:
        tokenizer: anything with ``encode(text)`` that returns ids, or an object with ``ids``; None
            for the bytes of the text, 256 ids.
        batch_size: B, how many sequences.
        seq_len: S, how many tokens each.
        texts: where they are cut from, at random; the documentation of `torch.nn` if None. One of
            them has two tokens at least.
        seed: of the choice.

    Returns:
        ``input_idxs``, ``attn_mask`` and ``labels``, each int64 (B, S) and contiguous. Labels are
        the ids, one to the left. Where a text is too short, the mask and the ids are 0 and the
        labels -100.
    """
    if texts is None:
        classes = [value for _, value in sorted(vars(nn).items()) if inspect.isclass(value)]
        texts = [inspect.getdoc(cls) or "" for cls in classes]
    found = [text.encode() if tokenizer is None else tokenizer.encode(text) for text in texts]
    encoded = [ids for x in found if len(ids := list(getattr(x, "ids", x))) > 1]
    generator = torch.Generator().manual_seed(seed)
    length = seq_len + 1
    ids_BS = torch.full((batch_size, length), IGNORED)
    for row in ids_BS:
        ids = encoded[int(torch.randint(len(encoded), (), generator=generator))]
        start = int(torch.randint(max(len(ids) - length, 0) + 1, (), generator=generator))
        cut = torch.tensor(ids[start : start + length])
        row[: len(cut)] = cut
    inputs, labels = ids_BS[:, :-1], ids_BS[:, 1:]
    mask = (inputs != IGNORED).long()
    # Models call .view(-1) on them.
    return (inputs * mask).contiguous(), mask.contiguous(), labels.contiguous()


def visualiser(
    model: nn.Module,
    tokenizer: Any = None,
    batch_size: int = 8,
    seq_len: int = 64,
    backward: bool = True,
    texts: Sequence[str] | None = None,
    seed: int = 1472,
    **plot_kwargs: Any,
) -> Axes:
    """Plots the scales of a language model in one training step.

    Args:
        model: called as ``model(inputs, labels)`` with two int64 (B, S); returns the loss, or a
            tuple that ends with it. It stays as it is, gradients included.
        tokenizer, batch_size, seq_len, texts, seed: as for `example_batch`.
        backward: show the gradients too.
        **plot_kwargs: of `plot`.

    Returns:
        the axes of the plot.
    """
    inputs, _, labels = example_batch(tokenizer, batch_size, seq_len, texts, seed)
    parameter = next(model.parameters(), inputs)
    tracked = track_scales(model)
    output = tracked(inputs.to(parameter.device), labels.to(parameter.device))
    loss = output[-1] if isinstance(output, tuple) else output
    if backward:
        loss.backward()
    return plot(tracked.scales_graph(), **plot_kwargs)  # type: ignore[operator]
