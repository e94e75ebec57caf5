"""Draw a result file, as the program that wrote it draws it.

    bench_mup_transfer          held-out loss over the learning rate, one line per width
    bench_quality               gaps to bf16 with their intervals; see `quality/pictures.py`
    bench_outliers              loss above bf16 over the size of an outlier, one line per contender
    bench_unit_gpt              training and held-out loss over the steps, one line per contender
    scripts/demo.py             loss curves, and gaps to the base

python benchmarks/plots.py benchmarks/results/cpu_quality.json -o quality.png
python benchmarks/plots.py out/demo/demo.json -o demo.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import bench_mup_transfer, bench_outliers, bench_unit_gpt
from benchmarks.quality import pictures
from scripts.training import curves
from scripts.training.picture import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "bench_quality": lambda report: pictures.draw(report["rows"]),
    "bench_mup_transfer": lambda report: bench_mup_transfer.draw(report["rows"]),
    "bench_outliers": lambda report: bench_outliers.draw(bench_outliers.lines(report["rows"])),
    "bench_unit_gpt": lambda report: bench_unit_gpt.draw(report["rows"]),
    "demo": lambda report: curves.draw(report["runs"]),
}


def kind_of(report: dict[str, Any]) -> str:
    """The program that wrote a report; the demo does not write its name."""
    return str(report.get("benchmark", "demo" if "runs" in report else "unknown"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, metavar="RESULT.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    if (kind := kind_of(report)) not in DRAWN:
        parser.error(f"{kind} has no picture; these have: {', '.join(DRAWN)}")
    save(DRAWN[kind](report), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
