"""`bench_mup_transfer`: where a curve is lowest, how far that moves, and a run of two steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import studies
from torch import nn

from benchmarks import bench_mup_transfer as bench
from benchmarks.measuring.report import ROOT
from benchmarks.models.decoders import PARAMETRISATIONS
from float8 import Float8Linear, Float8LinearConfig

FAST = ["--device", "cpu", "--quick", "--jobs", "1"]


@pytest.fixture
def in_this_process(monkeypatch):
    studies.made_here(monkeypatch)


def rows_of(curves: dict[tuple[str, int], dict[int, float]]) -> list[dict]:
    return [
        {"layer": name, "width": width, "log2_lr": octave, "loss": loss}
        for (name, width), curve in curves.items()
        for octave, loss in curve.items()
    ]


def parabola(vertex: float, octaves=range(-4, 3)) -> dict[int, float]:
    return {octave: 2 + 0.1 * (octave - vertex) ** 2 for octave in octaves}


@pytest.mark.parametrize("vertex", [-2.0, -1.3, 0.0, 0.49])
def test_the_optimum_of_a_parabola_is_its_vertex(vertex):
    assert bench.optimum(parabola(vertex)) == pytest.approx(vertex)


def test_an_optimum_at_an_edge_or_beside_a_diverged_run_is_that_of_the_grid():
    assert bench.optimum({-1: 2.0, 0: 3.0, 1: 4.0}) == -1
    assert bench.optimum({-2: 4.0, -1: 3.0, 0: 2.0, 2: 9.0}) == 0
    assert bench.optimum({3: 1.0}) == 3


def test_drift_is_from_the_narrowest_to_the_widest():
    rows = rows_of(
        {
            ("standard", 256): parabola(-2.5),
            ("standard", 64): parabola(-0.5),
            ("u-mup", 64): parabola(0.2),
            ("u-mup", 256): parabola(-0.1),
        }
    )
    bench.note_optima(rows)
    found = {(row["layer"], row["mode"]): row for row in bench.drifts(rows)}
    assert found["standard", "drift"]["measured"] == pytest.approx(-2.0)
    assert found["u-mup", "drift"]["measured"] == pytest.approx(-0.3)
    assert found["u-mup", "drift"]["against"] == "width 64 -> 256"
    assert [key for key, row in found.items() if "target" in row] == [("u-mup", "spread")]


def spread_of(*curves: dict[int, float]) -> dict:
    rows = rows_of({("u-mup", 64 * 2**i): curve for i, curve in enumerate(curves)})
    bench.note_optima(rows)
    (target,) = (row for row in bench.drifts(rows) if "target" in row)
    return target


def test_the_target_is_that_no_two_widths_are_more_than_an_octave_apart():
    near, far = (spread_of(parabola(0.2), parabola(v), parabola(0.1)) for v in (-0.5, -1.5))
    assert (near["measured"], near["met"]) == (pytest.approx(0.7), True)
    assert (far["measured"], far["met"]) == (pytest.approx(1.7), False)


def test_optima_at_an_edge_of_the_grid_meet_no_target():
    assert not spread_of(parabola(9), parabola(9))["met"]  # both "at" the largest learning rate
    assert not spread_of(parabola(0), parabola(-4))["met"]
    assert spread_of(parabola(0), parabola(-0.4))["met"]


def test_one_width_is_no_transfer():
    rows = rows_of({("u-mup", 64): parabola(0.2)})
    bench.note_optima(rows)
    assert not any("target" in row for row in bench.drifts(rows))


def test_beside_a_run_that_diverged_is_not_an_edge():
    rows = rows_of({("u-mup", 64): parabola(1.0, range(-1, 2))})
    rows.append({"layer": "u-mup", "width": 64, "log2_lr": 2, "error": "diverged"})
    bench.note_optima(rows)
    assert [row["at_edge"] for row in rows if "optimum" in row] == [False]


def test_room_counts_the_learning_rates_that_lose_little():
    rows = rows_of({("u-mup", 64): {-2: 2.07, -1: 2.05, 0: 2.0, 1: 2.01, 2: 3.0}})
    bench.note_optima(rows)
    assert [row["room"] for row in rows if "room" in row] == [3]  # within 3 % of 2.0: under 2.06
    assert [row["log2_lr"] for row in rows if "optimum" in row] == [0]


def test_the_optimum_of_several_seeds_is_that_of_their_mean():
    rows = rows_of({("u-mup", 64): {-1: 2.0, 0: 2.2, 1: 2.4}})
    rows += rows_of({("u-mup", 64): {-1: 2.6, 0: 2.2, 1: 2.4}})
    assert bench.curve(rows, "u-mup", 64) == pytest.approx({-1: 2.3, 0: 2.2, 1: 2.4})
    rows.append({"layer": "u-mup", "width": 64, "log2_lr": 0, "error": "diverged"})
    assert list(bench.curve(rows, "u-mup", 64)) == [-1, 1]  # a rate that fails once is not best


def test_the_optimum_moves_when_a_file_is_continued():
    rows = rows_of({("u-mup", 64): {-1: 2.1, 0: 2.0}})
    bench.note_optima(rows)
    rows += rows_of({("u-mup", 64): {1: 1.5}})
    bench.note_optima(rows)
    assert [row["log2_lr"] for row in rows if "optimum" in row] == [1]


def test_files_before_the_study_are_read():
    rows = json.loads((ROOT / "benchmarks/results/cpu_mup_transfer.json").read_text())["rows"]
    assert len(bench.curve(rows, "mus", 64)) == 6


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_float8_is_in_every_layer_but_the_head(name):
    parametrisation = PARAMETRISATIONS[name]
    model = parametrisation.in_format(parametrisation.model(64, 1, 16), "float8")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    plain = [n for n, m in linears.items() if not isinstance(m, Float8Linear)]
    assert plain == ["head" if name == "standard" else "projection"]
    (found,) = {str(m.config) for m in linears.values() if isinstance(m, Float8Linear)}
    recipe = "tensorwise" if name == "standard" else "unit"
    assert found == str(Float8LinearConfig.from_recipe_name(recipe))


def test_float8_changes_the_loss_and_names_its_recipe(tmp_path, in_this_process):
    file = tmp_path / "out.json"
    grid = ["--octaves", "-6", "-6", "--widths", "32", "--data", str(Path(bench.__file__).parent)]
    formats = ["--formats", "float32", "float8"]
    bench.main([*FAST, "--variant", "standard", "u-mup", *formats, *grid, "-o", str(file)])
    rows = {(r["layer"], r["width"]): r["loss"] for r in json.loads(file.read_text())["rows"]}
    for name, recipe in (("standard", "tensorwise"), ("u-mup", "unit")):
        plain, float8 = rows[name, 32], rows[f"{name} {recipe}", 32]
        assert float8 == pytest.approx(plain, rel=0.02)
        assert float8 != plain


def test_every_width_is_trained_with_every_learning_rate(tmp_path, capsys, in_this_process):
    file, picture = tmp_path / "out.json", tmp_path / "new" / "out.png"
    variants = ["--variant", "u-mup", "standard"]
    grid = ["--octaves", "-6", "-5", "--data", str(Path(bench.__file__).parent)]
    assert bench.main([*FAST, *variants, *grid, "-o", str(file), "--plot", str(picture)]) == 0
    written = json.loads(file.read_text())
    trained = {(row["layer"], row["width"], row["log2_lr"]) for row in written["rows"]}
    assert trained == {
        (name, width, octave)
        for name in variants[1:]
        for width in bench.QUICK["widths"]
        for octave in (-6, -5)
    }
    assert all(row["loss"] > 0 for row in written["rows"])
    assert [row["layer"] for row in written["targets"]] == ["u-mup"] * 2 + ["standard"] * 2
    assert all(len(row["stream_std"]) == bench.QUICK["layers"] for row in written["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "drift" in capsys.readouterr().out


def test_a_grid_of_learning_rates_can_be_given():
    default, given = (bench.parse(["--device", "cpu", *x]) for x in ([], ["--octaves", "-1", "2"]))
    assert bench.octaves_of("u-mup", default) == PARAMETRISATIONS["u-mup"].octaves
    assert list(bench.octaves_of("u-mup", given)) == [-1, 0, 1, 2]
    with pytest.raises(SystemExit):
        bench.parse(["--octaves", "2", "-1"])


def test_a_picture_has_a_panel_per_parametrisation_and_a_line_per_width():
    rows = rows_of({("standard", 64): parabola(-2), ("u-mup", 64): parabola(0)})
    rows += rows_of({("u-mup", 128): parabola(0.1)})
    standard, unit = bench.draw(rows).axes
    titles = [axes.get_title(loc="left") for axes in (standard, unit)]
    assert titles == ["standard", "u-mup"]
    labels = [line.get_label() for line in unit.get_lines() if len(line.get_xdata()) > 2]
    assert labels == ["width 64", "width 128"]


def test_a_width_that_heads_do_not_divide_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main([*FAST, "--widths", "48"])
    assert "multiple of 32" in capsys.readouterr().err
