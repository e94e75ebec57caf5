"""The tables of docs/compatibility.md are those of the code."""

import re

import pytest

pytest.importorskip("triton")  # the kernels that a plan for a GPU imports

from float8.kernels.scaled_mm import BLOCKWISE, CPU, ROWWISE, SUPPORT
from scripts import compatibility

PAGE = compatibility.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_code():
    assert compatibility.with_tables(PAGE) == PAGE, (
        "docs/compatibility.md is out of date: run `python scripts/compatibility.py --write`"
    )


def test_every_architecture_of_the_code_has_a_row():
    assert {CPU, *SUPPORT} < set(compatibility.GPUS)


def test_a_changed_table_of_the_code_makes_the_page_outdated(monkeypatch):
    monkeypatch.setitem(SUPPORT, "sm_100", {**SUPPORT["sm_100"], ROWWISE: "takes no rows"})
    row = next(line for line in compatibility.devices().splitlines() if "`sm_100`" in line)
    assert re.search(r"torch._scaled_mm: all \| refused \(\d\) \|", row)
    assert compatibility.with_tables(PAGE) != PAGE


def test_cells_depend_on_the_version_of_cuda():
    rows = [line for line in compatibility.devices().splitlines() if "`sm_90`" in line]
    assert len(rows) == 2
    assert BLOCKWISE in compatibility.devices().splitlines()[0]
    assert "Triton: all" in rows[0]
    assert "torch._scaled_mm: bf16, fp32; Triton: fp16" in rows[1]


def test_a_page_without_a_marker_is_refused():
    with pytest.raises(ValueError, match="has no <!-- casts -->"):
        compatibility.with_tables(PAGE.replace("<!-- casts -->\n", ""))
