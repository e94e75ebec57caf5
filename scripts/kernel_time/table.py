"""The table of predictions: each shipped launch, at several sizes, on several GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from tabulate import tabulate

from scripts.kernel_time.devices import DEVICES
from scripts.kernel_time.launches import predict_launch, variants

Size = tuple[int, int]
SIZES: tuple[Size, ...] = ((16384, 4096), (16384, 8192), (16384, 14336))
Row = dict[str, Any]


def size(text: str) -> Size:
    """`M,K`, for argparse."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise argparse.ArgumentTypeError(f"a size is M,K, not {text!r}")
    return int(numbers[0]), int(numbers[1])


def rows(devices: Sequence[str], sizes: Sequence[Size], only: str = "") -> list[Row]:
    """A row per launch, device and size."""
    found: list[Row] = []
    for M, K in sizes:
        for variant in variants(M=M, K=K):
            if only in variant.name:
                found += [
                    {"kernel": variant.name, "device": device, "M": M, "K": K,
                     **predict_launch(variant, device).as_row()}
                    for device in devices
                ]  # fmt: skip
    order = list(dict.fromkeys(row["kernel"] for row in found))
    return sorted(found, key=lambda row: (devices.index(row["device"]), order.index(row["kernel"])))


def publish(
    devices: Sequence[str],
    sizes: Sequence[Size],
    only: str,
    output: Path | None,
    argv: Sequence[str],
) -> int:
    """Print the table, and write it as JSON where asked."""
    found = rows(devices, sizes, only)
    print(
        "Predicted, not measured. Times in us. The limit: a copy of the bytes, or the tensor cores"
    )
    print(tabulate([_shown(row) for row in found], headers="keys", disable_numparse=True))
    if output is not None:
        report = {
            "command": " ".join(["python scripts/kernel_report.py", *argv]),
            "triton": triton.__version__,
            "devices": {name: asdict(DEVICES[name]) for name in devices},
            "rows": found,
        }
        output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _shown(row: Row) -> Row:
    micro = {name: f"{row[name] * 1e6:.1f}" for name in ("memory", "issue", "tensor", "latency")}
    return {
        "kernel": row["kernel"], "GPU": row["device"], "M,K": f"{row['M']},{row['K']}",
        "time": f"{row['seconds'] * 1e6:.1f}", "of limit": f"{row['of_limit']:.2f}",
        "limit": row["limit"], **micro, "busiest pipe": row["pipe"], "programs/SM": row["resident"],
        "waves": f"{row['waves']:.1f}", "KiB in flight": f"{row['in_flight'] / 1024:.0f}",
    }  # fmt: skip
