"""``scripts.kernel_tools run`` counts the forms that ship, and the committed table lacks none."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels.gpu import test_compiled

from scripts.kernel_tools import run
from scripts.kernel_tools.forms import ARCHITECTURES
from scripts.kernel_tools.shipped import FILES, variants

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "executed_ptx.json"


def test_every_file_with_shipped_forms_has_cases():
    assert set(test_compiled.SHIPPED) == set(FILES)


def test_a_form_that_no_case_executes_is_named(monkeypatch):
    (row,) = run.rows("sm_90", "dequantize_groups")
    assert (row.shipped, row.not_executed, row.failed) == (1, [], 0)
    monkeypatch.setitem(test_compiled.SHIPPED, "dequantize_groups", [])  # others have other sizes
    (row,) = run.rows("sm_90", "dequantize_groups")
    assert (row.shipped, row.not_executed) == (1, ["dequantize_groups"])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", FILES)
def test_the_committed_table_has_every_shipped_form(kernel, arch):
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    newest = max((r["triton"] for r in rows), key=lambda v: [int(n) for n in v.split(".")])
    (row,) = (r for r in rows if (r["triton"], r["arch"], r["kernel"]) == (newest, arch, kernel))
    assert row["shipped"] == len(variants((kernel,))), "run scripts.kernel_tools run again"
    assert (row["not_executed"], row["failed"], row["findings"]) == ([], 0, {})
