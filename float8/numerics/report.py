"""A run of `inspect` or `inspect_every` as a page: one HTML file, for a browser or a phone.

    python -m float8.numerics.report run.json -o report.html

It shows what is wrong in plain words, every cast in a table that sorts and filters, its histogram
against the format's range, and how it changed over the steps. The file needs no network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from float8.numerics.page import page
from float8.numerics.snapshot import load_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 0 if it was, 2 with a line on stderr if it could not be."""
    options = parser().parse_args(arguments)
    run: Path = options.run
    target: Path = options.output or run.with_suffix(".html")
    try:
        _write(run, target)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(target)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options; the description is the top of this file."""
    options = argparse.ArgumentParser(
        prog="python -m float8.numerics.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("run", type=Path, help="the JSON file that Report.save or a monitor wrote")
    options.add_argument(
        "-o", "--output", type=Path, help="by default beside the run, with the suffix .html"
    )
    return options


def _write(run: Path, target: Path) -> None:
    reports = load_run(run)
    if not reports:
        raise ValueError(f"{run}: there is no snapshot in it")
    if target.exists() and target.samefile(run):
        raise ValueError(f"{target}: the page would overwrite the run; name another by -o")
    said = json.loads(run.read_text(encoding="utf-8"))
    about = {"file": run.name, **{name: str(said.get(name, "?")) for name in ("float8", "torch")}}
    target.write_text(page(reports, about), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
