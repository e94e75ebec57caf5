"""The demo's picture shows means, ranges and gaps of its runs; no two names overlap."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from fresh import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from scripts.training import curves
from scripts.training.picture import push_apart

RESULTS = ROOT / "benchmarks" / "results"
DEMO = json.loads((RESULTS / "cpu_noamx_demo.json").read_text())["runs"]
TWO = json.loads((RESULTS / "cpu_noamx_demo_nproc2.json").read_text())["runs"]


def run_of(recipe: str, seed: int = 0, processes: int = 1, **losses: Sequence[float]) -> Any:
    train, held = losses.get("train", (4.0, 3.0, 2.0)), losses.get("held", (3.0, 2.0))
    return {
        "recipe": recipe,
        "seed": seed,
        "processes": processes,
        "train_loss": list(train),
        "val_loss": [[2 * i, loss] for i, loss in enumerate(held, 1)],
        "final_val_loss": held[-1],
    }


def texts_of(figure: Figure) -> list[Text]:
    found = [text for axes in figure.axes for text in (*axes.texts, axes._left_title)]
    return [text for text in found if text.get_text()]


def boxes_of(figure: Figure) -> dict[str, Any]:
    """Where every text is drawn, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    return {
        f"{i} {text.get_text()}": Text.get_window_extent(text, renderer)
        for i, text in enumerate(texts_of(figure))
    }


def first_seed(runs: list[Any]) -> list[Any]:
    return [run for run in runs if run["seed"] == 0]


def diverged() -> list[Any]:
    runs = copy.deepcopy(first_seed(DEMO))
    for run in runs:
        if run["recipe"] == "delayed":
            run["train_loss"][80:] = [math.nan] * 80
            run["val_loss"][-1][1] = run["final_val_loss"] = math.nan
    return runs


def long_names() -> list[Any]:
    runs = copy.deepcopy([run for run in DEMO if run["recipe"] in ("bf16", "rowwise")])
    for run in runs:
        run["recipe"] += "+saved_activations+float8_adamw" * (run["recipe"] != "bf16")
    return runs


CASES = {
    "three seeds": DEMO,
    "one seed": first_seed(DEMO),
    "two processes": TWO,
    "one recipe": [run for run in DEMO if run["recipe"] == "rowwise"],
    "one run": DEMO[:1],
    "not a number": diverged(),
    "long names": long_names(),
    "one step": [run_of("bf16", train=[5.0], held=[5.0]), run_of("unit", train=[5.0], held=[4.9])],
}


@pytest.mark.parametrize("case", CASES)
def test_every_text_is_inside_of_the_picture_and_covers_no_other(case: str) -> None:
    figure = curves.draw(CASES[case])
    boxes = boxes_of(figure)
    for name, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0, name
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, name
    names = list(boxes)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not boxes[one].padded(-1).overlaps(boxes[other].padded(-1)), (one, other)


@pytest.mark.parametrize("case", CASES)
def test_every_run_has_a_line_and_a_name_in_its_colour(case: str) -> None:
    axes = curves.draw(CASES[case]).axes[0]
    lines = {line.get_label(): line.get_color() for line in axes.get_lines()}
    expected = {f"{r['recipe']} {curves.times(r.get('processes', 1))}".strip() for r in CASES[case]}
    assert set(lines) == expected
    written = {text.get_text().split()[0] for text in axes.texts}
    assert written >= {name.split()[0] for name in expected}


def test_the_seven_recipes_have_seven_colours() -> None:
    axes = curves.draw(DEMO).axes[0]
    assert len({line.get_color() for line in axes.get_lines()}) == len(axes.get_lines()) == 7


def test_a_line_is_the_mean_and_its_band_reaches_from_the_best_to_the_worst_seed() -> None:
    runs = [run_of("bf16", seed, train=[3 + seed, 2 + seed]) for seed in (0, 1, 5)]
    (curve,) = curves.training_curves(runs)
    assert curve.x == [1, 2]
    assert curve.mean[0] == pytest.approx(5)
    assert (curve.low[0], curve.high[0]) == (pytest.approx(3), pytest.approx(8))
    assert curve.mean[-1] == pytest.approx(
        sum(curves.smooth(r["train_loss"])[-1] for r in runs) / 3
    )


