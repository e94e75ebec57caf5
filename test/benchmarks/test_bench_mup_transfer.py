"""`bench_mup_transfer`: where a curve is lowest, how far that moves, and a run of two steps."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_mup_transfer as bench
from benchmarks.decoders import PARAMETRISATIONS

FAST = ["--device", "cpu", "--quick"]


def rows_of(curves: dict[tuple[str, int], dict[int, float]]) -> list[dict]:
    return [
        {"layer": name, "width": width, "log2_lr": octave, "val_loss": loss}
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
    standard, unit = bench.drifts(rows)
    assert standard["measured"] == pytest.approx(-2.0)
    assert "target" not in standard
    assert unit["measured"] == pytest.approx(-0.3)
    assert unit["met"]
    assert unit["against"] == "width 64 -> 256"


def test_an_optimum_that_drifts_does_not_meet_the_target():
    rows = rows_of({("u-mup", 64): parabola(0.2), ("u-mup", 256): parabola(-1.5)})
    bench.note_optima(rows)
    assert [row["met"] for row in bench.drifts(rows)] == [False]


def test_room_counts_the_learning_rates_that_lose_little():
    rows = rows_of({("u-mup", 64): {-2: 2.07, -1: 2.05, 0: 2.0, 1: 2.01, 2: 3.0}})
    bench.note_optima(rows)
    assert [row["room"] for row in rows if "room" in row] == [3]  # within 3 % of 2.0: under 2.06
    assert [row["log2_lr"] for row in rows if "optimum" in row] == [0]


def test_every_width_is_trained_with_every_learning_rate(tmp_path, capsys):
    file, picture = tmp_path / "out.json", tmp_path / "new" / "out.png"
    variants = ["--variant", "u-mup", "standard"]
    assert bench.main([*FAST, *variants, "-o", str(file), "--plot", str(picture)]) == 0
    written = json.loads(file.read_text())
    trained = {(row["layer"], row["width"], row["log2_lr"]) for row in written["rows"]}
    assert trained == {
        (name, width, octave)
        for name in variants[1:]
        for width in bench.QUICK["widths"]
        for octave in PARAMETRISATIONS[name].octaves
    }
    assert all(row["val_loss"] > 0 for row in written["rows"])
    assert [row["layer"] for row in written["targets"]] == ["u-mup", "standard"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "drift" in capsys.readouterr().out


def test_a_picture_has_a_panel_per_parametrisation_and_a_line_per_width():
    rows = rows_of({("standard", 64): parabola(-2), ("u-mup", 64): parabola(0)})
    rows += rows_of({("u-mup", 128): parabola(0.1)})
    standard, unit = bench.draw(rows).axes
    assert (standard.get_title(), unit.get_title()) == ("standard", "u-mup")
    labels = [line.get_label() for line in unit.get_lines() if len(line.get_xdata()) > 2]
    assert labels == ["width 64", "width 128"]


def test_a_width_that_heads_do_not_divide_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main([*FAST, "--widths", "48"])
    assert "multiples of 32" in capsys.readouterr().err
