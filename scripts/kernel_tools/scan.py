"""Scan compiled Triton kernels for stores of bytes that no computation made.

    python -m scripts.kernel_tools scan FILE_OR_DIRECTORY ...

A file is a cubin, or a listing of `nvdisasm -ndf -c`; of a directory, such as ~/.triton/cache or
torch.compile's cache, every cubin below it is read. For each file the stores of garbage and their
origin are printed; the exit status is 1 if there are any, or if a file could not be read.
scripts/kernel_tools/sass/findings.py says what is found and what is not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.kernel_tools.sass.findings import scan
from scripts.kernel_tools.sass.tools import listing


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to read."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE_OR_DIRECTORY")


def main(options: argparse.Namespace) -> int:
    """Scan files and directories."""
    files: list[Path] = []
    for given in options.files:
        below = sorted(given.rglob("*.cubin")) if given.is_dir() else [given]
        if not below or not below[0].exists():
            sys.exit(f"{given}: no such file, or a directory without a .cubin")
        files += below
    return max([_report(file) for file in files])


def _report(file: Path) -> int:
    content = file.read_bytes()
    try:
        found = scan(listing(content) if content.startswith(b"\x7fELF") else content.decode())
    except ValueError as error:
        print(f"{file}: {error}")
        return 1
    print(f"{file}: {found}")
    return 1 if found.findings or found.unknown else 0
