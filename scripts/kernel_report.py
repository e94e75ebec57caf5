"""Compile every shipped Triton kernel, without a GPU, and report its machine code.

    python scripts/kernel_report.py [--arch sm_90] [--only cast] [-o FILE.json]
    python scripts/kernel_report.py --predict H200 [--sizes 16384,8192] [--only cast] [-o FILE.json]

Triton compiles without a GPU and includes a disassembler. Printed are registers and shared memory
(which limit the programs per multiprocessor), spills (registers in local memory), the narrowest and
widest access to device memory in bytes per thread, and the instructions that convert float8. A
cubin says nothing about time.

With ``--predict`` it predicts the time of each launch by a model of the machine
(`kernel_time/model.py`): what fraction of the bandwidth of a copy it reaches, and what limits it.

The machine code is also scanned for stores of garbage, which some versions of ptxas emit
(`sass/findings.py`). The exit status is 1 where there are any: below the table stands each kernel,
and the way of the garbage to a store. A kernel that ptxas cannot compile ends the report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from float8.kernels.gpu.launch import Variant
from float8.kernels.scaled_mm import SUPPORT
from scripts.kernel_time import table
from scripts.kernel_time.devices import DEVICES
from scripts.kernel_time.launches import compile_for, variants
from scripts.sass.findings import scan
from scripts.sass.tools import listing, resources

ARCHITECTURES = ("sm_89", "sm_90", "sm_100")  # what is compiled for unless others are asked for


@dataclass(frozen=True)
class MachineCode:
    """The figures of a cubin; ``loads`` and ``stores``: bytes per thread -> global accesses."""

    registers: int
    spills: int  # bytes of local memory per thread
    shared: int
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    conversions: dict[str, int]
    garbage: list[str]  # stores of bytes that no computation made, and their origin


def read(cubin: bytes) -> MachineCode:
    """Disassemble a cubin with the tools that come with Triton."""
    usage, code = resources(cubin), listing(cubin)
    resource = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    found = scan(code)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", code, re.M)
    return MachineCode(
        registers=resource["REG"],
        spills=resource["LOCAL"] + resource["STACK"],
        shared=resource["SHARED"],
        instructions=len(opcodes),
        loads=_widths(opcodes, "LDG", "LDGSTS"),  # to registers, to shared memory
        stores=_widths(opcodes, "STG"),
        conversions=dict(Counter(op for op in opcodes if re.search(r"\.(E4M3|E5M2)", op))),
        garbage=[
            *map(str, found.findings),
            *(f"{op} is not known" for op in sorted(found.unknown)),
        ],
    )


def _widths(opcodes: Sequence[str], *accesses: str) -> dict[int, int]:
    """Bytes per thread -> how often; an access that names no width moves 4 bytes."""
    found: Counter[int] = Counter()
    for op in opcodes:
        name, *modifiers = op.split(".")
        if name in accesses:
            bits = [int(m.strip("US")) for m in modifiers if m.strip("US").isdecimal()]
            found[(bits or [32])[0] // 8] += 1
    return dict(sorted(found.items()))


def row(variant: Variant, arch: str) -> dict[str, Any]:
    """One line of the report."""
    compiled = compile_for(variant, arch)
    code = asdict(read(compiled.asm["cubin"]))
    return {"kernel": variant.name, "arch": arch, **code, "shared": compiled.metadata.shared}


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name in SUPPORT if name.startswith("sm_")]
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, choices=known)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--predict", nargs="+", metavar="GPU", choices=DEVICES, help="their times")
    parser.add_argument("--sizes", nargs="+", default=table.SIZES, metavar="M,K", type=table.size)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    from tabulate import tabulate  # here: tests on a machine with a GPU may lack it, and need none

    shipped = variants()
    chosen = [v for v in shipped if options.only in v.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(v.name for v in shipped))
        parser.error(f"--only {options.only!r} is part of no kernel's name; there are {names}")
    if options.output is not None:  # before minutes of compiling
        try:
            options.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot write {options.output}: {error}")
        if options.output.is_dir():
            parser.error(f"cannot write {options.output}: it is a directory")
    if options.predict:
        return table.publish(options.predict, options.sizes, options.only, options.output, argv)
    rows = [row(variant, arch) for variant in chosen for arch in options.arch]
    print(f"Triton {triton.__version__}; sizes and pointers multiples of 16")
    print(tabulate([_shown(r) for r in rows], headers="keys"))
    if options.output is not None:
        report = {"triton": triton.__version__, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    for found in (r for r in rows if r["garbage"]):
        print(f"\n{found['kernel']}, {found['arch']}:", *found["garbage"], sep="\n")
    return 1 if any(r["garbage"] for r in rows) else 0


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    def counts(by_name: dict[Any, int]) -> str:
        return " ".join(f"{n}x{name}" for name, n in by_name.items())

    return {
        "kernel": found["kernel"],
        "arch": found["arch"],
        "registers": found["registers"],
        "spilled bytes": found["spills"],
        "shared bytes": found["shared"],
        "instructions": found["instructions"],
        "loads (n x bytes)": counts(found["loads"]),
        "stores (n x bytes)": counts(found["stores"]),
        "float8 conversions": counts({_short(k): n for k, n in found["conversions"].items()}),
        "stores of garbage": len(found["garbage"]),
    }


def _short(opcode: str) -> str:
    return f"{opcode.partition('.')[0]}.{'E4M3' if 'E4M3' in opcode else 'E5M2'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
