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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_75"], "invalid choice: 'sm_75'"),
        (["--only", "no such"], "--only 'no such' is part of no kernel's name; there are amax"),
        (["--predict", "H200", "--sizes", "16384"], "a size is M,K, not '16384'"),
    ],
)
def test_bad_options_end_before_compiling(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(report, "compile_for", None)
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert said in capsys.readouterr().err + str(ended.value.code)


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
