"""Draw the speed-ups of a result file: one panel per mode, one line per recipe.

python benchmarks/plots.py benchmarks/results/cpu_bench_matmul.json -o matmul.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.plots import LINES, save


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, metavar="RESULT.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    if report["benchmark"] not in LINES:
        parser.error(f"{report['benchmark']} has no picture; these have: {', '.join(LINES)}")
    save(report, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
