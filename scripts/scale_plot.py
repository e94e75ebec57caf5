"""The scale of every tensor of the demo's GPT, before and after `unit_scale`, in one picture.

    python scripts/scale_plot.py --out out/unit_scales.png

The model is freshly initialised and has one block, since further blocks look like the first. It
runs one forward and one backward pass on a batch of the demo's text, in float32, which loses
nothing. Both panels have the same axis. Tensors in a shaded part (outside E4M3 for the forward
pass, outside E5M2 for the backward pass) would need a scale to be cast to float8.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imsave
from numpy import asarray, full, hstack
from numpy.typing import NDArray

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

XMIN, XMAX = 2.0**-32, 2.0**18
DPI = 110


def panels(options: Options) -> list[NDArray[Any]]:
    """Two pictures: the model as it is, and unit-scaled."""
    model, tokens, targets = model_and_batch(options)
    made = []
    for name, variant in (("GPT as it is", model), ("after unit_scale", unit_scale(model))):
        tracked = track_scales(variant)
        tracked(tokens, targets).backward()
        graph = prune_non_float_tensors(tracked.scales_graph())  # type: ignore[operator]
        graph = prune_selected_nodes(graph, [operator.getitem, "rotary"])  # parts, and a constant
        title = f"{name}: mean loss over {tokens.numel():,} tokens"
        made.append(pixels(plot(graph, title, xmin=XMIN, xmax=XMAX).figure))
    return made


def pixels(figure: Any) -> NDArray[Any]:
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return asarray(canvas.buffer_rgba())


def side_by_side(pictures: list[NDArray[Any]]) -> NDArray[Any]:
    """One picture, white where one of them is shorter."""
    height = max(picture.shape[0] for picture in pictures)
    columns = []
    for picture in pictures:
        column = full((height, *picture.shape[1:]), 255, dtype=picture.dtype)
        column[: picture.shape[0]] = picture
        columns.append(column)
    return hstack(columns)


def main(argv: list[str] | None = None) -> int:
    p = parser((__doc__ or "").partition("\n")[0])
    p.set_defaults(layers=1, device="cpu")
    p.add_argument("--out", type=Path, default=Path("out/unit_scales.png"))
    args = p.parse_args(argv)
    try:
        picture = side_by_side(panels(options_from(args)))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        imsave(args.out, picture, format="png")  # whatever its name
    except (ValueError, OSError) as error:
        sys.exit(f"scale_plot.py: {error}")
    print(f"scales: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
