"""The report: bad options are refused before anything is compiled; garbage is shown and fails."""

import json

import pytest

pytest.importorskip("triton")
pytest.importorskip("tabulate")

from scripts.kernel_tools import report
from scripts.kernel_tools.__main__ import main

ROW = {
    "registers": 1, "spills": 0, "shared": 0, "instructions": 1,
    "loads": {16: 1}, "stores": {}, "conversions": {}, "garbage": [],
}  # fmt: skip


def test_a_store_of_garbage_is_shown_and_fails(monkeypatch, capsys, tmp_path):
    way = "byte 0 of R8 may come from the stack pointer"

    def row(variant, arch):
        garbage = [way] if arch == "sm_89" else []
        return {"kernel": variant.name, "arch": arch, **ROW, "garbage": garbage}

    monkeypatch.setattr(report, "row", row)
    assert main(["report", "--only", "transpose", "--arch", "sm_90"]) == 0
    assert way not in capsys.readouterr().out
    file = tmp_path / "a" / "out.json"
    assert main(["report", "--only", "transpose", "-o", str(file)]) == 1
    assert f"transpose, sm_89:\n{way}" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    archs = [row["arch"] for row in rows if row["kernel"] == "transpose"]
    assert archs == ["sm_89", "sm_90", "sm_100"]
