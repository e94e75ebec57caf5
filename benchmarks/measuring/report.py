"""The output of a benchmark: a table to read, and a JSON file with every sample.

A row is a dict: what was measured (shape, recipe), the medians, and every raw sample behind them.
The table shows some of a row's keys, rounded; the file holds all of them, with the machine, the
versions, the commit and the command that made them (`results/README.md` lists the fields).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.measuring.harness import Row
from float8.version import __version__
from scripts.training.environment import cpu_model

Columns = Mapping[str, tuple[str, str]]  # a row's key -> its header and its number format

SCHEMA = 1
TARGET_COLUMNS = {
    "layer": ("layer", ""),
    "mode": ("mode", ""),
    "against": ("against", ""),
    "target": ("target", ".2f"),
    "measured": ("measured", ".2f"),
    "met": ("met", ""),
}
ROOT = Path(__file__).resolve().parents[2]


def table(rows: Sequence[Row], columns: Columns) -> str:
    """Rows as text. A key that a row lacks is an empty cell; one that all lack has no column.

    Numbers are aligned right. Without tabulate, which a machine with a GPU may lack.
    """
    columns = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    lines = [[header for header, _ in columns.values()]]
    lines += [
        [format(row[key], spec) if key in row else "" for key, (_, spec) in columns.items()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    aligned = [">" if spec[-1:] in ("f", "g") else "<" for _, spec in columns.values()]
    return "\n".join(
        "  ".join(
            format(cell, f"{side}{width}")
            for cell, side, width in zip(line, aligned, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def commit() -> Row:
    """The commit measured, and whether tracked files differ from it (null: not a checkout)."""
    if not (ROOT / ".git").exists() or not (head := _git("rev-parse", "--verify", "HEAD")):
        return {"commit": "unknown", "dirty": None}
    return {"commit": head, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The name of a GPU, or of the processor."""
    on_cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if on_cuda else cpu_model()


def environment(device: str) -> Row:
    """The machine, the versions and the commit that measurements depend on."""
    on_cuda = torch.device(device).type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "device": device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)) if on_cuda else None,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "float8": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "torchao": version("torchao"),
        "cuda": torch.version.cuda,
    }


def publish(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[Row],
    columns: Columns,
    targets: Sequence[Row] = (),
) -> Row:
    """Print the table, and with `-o` write it as JSON together with all that made it.

    `targets` say what should have been measured: rows with layer, mode, against, target, measured
    and met. Returns what is written.
    """
    report = write(name, argv, options, rows, columns, targets)
    where = report["environment"]
    print(f"{name}: {where['device']}, torch {where['torch']}, {where['threads']} threads")
    print("\n".join(report["table"]))
    if targets:
        print(table(targets, TARGET_COLUMNS))
    return report


def write(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[Row],
    columns: Columns,
    targets: Sequence[Row] = (),
    lines: Sequence[Row] | None = None,
) -> Row:
    """`publish` without printing; called after each row, so that a killed run keeps its rows.

    The file is replaced atomically, so that it can be read at any moment. The table shows `lines`
    where they are given, and else the rows.
    """
    report = {
        "schema": SCHEMA,
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{name}.py", *argv]),
        "options": {key: str(value) for key, value in vars(options).items()},
        "environment": environment(options.device),
        "columns": {key: header for key, (header, _) in columns.items()},
        "rows": list(rows),
        "table": table(rows if lines is None else lines, columns).splitlines(),
    }
    if targets:
        report["targets"] = list(targets)
    if options.output is None:
        return report
    options.output.parent.mkdir(parents=True, exist_ok=True)
    part = options.output.with_name(options.output.name + ".part")
    part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    part.replace(options.output)
    return report
