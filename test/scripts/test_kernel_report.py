"""The options of the report: bad ones are refused before anything is compiled."""

import json

import pytest

pytest.importorskip("triton")

from scripts import kernel_report

ROW = {
    "registers": 1, "spills": 0, "shared": 0, "instructions": 1,
    "loads": {16: 1}, "stores": {}, "conversions": {}, "garbage": [],
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What would have been compiled: kernel and architecture."""
    seen: list[tuple[str, str]] = []

    def row(variant, arch):
        seen.append((variant.name, arch))
        return {"kernel": variant.name, "arch": arch, **ROW}

    monkeypatch.setattr(kernel_report, "row", row)
    return seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_75"], "invalid choice: 'sm_75'"),
        (["--arch", "sm_90", "90"], "invalid choice: '90'"),
        (["--only", "no such"], "--only 'no such' is part of no kernel's name; there are amax"),
        (["-o", "."], "cannot write .: it is a directory"),
        (["-o", f"{__file__}/out.json"], f"cannot write {__file__}/out.json"),
    ],
)
def test_bad_options_end_before_compiling(arguments, said, compiled, capsys):
    with pytest.raises(SystemExit) as ended:
        kernel_report.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not compiled


def test_the_default_is_every_architecture(compiled):
    assert kernel_report.main(["--only", "transpose"]) == 0
    archs = [arch for name, arch in compiled if name == "transpose"]
    assert archs == ["sm_89", "sm_90", "sm_100"]


def test_the_directory_is_there_before_compiling(compiled, monkeypatch, tmp_path):
    file, row = tmp_path / "a" / "b" / "out.json", kernel_report.row

    def checked(variant, arch):
        assert file.parent.is_dir()
        return row(variant, arch)

    monkeypatch.setattr(kernel_report, "row", checked)
    assert kernel_report.main(["--only", "transpose", "--arch", "sm_90", "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["kernel"], r["arch"]) for r in rows] == compiled and compiled


def test_a_store_of_garbage_is_shown_and_fails(compiled, monkeypatch, capsys):
    row = kernel_report.row
    way = "byte 0 of R8 may come from the stack pointer"

    def stores_garbage_on_89(variant, arch):
        return {**row(variant, arch), "garbage": [way] if arch == "sm_89" else []}

    monkeypatch.setattr(kernel_report, "row", stores_garbage_on_89)
    assert kernel_report.main(["--only", "transpose", "--arch", "sm_90"]) == 0
    assert way not in capsys.readouterr().out
    assert kernel_report.main(["--only", "transpose"]) == 1
    assert f"transpose, sm_89:\n{way}" in capsys.readouterr().out
