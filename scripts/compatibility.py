"""The tables of docs/compatibility.md, as the tables in the code say them.

    python scripts/compatibility.py          # prints them
    python scripts/compatibility.py --write  # replaces them in the page

A GPU needs not be present: the plan of every recipe is bound to the name of its architecture, and
the reasons are the messages that a layer prints there.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from float8.config import RECIPES, Float8LinearConfig
from float8.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES, on_family
from float8.kernels.products import CPU, SUPPORT
from float8.linear.plan import plan_for
from float8.linear.refusals import reason_against_call

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
# What is sold under each name of `SUPPORT`, and one that is not in it.
GPUS = {
    CPU: "any CPU, any device with `emulate=True`",
    "sm_80": "A100",
    "sm_89": "L4, L40S, RTX 4090",
    "sm_90": "H100, H200, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_120": "RTX 5090, RTX PRO 6000 Blackwell",
    "sm_121": "GB10 (DGX Spark)",
    "gfx94": "MI300A, MI300X, MI325X",
    "gfx95": "MI350X, MI355X",
}
# Where float8's tests and benchmarks have run.
HAS_RUN = (CPU, "sm_90")
# MX products: torch's tests run there, and TransformerEngine's check_mxfp8_support refuses >= 12.0.
DOUBTFUL = ("sm_120", "sm_121")
CUDA_VERSIONS = ("12.8", "12.9")  # before and since cuBLASLt takes scales of rows and blocks
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TITLES = {
    "accelerate": "Accelerate",
    "transformers": "Transformers (Trainer)",
    "lightning": "Lightning, Fabric",
    "torchtitan": "torchtitan",
    "torchao": "torchao (configs, names)",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- versions


def setup_arguments() -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(setup.call_args.kwargs)


def pins() -> dict[str, str]:
    """Package -> the version that constraints.txt has, with which the tests run."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, flags=re.MULTILINE))


def versions() -> str:
    """Python, PyTorch and Triton: what is required, and with what the tests run."""
    arguments, pinned = setup_arguments(), pins()
    rows = [["Python", f"`{arguments['python_requires']}`", "3.11"]]
    for requirement in arguments["install_requires"]:
        package, *condition = requirement.split(";")
        name = re.split(r"[<>=! ]", package)[0]
        needed = f"`{package[len(name) :].strip()}`" if package != name else "any"
        if condition:
            needed += f", where `{condition[0].strip()}`"
        rows.append([name, needed, pinned.get(name, "not pinned")])
    return table(["package", "needed", "tests run with"], rows)


