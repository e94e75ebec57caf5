"""Compile every shipped Triton kernel, without a GPU, and report its machine code.

    python -m scripts.kernel_tools report [--arch sm_90] [--only cast] [-o FILE.json]
    python -m scripts.kernel_tools report --predict H200 [--sizes 16384,8192] [-o FILE.json]

Triton compiles without a GPU and includes a disassembler. Printed are registers and shared memory
(which limit the programs per multiprocessor), spills (registers in local memory), the narrowest and
widest access to device memory in bytes per thread, and the instructions that convert float8. A
cubin says nothing about time.

With ``--predict`` it predicts the time of each launch by a model of the machine
(`predict/model.py`): what fraction of the bandwidth of a copy it reaches, and what limits it.

The machine code is also scanned for stores of garbage, which some versions of ptxas emit
(`sass/findings.py`). The exit status is 1 where there are any: below the table stands each kernel,
and its stores of garbage. A kernel that ptxas cannot compile ends the report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from float8.kernels.products import SUPPORT
from scripts.kernel_tools.forms import ARCHITECTURES, Variant, compile_for
from scripts.kernel_tools.predict.devices import DEVICES
from scripts.kernel_tools.predict.launches import predict_launch
from scripts.kernel_tools.sass.findings import scan
from scripts.kernel_tools.sass.tools import listing, resources
from scripts.kernel_tools.shipped import variants

Row = dict[str, Any]
Size = tuple[int, int]
SIZES: tuple[Size, ...] = ((16384, 4096), (16384, 8192), (16384, 14336))


def read(cubin: bytes) -> Row:
    """The figures of a cubin, by the disassembler that comes with Triton.

    ``spills``: bytes of local memory per thread; ``loads`` and ``stores``: bytes per thread ->
    global accesses; ``garbage``: stores of bytes that no computation made, and their origin.
    """
    usage, code = resources(cubin), listing(cubin)
    resource = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    found = scan(code)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", code, re.M)
    return {
        "registers": resource["REG"],
        "spills": resource["LOCAL"] + resource["STACK"],
        "shared": resource["SHARED"],
        "instructions": len(opcodes),
        "loads": _widths(opcodes, "LDG", "LDGSTS"),  # to registers, to shared memory
        "stores": _widths(opcodes, "STG"),
        "conversions": dict(Counter(op for op in opcodes if re.search(r"\.(E4M3|E5M2)", op))),
        "garbage": [
            *map(str, found.findings),
            *(f"{op} is not known" for op in sorted(found.unknown)),
        ],
    }


def _widths(opcodes: Sequence[str], *accesses: str) -> dict[int, int]:
    """Bytes per thread -> how often; an access that names no width moves 4 bytes."""
    found: Counter[int] = Counter()
    for op in opcodes:
        name, *modifiers = op.split(".")
        if name in accesses:
            bits = [int(m.strip("US")) for m in modifiers if m.strip("US").isdecimal()]
            found[(bits or [32])[0] // 8] += 1
    return dict(sorted(found.items()))


def row(variant: Variant, arch: str) -> Row:
    """One line of the report."""
    compiled = compile_for(variant, arch)
    figures = read(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}
    return {"kernel": variant.name, "arch": arch, **figures}


def predictions(devices: Sequence[str], sizes: Sequence[Size], only: str = "") -> list[Row]:
    """A row per launch, device and size."""
    order = [variant.name for variant in variants()]
    found = [
        {"kernel": variant.name, "device": device, "M": M, "K": K,
         **predict_launch(variant, device).as_row()}
        for M, K in sizes
        for variant in variants(M=M, K=K)
        if only in variant.name
        for device in devices
    ]  # fmt: skip
    return sorted(found, key=lambda r: (devices.index(r["device"]), order.index(r["kernel"])))


def size(text: str) -> Size:
    """`M,K`, for argparse."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise argparse.ArgumentTypeError(f"a size is M,K, not {text!r}")
    return int(numbers[0]), int(numbers[1])


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to compile or predict, and where to write the table."""
    known = [name for name in SUPPORT if name.startswith("sm_")]
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, choices=known)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--predict", nargs="+", metavar="GPU", choices=DEVICES, help="their times")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="M,K", type=size)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")


def main(options: argparse.Namespace) -> int:
    """Print the table, and write it as JSON where asked."""
    from tabulate import tabulate  # here: tests on a machine with a GPU may lack it, and need none

    chosen = [v for v in variants() if options.only in v.name]
    if not chosen:
        names = ", ".join(v.name for v in variants())
        sys.exit(f"--only {options.only!r} is part of no kernel's name; there are {names}")
    if options.output is not None:  # before minutes of compiling
        options.output.parent.mkdir(parents=True, exist_ok=True)
    report: Row = {"triton": triton.__version__}
    if options.predict:
        rows = predictions(options.predict, options.sizes, options.only)
        print("Predicted, not measured. Times in us. Of the limit: a copy, or the tensor cores")
        shown = [_prediction(r) for r in rows]
        report["command"] = " ".join(["python -m scripts.kernel_tools", *sys.argv[1:]])
        report["devices"] = {name: asdict(DEVICES[name]) for name in options.predict}
    else:
        rows = [row(variant, arch) for variant in chosen for arch in options.arch]
        print(f"Triton {triton.__version__}; sizes and pointers multiples of 16")
        shown = [_shown(r) for r in rows]
    print(tabulate(shown, headers="keys", disable_numparse=bool(options.predict)))
    if options.output is not None:
        options.output.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
    bad = [r for r in rows if r.get("garbage")]
    for found in bad:
        print(f"\n{found['kernel']}, {found['arch']}:", *found["garbage"], sep="\n")
    return 1 if bad else 0


def _shown(found: Row) -> Row:
    def counts(by_name: dict[Any, int]) -> str:
        return " ".join(f"{n}x{name}" for name, n in by_name.items())

    short = {re.sub(r"\..*(E4M3|E5M2).*", r".\1", op): n for op, n in found["conversions"].items()}
    return {
        "kernel": found["kernel"], "arch": found["arch"], "registers": found["registers"],
        "spilled bytes": found["spills"], "shared bytes": found["shared"],
        "instructions": found["instructions"], "loads (n x bytes)": counts(found["loads"]),
        "stores (n x bytes)": counts(found["stores"]), "float8 conversions": counts(short),
        "stores of garbage": len(found["garbage"]),
    }  # fmt: skip


def _prediction(found: Row) -> Row:
    micro = {name: f"{found[name] * 1e6:.1f}" for name in ("memory", "issue", "tensor", "latency")}
    return {
        "kernel": found["kernel"], "GPU": found["device"], "M,K": f"{found['M']},{found['K']}",
        "time": f"{found['seconds'] * 1e6:.1f}", "of limit": f"{found['of_limit']:.2f}",
        "limit": found["limit"], **micro, "busiest pipe": found["pipe"],
        "programs/SM": found["resident"], "waves": f"{found['waves']:.1f}",
        "KiB in flight": f"{found['in_flight'] / 1024:.0f}",
    }  # fmt: skip
