"""Execute every Triton kernel's compiled form without a GPU, and compare it with its definition.

    python -m scripts.kernel_tools run [--arch sm_90] [--only blockwise_mm] [-o FILE.json]

The cases are those of `test/kernels/gpu/test_compiled.py` and `test/kernel_tools/shipped_cases.py`,
all of them for each architecture. One row per kernel file has the number of cases and launches, of
different compiled forms, of programs and of instructions that their warps executed; how many cases
failed, because of a wrong byte or otherwise; and how many instructions have a fault of each kind
(`ptx/report.py` names them).

``shipped`` counts the forms that `shipped.py` lists, and ``not_executed`` names those of them that
no launch had. Forms are compared by Triton's key of a compilation: the source, all types, hints and
constants, and the options. The exit status is 1 if a case failed, an instruction has a fault, or a
shipped form was not executed.

Another version of Triton: ``pip install --no-deps --target DIR triton==3.6.0``, then DIR first on
``PYTHONPATH``. A file keeps the rows of other versions and architectures that it has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from scripts.kernel_tools.forms import ARCHITECTURES, compile_for
from scripts.kernel_tools.ptx.launch import SHARED_BYTES
from scripts.kernel_tools.shipped import FILES, variants

TESTS = str(Path(__file__).resolve().parents[2] / "test")


@dataclass
class Row:
    """What the cases of one kernel file did on one architecture."""

    triton: str
    arch: str
    kernel: str
    cases: int = 0
    launches: int = 0
    forms: int = 0
    programs: int = 0
    instructions: int = 0
    shipped: int = 0
    not_executed: list[str] = field(default_factory=list)
    failed: int = 0
    findings: dict[str, int] = field(default_factory=dict)  # kind -> instructions that have it
    messages: list[str] = field(default_factory=list)  # the first line of each failure


def rows(arch: str, only: str = "") -> list[Row]:
    """Run the cases of the kernels whose names contain ``only``."""
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)
    executed = importlib.import_module("executed").executed
    found: dict[str, Row] = {}
    forms: dict[str, set[str]] = {}
    for kernel, function, arguments in _cases():
        if only not in kernel:
            continue
        row = found.setdefault(kernel, Row(triton.__version__, arch, kernel))
        torch.manual_seed(0)
        with executed(arch, raises=False) as reports:
            try:
                function(*arguments)
            except Exception as error:  # a table of all kernels says more than the first fault
                row.failed += 1
                text = str(error).strip() or type(error).__name__
                first = " ".join(text.split("\n")[:2])
                row.messages.append(f"{function.__name__}{arguments}: {first}")
        row.cases += 1
        row.launches += len(reports)
        row.programs += sum(report.programs for report in reports)
        row.instructions += sum(report.instructions.total() for report in reports)
        for finding in (f for report in reports for f in report.findings):
            row.findings[finding.kind] = row.findings.get(finding.kind, 0) + 1
        forms.setdefault(kernel, set()).update(report.form for report in reports)
        row.forms = len(forms[kernel])
    launched = set[str]().union(*forms.values())
    for kernel in FILES:
        if kernel in found:
            form_of = {v.name: compile_for(v, arch).metadata.hash for v in variants((kernel,))}
            found[kernel].shipped = len(form_of)
            found[kernel].not_executed = [n for n, f in form_of.items() if f not in launched]
    return list(found.values())


def _cases() -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """Kernel file, function, arguments."""
    tests = importlib.import_module("kernels.gpu.test_compiled")
    for table in (tests.CASES, tests.SHIPPED):
        for kernel, cases in table.items():
            for function, arguments in cases:
                yield kernel, function, tests.on_cpu(function, arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to execute, and where to write the table."""
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, choices=list(SHARED_BYTES))
    parser.add_argument("--only", default="", help="part of the name of a kernel's file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")


def main(options: argparse.Namespace) -> int:
    """Print the table, and write it as JSON where asked."""
    from tabulate import tabulate

    warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION")
    table: list[Row] = []
    for arch in options.arch:
        table += rows(arch, options.only)
        if options.output is not None:  # after each: an interrupted run keeps what it has
            _write(options.output, table)
    if not table:
        sys.exit(f"--only {options.only!r} is part of no kernel's name")
    print(tabulate([_shown(row) for row in table], headers="keys"))
    for row in table:
        for message in (*row.messages, *(f"not executed: {name}" for name in row.not_executed)):
            print(f"\n{row.kernel}, {row.arch}: {message}")
    return 1 if any(row.failed or row.findings or row.not_executed for row in table) else 0


def _shown(row: Row) -> dict[str, Any]:
    columns = {k: v for k, v in asdict(row).items() if k not in ("messages", "not_executed")}
    return columns | {"shipped": f"{row.shipped - len(row.not_executed)} of {row.shipped}"}


def _write(file: Path, table: Sequence[Row]) -> None:
    """Replace the rows of the same version, architecture and kernel; keep the others."""
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    merged = {
        (row["triton"], row["arch"], row["kernel"]): row for row in [*known, *map(asdict, table)]
    }
    file.write_text(json.dumps({"rows": [merged[k] for k in sorted(merged)]}, indent=1) + "\n")
