"""The picture: one panel for each of the worst casts, with the format's range behind its bars."""

import math
from dataclasses import replace

import pytest
from report_rows import ROW

from float8.numerics.plot import plot
from float8.numerics.rows import Histogram

matplotlib = pytest.importorskip("matplotlib")


def panels(rows, path, monkeypatch, **options):
    """The axes that were drawn on."""
    from matplotlib.figure import Figure

    kept, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        kept.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot(rows, path, **options)
    return [axes for axes in kept[0].axes if axes.get_visible()], kept[0]


def test_each_panel_shows_shares_against_the_range(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    lost = replace(
        ROW, nonfinite=4, scale_min=math.nan, scale_max=math.nan, sqnr=-math.inf, flushed=1e-5
    )
    empty = replace(ROW, histogram=Histogram())
    axes, figure = panels([ROW, empty, lost], path, monkeypatch, title="GPT, step 3")
    assert path.stat().st_size > 10_000
    assert len(axes) == 2
    assert figure.get_suptitle() == "GPT, step 3 (2 worst of 3 casts)"
    bars = [p for p in axes[0].patches if p.get_height() < 1 and p.get_width() == 1]
    assert [bar.get_height() for bar in bars] == pytest.approx([1 / 9, 0, 8 / 9])
    assert [bar.get_x() for bar in bars] == [-2, -1, 0]
    # E4M3 at scales of 1/4 to 1/2: half of 2^-9 / 4, and 448 / 2.
    left, right = axes[0].get_xlim()
    assert left < -12 and right > math.log2(224)
    shades = [p.get_x() for p in axes[0].patches][-2:]
    assert shades == pytest.approx([left, math.log2(224)])
    assert "input, e4m3, 30.0 dB, 10.00% flushed, 20.00% saturated" in axes[0].get_title("left")
    assert "-inf dB, 4 inf or NaN, 1e-05 flushed" in axes[1].get_title("left")


def test_the_last_bar_ends_at_the_amax(tmp_path, monkeypatch):
    (axes,), _ = panels([replace(ROW, amax=2**0.5)], tmp_path / "x.svg", monkeypatch)
    bars = [p for p in axes.patches if p.get_height() < 1]
    assert [bar.get_width() for bar in bars] == pytest.approx([1, 1, 0.5])


def test_many_rows_give_the_worst(tmp_path, monkeypatch):
    axes, figure = panels([ROW] * 9, tmp_path / "x.svg", monkeypatch, title="GPT", top=5)
    assert len(axes) == 5
    assert figure.get_suptitle() == "GPT (5 worst of 9 casts)"


def test_the_title_counts_nothing_where_all_rows_are_drawn(tmp_path, monkeypatch):
    axes, figure = panels([ROW] * 2, tmp_path / "x.svg", monkeypatch, title="GPT", top=2)
    assert len(axes) == 2
    assert figure.get_suptitle() == "GPT"


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot([replace(ROW, histogram=Histogram())], tmp_path / "x.png")
