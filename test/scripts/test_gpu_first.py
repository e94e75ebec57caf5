"""`scripts/gpu_first.py`, whose rows a GPU runs: here on a CPU, and with planted faults."""

import pytest

from float8.config import RECIPES
from scripts import gpu_first

ROWS = [("dense", "delayed", "eager"), ("grouped", "rowwise", "eager")]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(gpu_first, "rows", lambda: iter(ROWS))


def test_every_recipe_has_its_rows(monkeypatch):
    monkeypatch.undo()
    rows = list(gpu_first.rows())
    assert {row[1] for row in rows} == set(RECIPES) and len(set(rows)) == len(rows)
    assert {row[1] for row in rows if row[0] == "grouped"} == {*RECIPES} - {"delayed"}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_one_wrong_result_fails(place, factor, monkeypatch, capsys):
    right = gpu_first.grouped

    def wrong(config, *arguments, **options):
        results = right(config, *arguments, **options)
        if not config.emulate:
            results[place] = results[place] * factor
        return results

    monkeypatch.setattr(gpu_first, "grouped", wrong)
    assert gpu_first.main() == 1
    assert "FAIL     grouped rowwise eager: error" in capsys.readouterr().out


@pytest.mark.parametrize("message", ["no such kernel", ""])
def test_an_error_fails_its_row_alone(message, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(gpu_first, "dense", fails)
    assert gpu_first.main() == 1
    out = capsys.readouterr().out
    assert f"FAIL     dense delayed eager: RuntimeError: {message}" in out
    assert "pass     grouped rowwise eager" in out


def test_what_hopper_refuses_is_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(gpu_first, "rows", lambda: iter([("dense", "mxfp8", "eager")]))
    monkeypatch.setattr(gpu_first, "family_of", lambda device: "sm_90")
    assert gpu_first.main() == 0
    assert "refused  dense mxfp8 eager: sm_90 does not run" in capsys.readouterr().out
