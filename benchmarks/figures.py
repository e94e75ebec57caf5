"""Draw the figures of the documentation again, from the result files that they show.

python benchmarks/figures.py                  # all, into docs/figures
python benchmarks/figures.py overview demo    # some of them
python benchmarks/figures.py --folder /tmp/x  # elsewhere

Two figures are not drawn from result files: unit_scales.png shows the scales of a model's tensors
(`float8.unit_scaling.analysis.plot`), and report.png is a screenshot of a numerics page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import plots
from benchmarks.measuring import overview
from benchmarks.measuring.overview import RESULTS
from benchmarks.measuring.report import ROOT
from scripts.training.picture import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "figures"


class Drawn(NamedTuple):
    """A figure: the result files that it shows, and how it is drawn from them."""

    inputs: Sequence[str]
    draw: Callable[[], Figure]


def _of(file: str) -> Drawn:
    """What `plots.py` draws of a result file."""
    return Drawn((file,), partial(_result, RESULTS / file))


def _result(path: Path) -> Figure:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plots.DRAWN[plots.kind_of(report)](report)


def _overview() -> Figure:
    return overview.draw(overview.rows())


FIGURES = {
    "overview": Drawn(tuple(overview.SOURCES.values()), _overview),
    "demo": _of("cpu_noamx_demo.json"),
    "mup_transfer": _of("cpu_mup_transfer.json"),
    "outliers": _of("cpu_outliers.json"),
    "quality": _of("cpu_quality.json"),
    "unit_gpt": _of("cpu_unit_gpt.json"),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of: {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are written")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - FIGURES.keys():
        parser.error(f"no figure is called {', '.join(sorted(unknown))}: {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        path = options.folder / f"{name}.png"
        save(FIGURES[name].draw(), path)
        print(f"{path}  from {', '.join(FIGURES[name].inputs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
