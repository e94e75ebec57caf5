"""Every committed figure has its inputs, and the README's shows the numbers of its files."""

from __future__ import annotations

import json

import pytest

from benchmarks import figures
from benchmarks.measuring import overview
from benchmarks.measuring.report import ROOT
from benchmarks.measuring.shapes import LLAMA3_8B
from benchmarks.quality import recipes
from benchmarks.quality.contenders import SAVING, UNIT_DYNAMIC
from float8.config import RECIPES
from float8.estimate import estimate

NOT_FROM_RESULTS = {
    "unit_scales": ROOT / "float8" / "unit_scaling" / "analysis",
    "report": ROOT / "float8" / "numerics",
}
COMMITTED = sorted((ROOT / "docs" / "figures").glob("*.png"))


def read(name: str) -> dict:
    return json.loads((overview.RESULTS / overview.SOURCES[name]).read_text())


def test_every_committed_figure_can_be_drawn_again():
    assert {path.stem for path in COMMITTED} == figures.FIGURES.keys() | NOT_FROM_RESULTS.keys()
    assert all(path.exists() for path in NOT_FROM_RESULTS.values())
    inputs = {name for figure in figures.FIGURES.values() for name in figure.inputs}
    assert all((overview.RESULTS / name).is_file() for name in inputs)


def test_figures_are_drawn_by_name(tmp_path, capsys):
    assert figures.main(["overview", "--folder", str(tmp_path / "new")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["overview.png"]
    assert "predicted_h100.json" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        figures.main(["nothing"])
    assert "overview, demo" in capsys.readouterr().err


def test_the_rows_are_the_numbers_of_their_files():
    rows = {row.run: row for row in overview.rows()}
    assert tuple(rows) == tuple(overview.WAYS)
    lines = {line["layer"]: line for line in recipes.lines(read("loss")["rows"])}
    for run, row in rows.items():
        if run in lines and run != "bf16":
            found = lines[run]
            assert row.gap == (found["gap_percent"], found["gap_half_width"]), run
            assert (row.seeds, row.steps) == (found["seeds"], 2000)
    assert set(overview.WAYS) <= lines.keys()
    for row in read("memory")["rows"]:
        if row["layer"] in rows:
            assert rows[row["layer"]].peak_gib == row["peak_mib"] / 1024
    layers = read("speed")["rows"]
    for run in ("tensorwise", "delayed", "rowwise"):
        ours = sum(layer["bf16_s"] / layer[run]["speedup"] for layer in layers)
        assert rows[run].speedup == pytest.approx(sum(la["bf16_s"] for la in layers) / ours)
    assert rows["bf16"].gap is None and rows["bf16"].speedup == 1
    assert rows[SAVING].speedup is rows[UNIT_DYNAMIC].speedup is None


def test_the_prediction_is_what_estimate_says_of_a_block_on_an_h100():
    shapes = [(shape.M, shape.K, shape.N) for shape in LLAMA3_8B]
    predicted = estimate(shapes, device="H100", recipes=list(RECIPES)).as_dict()
    written = read("speed")
    assert written["device"] == predicted["device"] == "H100 SXM"
    assert written["sources"] == predicted["sources"]
    for row, expected in zip(written["rows"], predicted["rows"], strict=True):
        assert row["shape"] == expected["shape"]
        assert row["bf16_s"] == pytest.approx(expected["bf16_s"])
        for recipe in RECIPES:
            if "refused" in expected[recipe]:  # mxfp8, by an H100
                assert "refused" in row[recipe]
            else:
                assert row[recipe] == pytest.approx(expected[recipe]), recipe


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_figure_writes_the_numbers_of_the_rows_and_says_what_is_predicted():
    found = overview.rows()
    loss, memory, speed = overview.draw(found).axes
    for y, row in enumerate(found):
        if row.gap:
            gap = f"{row.gap[0]:+.2f} %".replace("-", "\N{MINUS SIGN}")
            assert [text.get_text() for text in loss.texts if text.get_position()[1] == y] == [gap]
    bars = [patch.get_width() for patch in memory.patches]
    assert bars == [row.peak_gib for row in found if row.peak_gib is not None]
    assert [f"{width:.0f} GiB" for width in bars] == [t for t in texts(memory) if t.endswith("GiB")]
    bars = [patch.get_width() for patch in speed.patches]
    assert bars == [row.speedup for row in found if row.speedup is not None]
    assert all(patch.get_hatch() for patch in speed.patches)
    assert "predicted" in speed.get_title(loc="left")
    assert any("not measured" in text for text in texts(speed))
    assert not any(patch.get_hatch() for patch in memory.patches)
