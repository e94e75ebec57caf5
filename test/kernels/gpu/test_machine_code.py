"""Every shipped kernel compiles for every architecture, and its machine code is what it should be.

No GPU is needed: Triton compiles for one that is not there, and `scripts.kernel_tools report` reads
the cubin. Held: no registers spill, bulk accesses to device memory are 16 bytes wide, float8 comes
from conversion instructions, and no store writes garbage (`test/kernel_tools/test_scan.py` has
the faults that the scan for it must find).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from scripts.kernel_tools.__main__ import main
from scripts.kernel_tools.forms import ARCHITECTURES, compile_for
from scripts.kernel_tools.report import row
from scripts.kernel_tools.shipped import variants

pytestmark = pytest.mark.slow

VARIANTS = variants()


FIRST = {variant.kernel: variant for variant in reversed(VARIANTS)}.values()
# In E5M2 if it ships so; the first is in E4M3.
LAST = {v.kernel: v for v in sorted(VARIANTS, key=lambda v: v.constants.get("FORMAT") == "fp8e5")}
CHOSEN = {"sm_89": FIRST, "sm_90": VARIANTS, "sm_100": LAST.values()}
assert set(CHOSEN) == set(ARCHITECTURES)
CASES = [
    pytest.param(variant, arch, id=f"{variant.name}, {arch}")
    for arch, chosen in CHOSEN.items()
    for variant in chosen
]


_BY_8_COLUMNS = ("whole rows", "swiglu_gradients")


@pytest.mark.parametrize(("variant", "arch"), CASES)
def test_machine_code(variant, arch):
    found = row(variant, arch)
    assert not found["garbage"], "\n".join(found["garbage"])
    assert found["spills"] == 0
    assert found["registers"] <= 255
    for access in ("loads", "stores"):
        widths = found[access]
        total = sum(width * n for width, n in widths.items())
        # Scales, a bias, partial amaxes and the like are at most 12 words; the matrices are not.
        # These have 8 columns a thread: 8 bytes of float8, 256 or 64 adjacent ones a warp.
        wide = 8 if any(name in variant.name for name in _BY_8_COLUMNS) else 16
        moved = sum(width * n for width, n in widths.items() if width >= wide)
        assert moved >= 0.7 * total or total - moved <= 48, (access, widths)
    if "FORMAT" in variant.constants and "mm" not in variant.name:
        encodes = [name for name in found["conversions"] if "UNPACK" not in name]
        assert encodes and all(name.startswith("F2FP.SATFINITE") for name in encodes)


@pytest.mark.parametrize("variant", FIRST, ids=lambda v: v.name)
def test_a_size_of_one_compiles(variant):
    """Triton makes a constant of an argument that is 1: a kernel that then fails, fails on M=1."""
    sizes = [name for name in variant.types if len(name) == 1]
    assert sizes
    types = {name: kind for name, kind in variant.types.items() if name not in sizes}
    constants = {**variant.constants, **dict.fromkeys(sizes, 1)}
    types = {n: "*u8" if n == "data_t_ptr" else kind for n, kind in types.items()}
    assert compile_for(replace(variant, types=types, constants=constants), "sm_90").asm["cubin"]


def test_the_report_prints_and_writes_what_it_reads(tmp_path, capsys):
    pytest.importorskip("tabulate")
    file = tmp_path / "report.json"
    assert main(["report", "--arch", "sm_90", "--only", "transpose", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "transpose" in printed
    assert "4x16" in printed
    assert '"registers"' in file.read_text()


def test_a_narrow_access_is_seen():
    """The planted fault: with sizes that nothing divides, accesses are narrow."""
    transpose = next(v for v in VARIANTS if v.name == "transpose")
    narrow = type(transpose)(
        transpose.name,
        transpose.kernel,
        {**transpose.types, "data_t_ptr": "*u8"},
        transpose.constants,
        transpose.options,
    )
    assert min(row(narrow, "sm_90")["stores"]) == 1