def test_a_gap_is_to_the_same_seeds_base_of_as_many_processes() -> None:
    runs = [
        run_of("bf16", 0, held=[2.0, 1.0]), run_of("bf16", 1, held=[3.0, 2.0]),
        run_of("bf16", 0, 2, held=[4.0, 2.0]), run_of("unit_bf16", 0, held=[1.0, 0.5]),
        run_of("rowwise", 0, held=[2.2, 1.1]), run_of("rowwise", 1, held=[3.0, 2.4]),
        run_of("rowwise", 0, 2, held=[4.0, 2.1]), run_of("unit", 0, held=[1.0, 0.6]),
        run_of("unit+saved_activations", 1),
    ]  # fmt: skip
    found = {curve.name: curve for curve in curves.gap_curves(runs)}
    assert list(found) == ["rowwise", "rowwise x2", "unit"]
    assert found["rowwise"].x == [2, 4]
    assert found["rowwise"].mean == pytest.approx([5, 15])
    assert found["rowwise"].high == pytest.approx([10, 20])
    assert found["rowwise x2"].mean == pytest.approx([0, 5])
    assert found["unit"].mean == pytest.approx([0, 20])


def test_gaps_at_the_end_are_those_of_the_result_file() -> None:
    figure = curves.draw(DEMO)
    assert len(figure.axes) == 2
    written = " ".join(text.get_text() for text in figure.axes[1].texts)
    for recipe in ("tensorwise", "delayed", "rowwise", "naive", "unit"):
        gaps = [run["gap_to_base_percent"] for run in DEMO if run["recipe"] == recipe]
        gap = f"{sum(gaps) / len(gaps):+.1f} %".replace("-", "\N{MINUS SIGN}")
        assert f"{recipe} {gap}" in written


def test_without_a_base_there_is_one_panel() -> None:
    assert len(curves.draw([run_of("rowwise"), run_of("unit")]).axes) == 1


def test_what_ends_far_above_the_others_is_cut_off_with_its_number() -> None:
    assert curves.cut_off(DEMO) == {"naive"}
    axes, gaps = curves.draw(DEMO).axes
    naive = next(curve for curve in curves.training_curves(DEMO) if curve.name == "naive")
    assert axes.get_ylim()[1] < naive.end
    assert f"naive {naive.end:.2f} \N{UPWARDS ARROW}" in [text.get_text() for text in axes.texts]
    assert gaps.get_ylim()[1] < 10


def test_what_is_not_a_number_is_named_so() -> None:
    axes, gaps = curves.draw(diverged()).axes
    assert curves.cut_off(diverged()) == {"naive", "delayed"}
    for panel in (axes, gaps):
        assert "delayed nan" in [text.get_text() for text in panel.texts]
    nothing = [run_of("bf16", held=[math.nan, math.nan], train=[math.nan] * 3)]
    assert "bf16 nan" in [text.get_text() for text in curves.draw(nothing).axes[0].texts]


def test_smoothing_neither_lags_nor_starts_at_zero() -> None:
    assert curves.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_labels_move_as_little_as_they_must() -> None:
    assert push_apart([], 0.1, 0, 1) == []
    assert push_apart([0.2, 0.8], 0.1, 0, 1) == [0.2, 0.8]
    assert push_apart([0.5, 0.5], 0.1, 0, 1) == pytest.approx([0.45, 0.55])
    assert push_apart([1.0, 0.98], 0.1, 0, 1) == pytest.approx([1.0, 0.9])
    assert push_apart([0.0, 0.01, 0.9], 0.1, 0, 1) == pytest.approx([0, 0.1, 0.9])
    assert push_apart([0.5] * 5, 0.5, 0, 1) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
