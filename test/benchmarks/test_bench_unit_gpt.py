"""`bench_unit_gpt`: the order of segments, gaps, and a command that is stopped and continued."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import studies

from benchmarks import bench_unit_gpt as bench
from benchmarks.measuring.report import ROOT


def row(name: str, until: int, loss: float | None, seed: int = 0) -> dict:
    found = {} if loss is None else {"loss": loss, "train_loss": [loss + 1, loss]}
    error = {"error": "diverged"} if loss is None else {}
    return {"run": {"contender": name, "seed": seed, "until": until}, **found, **error}


def line(rows: list[dict], name: str) -> dict:
    (found,) = (line for line in bench.lines(rows) if line["layer"] == name)
    return found


def test_gaps_are_to_the_same_model_and_to_bf16_after_equally_many_steps():
    rows = [row("bf16", 2, 4.0), row("unit_bf16", 2, 2.0), row("unit", 2, 2.1)]
    rows += [row("bf16", 4, 1.0), row("naive", 2, 5.0)]
    unit = line(rows, "unit")
    assert (unit["gap_percent"], unit["bf16_gap_percent"]) == pytest.approx((5, -47.5))
    naive = line(rows, "naive")
    assert naive["steps"] == 2
    assert naive["gap_percent"] == naive["bf16_gap_percent"] == pytest.approx(25)
    assert "gap" not in line(rows, "bf16")
    assert line(rows, "bf16")["loss"] == 1.0


def test_several_seeds_are_paired():
    rows = [row("unit_bf16", 2, loss, seed) for seed, loss in enumerate((2.0, 4.0))]
    rows += [row("unit", 2, loss, seed) for seed, loss in enumerate((2.02, 4.0))]
    assert line(rows, "unit")["gap"] == "+0.50 ± 6.35 %"  # 12.706 * 0.7071 / sqrt(2)


@pytest.mark.parametrize(
    ("losses", "met"), [((2.0, 2.0), [True, True]), ((2.0, 1.9), [True, False])]
)
def test_the_target_is_for_the_unit_scaled_model_in_float8(losses, met):
    rows = [row("unit_bf16", 2, losses[0]), row("bf16", 2, losses[1]), row("unit", 2, 2.01)]
    rows.append(row("naive", 2, 9.0))
    found = bench.targets(bench.lines(rows))
    assert [target["met"] for target in found] == met
    assert {target["layer"] for target in found} == {"unit"}


def test_the_target_is_for_the_end_of_the_interval_of_several_seeds():
    rows = [row("unit_bf16", 2, 2.0, seed) for seed in (0, 1)]
    rows += [row("unit", 2, loss, seed) for seed, loss in enumerate((2.0, 2.02))]
    (target,) = bench.targets(bench.lines(rows))
    assert target["measured"] == pytest.approx(0.5 + 6.353, abs=1e-3) and not target["met"]


def test_a_training_that_diverged_in_its_first_segment_misses_the_targets():
    rows = [row("unit_bf16", 2, 2.0), row("bf16", 2, 2.0), row("unit", 2, None)]
    assert [target["met"] for target in bench.targets(bench.lines(rows))] == [False, False]


def test_a_training_that_diverged_meets_no_target_and_has_no_more_segments():
    rows = [row("unit_bf16", 2, 2.0), row("unit", 2, 2.0), row("unit", 4, None)]
    assert [target["met"] for target in bench.targets(bench.lines(rows))] == [False, False]
    options = bench.parse(["--device", "cpu", "-o", "x.json"])
    names = [segment.contender for segment in bench.segments(options, 100, rows)]
    assert names == ["bf16", "naive", "unit_bf16"]


def test_segments_cover_all_steps_once():
    options = bench.parse(["--device", "cpu", "--steps", "250", "-o", "x.json"])
    ends = [bench.segments(options, first, [])[0] for first in range(0, 250, 100)]
    assert [(s.first, s.until) for s in ends] == [(0, 100), (100, 200), (200, 250)]
    assert {s.learning_rate for s in bench.segments(options, 0, [])} == {1e-3, bench.UNIT_RATE}


def test_a_curve_is_that_of_one_seed_in_order():
    rows = [row("unit", 4, 1.0), row("unit", 2, 3.0), row("unit", 2, 9.0, seed=1)]
    assert bench.curves(rows, "unit") == ([4.0, 3.0, 2.0, 1.0], [[2, 3.0], [4, 1.0]])


def test_stopped_and_continued_it_ends_with_the_same_numbers(tmp_path, monkeypatch):
    made = []

    def stops_after_three(train, run):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(run)
        return train(run)

    def numbers(file):
        rows = json.loads(file.read_text())["rows"]
        return {
            (r["run"]["contender"], r["run"]["until"]): (r["loss"], r["train_loss"]) for r in rows
        }

    quick = ["--device", "cpu", "--quick", "--jobs", "1", "--contenders", "bf16", "unit"]
    quick += ["--data", str(ROOT / "benchmarks" / "models")]
    whole, stopped, picture = (tmp_path / name for name in ("a.json", "b.json", "b.png"))
    studies.made_here(monkeypatch)
    bench.main([*quick, "-o", str(whole)])
    studies.made_here(monkeypatch, stops_after_three)
    with pytest.raises(SystemExit, match="interrupted"):
        bench.main([*quick, "-o", str(stopped)])
    assert [(s.contender, s.until) for s in made] == [("bf16", 2), ("unit", 2), ("bf16", 4)]
    assert len(numbers(stopped)) == 3
    studies.made_here(monkeypatch)
    bench.main([*quick, "-o", str(stopped), "--plot", str(picture)])
    assert numbers(stopped) == numbers(whole)
    assert len(numbers(whole)) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--every", "50"], "'first': 100, 'until': 200"),
        (["--steps", "400"], "'steps': 300"),
        (["--width", "64"], "'width': 384"),
        ([], None),
    ],
)
def test_a_file_of_other_trainings_is_refused(options, message, tmp_path):
    file = tmp_path / "x.json"
    begun = bench.parse(["--device", "cpu", "-o", str(file)])
    rows = [{"run": asdict(bench.segments(begun, 100, [])[0]), "loss": 2.0, "train_loss": []}]
    file.write_text(json.dumps({"benchmark": "bench_unit_gpt", "rows": rows}))
    chosen = bench.parse(["--device", "cpu", *options, "-o", str(file)])
    if message is None:
        bench.check(rows, chosen)
        return
    with pytest.raises(ValueError, match=message):
        bench.check(rows, chosen)
    with pytest.raises(SystemExit, match=message):
        bench.main(["--device", "cpu", *options, "-o", str(file)])


def test_a_file_is_needed(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--quick"])
    assert "-o FILE is needed" in capsys.readouterr().err
