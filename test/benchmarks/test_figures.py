"""Every committed figure has its inputs, and the README's shows the numbers of its files."""

from __future__ import annotations

import json
import statistics

import pytest
from PIL import Image

from benchmarks import figures
from benchmarks.measuring import overview
from benchmarks.measuring.report import ROOT
from benchmarks.measuring.shapes import LLAMA3_8B
from float8.config import RECIPES
from float8.estimate import estimate

NOT_FROM_RESULTS = {
    "unit_scales": ROOT / "scripts" / "scale_plot.py",
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


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_figure_is_small_and_sharp_at_the_width_of_a_page(path):
    assert path.stat().st_size < 120_000
    with Image.open(path) as picture:
        assert picture.width >= 1000


@pytest.mark.parametrize("name", [name for name in figures.FIGURES])
def test_the_ground_is_white(name):
    with Image.open(figures.FOLDER / f"{name}.png") as picture:
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


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
    losses = {(r["recipe"], r["seed"]): r["final_val_loss"] for r in read("demo")["runs"]}
    bases = {"unit": "unit_bf16"}
    for run in ("tensorwise", "delayed", "rowwise", "unit", "naive"):
        base = bases.get(run, "bf16")
        gaps = [100 * (losses[run, seed] / losses[base, seed] - 1) for seed in (0, 1, 2)]
        assert rows[run].gaps == pytest.approx(gaps), run
    trained = {(r["layer"], r["seed"]): r["val_loss"] for r in read("quality")["rows"]}
    gaps = [100 * (trained[overview.ALL, s] / trained["bf16", s] - 1) for s in (0, 1, 2)]
    assert rows[overview.ALL].gaps == pytest.approx(gaps)
    assert [trained["bf16", s] for s in (0, 1, 2)] == [losses["bf16", s] for s in (0, 1, 2)]
    for row in read("memory")["rows"]:
        if row["layer"] in rows:
            assert rows[row["layer"]].peak_gib == row["peak_mib"] / 1024
    layers = read("speed")["rows"]
    for run in ("tensorwise", "delayed", "rowwise", "unit"):
        ours = sum(layer["bf16_s"] / layer[run]["speedup"] for layer in layers)
        assert rows[run].speedup == pytest.approx(sum(la["bf16_s"] for la in layers) / ours)
    assert rows["bf16"].gaps == [] and rows["bf16"].speedup == 1
    assert rows["naive"].peak_gib is rows["naive"].speedup is rows[overview.ALL].speedup is None


def test_the_prediction_is_what_estimate_says_of_a_block_on_an_h100():
    shapes = [(shape.M, shape.K, shape.N) for shape in LLAMA3_8B]
    predicted = estimate(shapes, device="H100", recipes=list(RECIPES), show=False).as_dict()
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
    loss, memory, speed = overview.draw(found, overview.seeds_of_bf16()).axes
    for row in found:
        if row.gaps:
            gap = f"{statistics.fmean(row.gaps):+.1f} %".replace("-", "\N{MINUS SIGN}")
            assert gap in texts(loss)
    bars = [patch.get_width() for patch in memory.patches]
    assert bars == [row.peak_gib for row in found if row.peak_gib is not None]
    assert [f"{width:.0f} GiB" for width in bars] == [t for t in texts(memory) if t.endswith("GiB")]
    bars = [patch.get_width() for patch in speed.patches]
    assert bars == [row.speedup for row in found if row.speedup is not None]
    assert all(patch.get_hatch() for patch in speed.patches)
    assert "predicted" in speed.get_title(loc="left")
    assert any("not measured" in text for text in texts(speed))
    assert not any(patch.get_hatch() for patch in memory.patches)


def test_whiskers_reach_from_the_best_to_the_worst_seed():
    row = overview.Row("tensorwise", [0.2, 0.9, 0.4])
    loss = overview.draw([row], [-0.5, 0.5]).axes[0]
    dots = [tuple(line.get_xdata()) for line in loss.get_lines()]
    assert (0.2, 0.9) in dots
    assert (pytest.approx(0.5),) in dots


def test_what_is_out_of_range_is_cut_off():
    row = overview.Row("naive", [44.0, 46.0])
    loss = overview.draw([row], []).axes[0]
    assert "+45.0 %" in texts(loss)
    assert loss.get_xlim() == overview.LOSS_RANGE


def test_no_text_leaves_the_figure_or_covers_another():
    figure = overview.draw(overview.rows(), overview.seeds_of_bf16())
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = [t for axes in figure.axes for t in (*axes.texts, axes._left_title) if t.get_text()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in found]
    for i, (name, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, name
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, name
        for other, space in boxes[i + 1 :]:
            assert not box.padded(-1).overlaps(space.padded(-1)), (name, other)
