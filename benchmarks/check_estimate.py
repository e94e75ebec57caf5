"""Compare predictions of `float8.estimate` with what `bench_linear.py` measured.

python benchmarks/check_estimate.py bench_linear.json                      # datasheet figures
python benchmarks/check_estimate.py bench_linear.json --device measured    # on the same machine
python benchmarks/check_estimate.py bench_linear.json --device fitted.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.cost_model.check import predicted_against_measured
from benchmarks.cost_model.measure import measure
from float8.estimate.devices import DEVICES


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="a result of bench_linear.py")
    known = f"{', '.join(DEVICES)}, measured (this machine), or a file of measure_device.py"
    parser.add_argument("--device", help=f"{known}; default: the datasheet of the file's device")
    options = parser.parse_args(argv)
    try:
        device = measure() if options.device == "measured" else options.device
        print(predicted_against_measured(options.results, device))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except ArithmeticError as error:
        parser.error(f"figures of device {options.device!r} are too large or small ({error})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
