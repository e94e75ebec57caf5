"""The demo's picture has a line for each run, and gaps are to the base of the same seed."""

import pytest

pytest.importorskip("matplotlib")

from scripts.training.curves import draw, gaps_of, losses_of, smooth

LOSSES = {("bf16", 1): 2.0, ("unit_bf16", 1): 2.0, ("unit", 1): 2.1, ("naive", 1): 3.0}
LOSSES |= {("bf16", 2): 2.1, ("bf16+float8_adamw", 2): 2.205}
RUNS = [
    {
        "recipe": recipe, "processes": processes, "seed": seed, "final_val_loss": loss + seed,
        "train_loss": [4.0, 3.0, loss], "val_loss": [(2, loss + 1), (3, loss + seed)],
    }
    for (recipe, processes), loss in LOSSES.items()
    for seed in (0, 1)
]  # fmt: skip


def test_a_gap_is_to_the_same_seeds_base_of_as_many_processes():
    gaps = gaps_of(RUNS)
    assert list(gaps) == ["unit", "naive", "bf16+float8_adamw x2"]
    steps, (first, second) = gaps["unit"]
    assert steps == [2, 3]
    assert first == pytest.approx([100 * (3.1 / 3 - 1), 5]) and len(second) == 2
    assert gaps["bf16+float8_adamw x2"][1][0][-1] == pytest.approx(5)


def test_every_run_has_a_line_and_what_ends_far_above_leaves_the_panel():
    left, right = draw(RUNS).axes
    names = [line.get_label() for line in left.get_lines()]
    assert names == list(losses_of(RUNS)) and len({line.get_color() for line in left.lines}) >= 5
    assert len(draw(RUNS[:2]).axes) == 1  # no base, no gaps
    assert 5 < right.get_ylim()[1] < 20  # naive is 50 % above


def test_smoothing_neither_lags_nor_starts_at_zero():
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
