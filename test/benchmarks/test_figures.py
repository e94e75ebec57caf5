"""Every committed figure has its inputs, and the README's shows the numbers of its files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import bench_quality, figures
from benchmarks.measuring.shapes import LLAMA3_8B
from benchmarks.quality.contenders import NOISE, SAVING
from float8.config import RECIPES
from float8.estimate import estimate


def rows_of(panel: str) -> list[dict]:
    return figures.result(figures.OVERVIEW[panel])["rows"]


def test_the_overview_has_the_numbers_of_its_files():
    ways = {way.run: way for way in figures.ways()}
    lines = {line["layer"]: line for line in bench_quality.lines(rows_of("loss"))}
    assert set(ways) <= lines.keys()
    for run, way in ways.items():
        if run != "bf16":
            assert way.gap == (lines[run]["gap_percent"], lines[run]["gap_half_width"]), run
    for row in rows_of("memory"):
        if row["layer"] in ways:
            assert ways[row["layer"]].peak_gib == row["peak_mib"] / 1024
    layers = rows_of("speed")
    for run in ("tensorwise", "delayed", "rowwise"):
        ours = sum(layer["bf16_s"] / layer[run]["speedup"] for layer in layers)
        assert ways[run].speedup == pytest.approx(sum(la["bf16_s"] for la in layers) / ours)
    assert [run for run, way in ways.items() if way.speedup is None] == [NOISE, SAVING]
    loss, memory, speed = figures.overview().axes
    shown = [
        f"{way.gap[0]:+.2f} %".replace("-", "\N{MINUS SIGN}") for way in ways.values() if way.gap
    ]
    assert set(shown) <= {text.get_text().strip() for text in loss.texts}
    bars = [patch.get_width() for patch in memory.patches]
    assert bars == [way.peak_gib for run, way in ways.items() if run != NOISE]
    assert not any(patch.get_hatch() for patch in memory.patches)
    assert all(patch.get_hatch() for patch in speed.patches)
    assert any("not measured" in text.get_text() for text in speed.texts)


def test_the_speed_up_is_of_bf16_weights_and_the_pages_have_that_of_float32():
    shapes = [(shape.N, shape.K) for shape in LLAMA3_8B]
    assert {shape.M for shape in LLAMA3_8B} == {16384}
    with torch.device("meta"):
        block = nn.ModuleList(nn.Linear(k, n, bias=False) for n, k in shapes)
    speedups = []
    for dtype in (torch.bfloat16, torch.float32):
        found = estimate(block.to(dtype), tokens=16384, device="H100", recipes="tensorwise")
        speedups.append(found.total("tensorwise").speedup)
    in_bf16, in_float32 = (f"{speedup:.2f}x" for speedup in speedups)
    assert in_bf16 == f"{next(w for w in figures.ways() if w.run == 'tensorwise').speedup:.2f}x"
    for page in ("README.md", "docs/speed.md"):
        text = " ".join((figures.ROOT / page).read_text(encoding="utf-8").split())
        assert f"float32 weights under autocast: {in_float32}" in text, page


def test_the_prediction_is_what_estimate_says_of_a_block_on_an_h100():
    shapes = [(shape.M, shape.K, shape.N) for shape in LLAMA3_8B]
    predicted = estimate(shapes, device="H100", recipes=list(RECIPES)).as_dict()
    written = figures.result(figures.OVERVIEW["speed"])
    assert written["device"] == predicted["device"] == "H100 SXM"
    assert written["sources"] == predicted["sources"]
    for row, expected in zip(written["rows"], predicted["rows"], strict=True):
        assert row["bf16_s"] == pytest.approx(expected["bf16_s"])
        for recipe in RECIPES:
            if "refused" in expected[recipe]:  # mxfp8, by an H100
                assert "refused" in row[recipe]
            else:
                assert row[recipe] == pytest.approx(expected[recipe]), recipe
