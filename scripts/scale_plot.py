"""The scale of every tensor of the demo's GPT, before and after `unit_scale`, in one picture.

    python scripts/scale_plot.py                                     # out/unit_scales.png
    python scripts/scale_plot.py --out docs/figures/unit_scales.png  # the documentation's

The model is freshly initialised and has one block, since further blocks look like the first. It
runs one forward and one backward pass on a batch of the demo's text, in float32, which loses
nothing. A row has all tensors of one layer. Tensors and weights outside the band of E4M3, and
gradients outside that of E5M2, would need a scale to be cast to float8.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.fx import Graph

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from float8.unit_scaling.analysis import plot
from float8.unit_scaling.transforms import (
    prune_non_float_tensors,
    prune_selected_nodes,
    track_scales,
    unit_scale,
)
from scripts.operand_table import model_and_batch
from scripts.training.options import Options, options_from, parser
from scripts.training.picture import PALE, plain, save

XMIN, XMAX = 2.0**-24, 2.0**17
# module, or its own calls -> what its row is called
NAMES = {
    "blocks.0.attention_norm": "norm",
    "blocks.0.attention.qkv": "q, k, v",
    "blocks.0.attention": "attention",
    "blocks.0.attention.proj": "projection",
    "blocks.0": "add",
    "blocks.0.feed_forward_norm": "norm",
    "blocks.0.feed_forward.gate_up": "gate, up",
    "blocks.0.feed_forward": "SwiGLU",
    "blocks.0.feed_forward.down": "down",
    "cross_entropy": "loss",
}
LEGEND = {
    "forward pass, tensor": "activations",
    "forward pass, weight": "weights",
    "backward pass, tensor": "gradients of activations",
    "backward pass, weight": "of weights",
}


def graphs(options: Options) -> dict[str, Graph]:
    """The scales of the model as it is, and unit-scaled."""
    model, tokens, targets = model_and_batch(options)
    made = {}
    for name, variant in (("GPT as it is", model), ("after unit_scale", unit_scale(model))):
        tracked = track_scales(variant)
        tracked(tokens, targets).backward()
        graph = prune_non_float_tensors(tracked.scales_graph())  # type: ignore[operator]
        made[name] = prune_selected_nodes(graph, [operator.getitem, "rotary"])  # parts; a constant
    return made


def draw(made: dict[str, Graph]) -> Figure:
    """A panel for each graph, with the same rows."""
    figure = Figure(figsize=(8, 4.9), layout="constrained")
    panels = figure.subplots(1, len(made), sharey=True)
    for axes, (name, graph) in zip(panels, made.items(), strict=True):
        plot(graph, xmin=XMIN, xmax=XMAX, rows="layers", show_arrows=False, show_error_bars=False,
             axes=axes)  # fmt: skip
        axes.set_title(name, loc="left", fontsize=11.5, fontweight="bold")
        axes.set_xticks([2.0**power for power in range(-24, 17, 8)])
        plain(axes)
    labels = [label.get_text().partition(":")[0] for label in panels[0].get_yticklabels()]
    panels[0].set_yticks(range(len(labels)), [NAMES.get(label, label) for label in labels])
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        [*handles, Patch(color=PALE)],
        [*(LEGEND[name] for name in names), "paler: subnormal"],
        loc="outside lower center", ncols=5, frameon=False, fontsize=9.5, handletextpad=0.2,
        columnspacing=1.3,
    )  # fmt: skip
    return figure


def main(argv: list[str] | None = None) -> int:
    p = parser((__doc__ or "").partition("\n")[0])
    p.set_defaults(layers=1, device="cpu")
    p.add_argument("--out", type=Path, default=Path("out/unit_scales.png"))
    args = p.parse_args(argv)
    try:
        save(draw(graphs(options_from(args))), args.out)
    except (ValueError, OSError) as error:
        sys.exit(f"scale_plot.py: {error}")
    print(f"scales: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
