"""Every committed figure has its inputs, and the README's shows the numbers of its files."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import bench_quality, figures
from benchmarks.measuring.shapes import LLAMA3_8B
from benchmarks.quality.contenders import NOISE, SAVING
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
    measured = {
        row["layer"]: 1 / row["ratio"]
        for row in figures.result("h100_2026-11-27/bench_model")["rows"]
        if row["mode"] == "compiled" and "ratio" in row
    }
    assert ways["tensorwise"].speedup == measured["tensorwise"]
    for run in ("delayed", "rowwise"):
        assert not ways[run].is_measured and 1 < ways[run].speedup < 1.55  # the limit of two blocks
    assert [run for run, way in ways.items() if way.speedup is None] == [NOISE, SAVING]
    loss, memory, speed = figures.overview().axes
    shown = [
        f"{way.gap[0]:+.2f} %".replace("-", "\N{MINUS SIGN}") for way in ways.values() if way.gap
    ]
    assert set(shown) <= {text.get_text().strip() for text in loss.texts}
    bars = [patch.get_width() for patch in memory.patches]
    assert bars == [way.peak_gib for run, way in ways.items() if run != NOISE]
    assert not any(patch.get_hatch() for patch in memory.patches)
    with_bars = [way for way in ways.values() if way.speedup is not None]
    assert [bool(p.get_hatch()) for p in speed.patches] == [not w.is_measured for w in with_bars]
    assert any("hatched: predicted" in text.get_text() for text in speed.texts)


def test_the_page_has_the_speed_up_of_float32_weights():
    shapes = [(shape.N, shape.K) for shape in LLAMA3_8B]
    assert {shape.M for shape in LLAMA3_8B} == {16384}
    with torch.device("meta"):
        block = nn.ModuleList(nn.Linear(k, n, bias=False) for n, k in shapes)
    found = estimate(block, tokens=16384, device="H100", recipes="tensorwise")
    speedup = found.total("tensorwise").speedup
    text = " ".join((figures.ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    assert f"float32 weights under autocast: {speedup:.2f}x" in text


def test_the_page_has_what_was_traced_of_two_blocks():
    rows = {row["layer"]: row for row in figures.result("traced_h100")["rows"]}
    page = " ".join((figures.ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())

    def cells(name):
        return f"{rows[name]['saved_mib']:,.0f} | {rows[name]['predicted_ms']:.1f}"

    for recipe in ("tensorwise", "delayed"):
        for parts in ("", "+feed_forward", "+feed_forward+keep_float8"):
            name = recipe + parts
            assert f"| {cells(name + ' speed')} | {cells(name + ' memory')} |" in page
    fastest = rows["delayed+feed_forward+fuse_norms+fast speed"]["predicted_ms"]
    smallest = cells("delayed+feed_forward+keep_float8+fast memory").replace(" |", " MiB,")
    assert f"`fuse_norms`: {fastest:.1f} ms" in page and f"{smallest} ms" in page
