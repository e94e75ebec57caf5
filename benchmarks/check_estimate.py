"""Compare predictions of `float8.estimate` with measurements.

python benchmarks/check_estimate.py                                        # that others published
python benchmarks/check_estimate.py bench_linear.json                      # datasheet figures
python benchmarks/check_estimate.py OUT/bench_{linear,matmul,casts,grouped_mm}.json
python benchmarks/check_estimate.py bench_linear.json --device measured    # on the same machine
python benchmarks/check_estimate.py bench_linear.json --device fitted.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.cost_model.beside import tables
from benchmarks.cost_model.measure import measure
from benchmarks.cost_model.published import predicted_against_published
from float8.estimate.devices import DEVICES


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "results of bench_linear, bench_matmul, bench_casts or bench_grouped_mm"
    what += "; without one, benchmarks/published.json"
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE", help=what)
    known = f"{', '.join(DEVICES)}, measured (this machine), or a file of measure_device.py"
    parser.add_argument("--device", help=f"{known}; default: the datasheet of the file's device")
    options = parser.parse_args(argv)
    if not options.results:
        if options.device:
            parser.error("--device is for a FILE: published measurements name their own devices")
        print(predicted_against_published())
        return 0
    try:
        device = measure() if options.device == "measured" else options.device
        print(tables(options.results, device))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except ArithmeticError as error:
        parser.error(f"figures of device {options.device!r} are too large or small ({error})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