def frameworks() -> str:
    """What `float8.integrations` was tested with, by `warn_of_version` and constraints.txt."""
    pinned, rows = pins(), []
    for file in sorted((ROOT / "float8" / "integrations").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_of_version"):
                package, first, beyond = (ast.literal_eval(a) for a in node.args)
                span = f"`>={first},<{beyond}`"
                rows.append([TITLES[package], span, pinned[package], f"`float8[{package}]`"])
    rows.append([TITLES["torchao"], "never warns", pinned["torchao"], "`float8[torchao]`"])
    head = ["framework", "warns outside of", "tests run with", "extra"]
    return table(head, sorted(rows, key=lambda row: row[0].lower()))


# --- devices


@contextmanager
def torch_for(cuda: str) -> Iterator[None]:
    """As if torch was built for a CUDA version, with MSLK, and Triton was installed."""
    triton = mock.patch("float8.kernels.products._has_triton", return_value=True)
    mslk = mock.patch("float8.kernels.grouped_products._has_mslk", return_value=True)
    with mock.patch.object(torch.version, "cuda", cuda), triton, mslk:
        yield


class Notes:
    """Reasons of refusals, numbered; one for all architectures and dtypes with the same reason."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def number(self, message: str, family: str, dtype: torch.dtype) -> int:
        """The number of the reason in a message that a layer prints for a family and a dtype."""
        _, _, message = message.partition(": ")  # after the name of the GEMM
        reason = re.sub(rf"^{family} does not run [^:]*: ", "", message)
        reason = re.sub(r"(; |\. Or )set emulate=True.*", "", reason)
        reason = reason.replace(f", not {dtype}", "").replace(f"{family} is", "it is")
        key = reason.replace(family, "").replace(str(dtype), "")
        self.found.setdefault(key, reason)
        return list(self.found).index(key) + 1

    def __str__(self) -> str:
        return "\n".join(f"{i}. `{text}`" for i, text in enumerate(self.found.values(), 1))


def cell(config: Float8LinearConfig, family: str, notes: Notes, grouped: bool = False) -> str:
    """By which GEMMs a device runs a recipe, in which dtypes; numbers of `Notes` for the others."""
    runs: dict[str, list[str]] = {}
    reasons: set[int] = set()
    for dtype in sorted(HIGH_PRECISION_DTYPES, key=list(SHORT).index):
        plan = plan_for(config, family, dtype, grouped)
        reason = reason_against_call(plan, 64, 64, 64, True, True)
        if grouped and reason is not None:
            reason = f"grouped: {reason.partition(': ')[2]}"
        if reason is not None:
            reasons.add(notes.number(reason, family, dtype))
            continue
        names = dict.fromkeys(gemm.name for gemm in plan.gemms if gemm.a is not None)
        runs.setdefault(" and ".join(names), []).append(SHORT[dtype])
    parts = [f"{name}: {_all(dtypes)}" for name, dtypes in runs.items()] or ["refused"]
    if (
        family in DOUBTFUL
        and config.gemms.output.b is not None
        and config.gemms.output.b.block[1] == 32
    ):
        parts = [part if part == "refused" else f"{part}, doubtful" for part in parts]
    numbers = ", ".join(str(number) for number in sorted(reasons))
    return "; ".join(parts).replace("the Triton ", "Triton ").replace("Triton GEMM", "Triton") + (
        f" ({numbers})" if reasons else ""
    )


def _all(dtypes: list[str]) -> str:
    return "all" if len(dtypes) == len(SHORT) else ", ".join(dtypes)


def devices() -> str:
    """The matrix of devices and recipes, and the messages that its numbers stand for."""
    return matrix(RECIPES, grouped=False)


def grouped_gemms() -> str:
    """The same for grouped GEMMs, which no delayed recipe has."""
    recipes = {name: c for name, c in RECIPES.items() if not c.uses_delayed_scaling}
    return matrix(recipes, grouped=True)


def matrix(recipes: dict[str, Float8LinearConfig], grouped: bool) -> str:
    """A row per kind of device, where that matters per version of CUDA; a column per recipe.

    Devices and recipes with equal cells share a row or a column.
    """
    notes, rows = Notes(), {}
    for family in GPUS:
        for cuda in CUDA_VERSIONS:
            with torch_for(cuda):
                rows[family, cuda] = [cell(c, family, notes, grouped) for c in recipes.values()]
    columns: dict[tuple[str, ...], list[str]] = {}
    for i, recipe in enumerate(recipes):
        columns.setdefault(tuple(row[i] for row in rows.values()), []).append(f"`{recipe}`")
    head = ["devices", "has run", *(", ".join(names) for names in columns.values())]
    merged: dict[tuple[str, ...], list[str]] = {}  # the other cells of a row -> its devices
    for i, (family, cuda) in enumerate(rows):
        before, since = (rows[family, version] for version in CUDA_VERSIONS)
        if before == since and cuda == CUDA_VERSIONS[0]:
            continue
        only = "" if before == since else f", CUDA {'<' if cuda == CUDA_VERSIONS[0] else '>='} 12.9"
        name = f"{GPUS[family]} (`{family}`{only})"
        run = "yes" if family in HAS_RUN else "no"
        merged.setdefault((run, *(cells[i] for cells in columns)), []).append(name)
    lines = [["; ".join(names), *cells] for cells, names in merged.items()]
    return f"{table(head, lines)}\n\n{notes}"


def casts() -> str:
    """The formats of each device, and what casts to them."""
    merged: dict[tuple[str, str], list[str]] = {}
    for family in (CPU, *SUPPORT):
        with torch_for(CUDA_VERSIONS[-1]):
            plan = plan_for(RECIPES["rowwise"], family, torch.bfloat16)
        kernel = plan.x.first is not None and plan.x.first.kernel is not None
        formats = [f"`{str(on_family(f, family).dtype).removeprefix('torch.')}`" for f in FORMATS]
        key = " and ".join(formats), "Triton kernels" if kernel else "plain PyTorch"
        merged.setdefault(key, []).append(f"`{family}`")
    rows = [[", ".join(families), *cells] for cells, families in merged.items()]
    return table(["architecture", "formats", "casts"], rows)


FORMATS = (E4M3, E5M2)
PARTS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "devices": devices,
    "grouped_gemms": grouped_gemms,
    "casts": casts,
    "frameworks": frameworks,
}


def with_tables(page: str) -> str:
    """The page with each part between its markers made anew."""
    for name, part in PARTS.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(start)
        if not found or end not in rest:
            raise ValueError(f"docs/compatibility.md has no {start.strip()} ... {end}")
        page = f"{before}{start}\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(part() for part in PARTS.values()))


if __name__ == "__main__":
    main()
