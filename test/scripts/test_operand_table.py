"""The script prints what float8 would lose of the demo's model, before and after unit scaling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import operand_table

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "64"]


def test_it_reports_both_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [str(Path(operand_table.__file__).parent), "--device", "cpu"]
    assert operand_table.main([*TINY, "--data", *data, "--out", str(tmp_path / "o.json")]) == 0
    printed = capsys.readouterr().out
    assert "The GPT as it is, loss over 2,048 tokens" in printed
    models = json.loads((tmp_path / "o.json").read_text())["models"]
    assert [len(model["operands"]) for model in models.values()] == [15, 15]  # 3 of 5 products
    plain, unit = (model["median_flushed"]["grad_output"] for model in models.values())
    assert plain > 0.5
    assert unit < 0.01
    assert f"grad_output {plain:.1%}" in printed


def test_bad_input_is_one_line() -> None:
    with pytest.raises(SystemExit, match="--width 100 is not a multiple of 16"):
        operand_table.main(["--width", "100"])
