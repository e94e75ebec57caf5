"""Pictures of speed-ups by mode, recipe and size."""

from __future__ import annotations

import json

import pytest

from benchmarks.measuring import plots, report
from benchmarks.plots import main

RESULTS = report.ROOT / "benchmarks" / "results"


def made(*rows: tuple[str, str, str, float]) -> dict:
    keys = ("shape", "layer", "mode", "ratio")
    return {
        "benchmark": "bench_linear",
        "environment": {"device": "a machine"},
        "rows": [dict(zip(keys, row, strict=True)) for row in rows],
    }


REPORT = made(
    ("(16,16,16)", "nn.Linear", "eager", 1.0),
    ("(16,16,16)", "rowwise", "eager", 2.0),
    ("70b.ffn.w2 (1,2,3)", "rowwise", "eager", 0.5),
    ("(16,16,16)", "rowwise", "compiled", 0.8),
    ("(16,16,16)", "torchao rowwise", "compiled", 0.9),
)


def test_speed_up_is_the_inverse_of_the_ratio():
    assert plots.panels(REPORT) == {
        "eager": {"rowwise": {"16": 0.5, "70b.ffn.w2": 2.0}},
        "compiled": {"rowwise": {"16": 1.25}, "torchao rowwise": {"16": 1 / 0.9}},
    }


def test_what_did_not_run_is_not_drawn():
    rows = [{"shape": "(1,2,3)", "layer": "rowwise", "mode": "eager", "error": "no"}]
    assert plots.panels({**REPORT, "rows": rows}) == {}


def test_a_panel_per_mode_and_a_line_per_contender():
    eager, compiled = plots.draw(REPORT).axes
    assert [axes.get_title() for axes in (eager, compiled)] == ["eager", "compiled"]
    assert [tick.get_text() for tick in eager.get_xticklabels()] == ["16", "70b.ffn.w2"]
    at_one, rowwise = eager.get_lines()
    assert list(at_one.get_ydata()) == [1, 1]
    assert list(rowwise.get_xydata().flatten()) == [0, 0.5, 1, 2.0]
    _, ours, peer = compiled.get_lines()
    assert ours.get_color() == peer.get_color()
    assert (ours.get_linestyle(), peer.get_linestyle()) == ("-", "--")


@pytest.mark.parametrize(
    "name", ["cpu_bench_linear", "cpu_bench_matmul", "cpu_mup_transfer", "cpu_noamx_demo_nproc2"]
)
def test_committed_results_are_drawn(name, tmp_path):
    picture = tmp_path / "new" / "out.png"
    assert main([str(RESULTS / f"{name}.json"), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_without_a_picture_is_refused(tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**REPORT, "benchmark": "bench_casts"}))
    with pytest.raises(SystemExit):
        main([str(file), "-o", str(tmp_path / "x.png")])
    assert "bench_linear" in capsys.readouterr().err
