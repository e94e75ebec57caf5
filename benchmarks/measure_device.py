"""Measure a device for `float8.estimate`, or fit one to results of the benchmarks.

python benchmarks/measure_device.py --save here.json     # this machine, in less than a minute
python benchmarks/measure_device.py --fit bench_matmul.json bench_linear.json --save fitted.json
python -m float8.estimate 8192,4096,14336 --device here.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.cost_model.fit import fit
from benchmarks.cost_model.measure import measure
from float8.estimate.devices import DEVICES, find_device


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", nargs="+", type=Path, metavar="FILE", help="files of one device")
    known = f"{', '.join(DEVICES)}, or a file"
    parser.add_argument("--device", help=f"with --fit, for figures that the files lack: {known}")
    parser.add_argument("--save", type=Path, required=True, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    if options.device and not options.fit:
        parser.error("--device is for --fit: without it, this machine is measured")
    try:
        options.save.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured
        base = None if options.device is None else find_device(options.device)
        device = fit(*options.fit, base=base) if options.fit else measure()
        device.save(options.save)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join([f"{device.name}: wrote {options.save}", *device.provenance()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
