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
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.measuring import harness
from benchmarks.measuring.harness import Row
from float8.version import __version__

T = TypeVar("T")
Columns = Mapping[str, tuple[str, str]]  # a row's key -> its header and its number format

PEER = "torchao "
LATE = 3  # exit status of a benchmark that lacked time for some of its rows
ROOT = Path(__file__).resolve().parents[2]


# What fields of rows are called where a benchmark does not say otherwise, and number formats.
HEADERS = {
    "layer": "layer", "mode": "mode", "min_ms": "min", "max_ms": "max", "ratio": "time / bf16",
    "tflops": "TFLOP/s", "saved_mib": "saved MiB", "sqnr_db": "SQNR dB", "error": "not run",
    "loss": "held-out loss", "tokens_s": "tokens/s", "peak_gib": "peak GiB",
}  # fmt: skip
FORMATS = {
    ".3f": "baseline_ms states_ratio block_ratio state_bytes",
    ".2f": "ms min_ms max_ms ratio ratio_to_unit gap_percent sooner saved_mib gemm_ms "
    "attention_ms cast_ms other_ms idle_ms saved_ratio moved_ratio peak_gib std of_copy "
    "smaller smaller_per_gpu moved_bytes share_of_copy last_std target measured cast_gb "
    "predicted_ms",
    ".4f": "loss logp_difference largest kl token_mult_prob_error",
    ".3g": "tflops baseline_tflops lr predicted published",
    ".1f": "sqnr_db optimum",
    ",.1f": "parameters_mib gradients_mib optimizer_mib activations_mib peak_mib per_gpu_mib",
    ",.0f": "tokens_s parameters tokens_in_80_gb",
    ".0f": "launches seeds diverged runs looks false_alarms missed looks_until allowed steps width "
    "log2_lr seconds room operand_max gbps gb_per_s",
    ".80": "error",
    "g": "bytes_per_element",
}


def columns(fields: str, **headers: str) -> Columns:
    """The columns of a table: names of fields in order, and headers that differ from `HEADERS`."""
    known = HEADERS | headers
    specs = {field: spec for spec, fields in FORMATS.items() for field in fields.split()}
    return {
        field: (known.get(field, field.replace("_", " ")), specs.get(field, ""))
        for field in fields.split()
    }


TARGET_COLUMNS = columns("layer mode against target measured met")


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


def cpu_model() -> str:
    """The processor's name from /proc/cpuinfo, else from `platform`."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The name of a GPU, or of the processor."""
    on_cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if on_cuda else cpu_model()


def environment(device: str) -> Row:
    """The machine, the versions and the commit that measurements depend on."""
    on_cuda = torch.device(device).type == "cuda"
    found = {each.name: each.version for each in metadata.distributions()}
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
        **{name: found.get(name) for name in ("triton", "torchao")},
        "cuda": torch.version.cuda,
    }


def run(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    work: Sequence[T],
    measure: Callable[[T], Sequence[Row]],
    columns: Columns,
    targets: Callable[[Sequence[Row]], Sequence[Row]] = lambda _: (),
    earlier: Sequence[Row] = (),
) -> int:
    """Measure one after the other, write the file after each, and print the table.

    An interrupted run keeps what it measured, and nothing new begins after ``--stop-after``.

    Args:
        name: of the benchmark, ``benchmarks/NAME.py``.
        argv: its arguments.
        options: as parsed.
        work: what is measured.
        measure: its rows.
        columns: of the table.
        targets: rows -> what should have been measured.
        earlier: rows of a file that is continued.

    Returns:
        1 if a row failed that is no peer's; a refusal is no failure. `LATE` if time was short.
    """
    rows: list[Row] = [*earlier]
    is_late = False
    try:
        for index, item in enumerate(work):
            if is_late := bool(index and harness.is_late(options)):
                print(f"{harness.LATE}: {', '.join(map(str, work[index:]))}")
                break
            rows += measure(item)
            write(name, argv, options, rows, columns)
    finally:
        show(write(name, argv, options, rows, columns, targets(rows)))
    ours = [row for row in rows if not str(row.get("layer", "")).startswith(PEER)]
    if any(not row.get("refused", True) for row in ours):
        return 1
    return LATE if is_late or any(row.get("error") == harness.LATE for row in rows) else 0


def show(report: Row) -> None:
    """Print the tables of a report, under the machine."""
    where = report["environment"]
    print(f"{where['device']}, torch {where['torch']}, {where['threads']} threads")
    print("\n".join(report["table"]))
    if "targets" in report:
        print(table(report["targets"], TARGET_COLUMNS))


def write(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[Row],
    columns: Columns,
    targets: Sequence[Row] = (),
    lines: Sequence[Row] | None = None,
) -> Row:
    """The report, in the file of `-o`, together with all that made it.

    `targets` say what should have been measured: rows with layer, mode, against, target, measured
    and met. It is called after each row, so that a killed run keeps its rows; the file is replaced
    atomically, so that it can be read at any moment. The table shows `lines` where they are given,
    and else the rows.
    """
    report = {
        "schema": 1,
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
    replace_text(options.output, json.dumps(report, indent=1, allow_nan=False) + "\n")
    return report


def replace_text(file: Path, text: str) -> None:
    """Write a file so that it is whole at any moment."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
