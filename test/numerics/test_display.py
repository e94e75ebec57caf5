"""The table is at most 100 columns wide; the picture has a panel for each of the worst casts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from runs import ROW

from float8.numerics.display import WIDTH, plot_casts, table_of_casts
from float8.numerics.statistics import Histogram

LONG = replace(
    ROW, layer="model.layers.11.self_attention.query_key_value_projection", operand="grad_output",
    gemm="grad_weight", format="e5m2", amax=123456.0, scale_min=1.234e-05, scale_max=1.234e-05,
    flushed=1.0, saturated=0.12345, sqnr=-12.34, kurtosis=12345.6, staleness=-12.3,
)  # fmt: skip


def test_a_table_fits_a_terminal():
    healthy = {"flushed": 0.0, "saturated": 0.0, "sqnr": None, "staleness": -0.01}
    rows = [LONG, replace(LONG, layer="model.layers.0.mlp.up", **healthy)]
    text = table_of_casts(rows, {"head": "it was not called"})
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "grad_output.T" in lines[2] and "-12.3" in lines[2] and "12.35" in lines[2]
    assert lines[3].split()[-1] == "0.0"
    assert lines[4:6] == [
        "layer names begin with 'model.layers.'",
        ".T: cast for the GEMM that contracts the operand's other dimension",
    ]
    assert lines[6].startswith("One cast saturates: model.layers.11.self_attention.")
    assert lines[-1] == "not seen: head: it was not called"


def test_inf_and_nan_are_said_though_no_number_shows_them():
    rows = [replace(LONG, layer="a", nonfinite=7, sqnr=None), replace(LONG, layer="b", nonfinite=1)]
    two = "2 casts met inf or NaN: The worst: a, grad_output. 7 of 10 elements are not finite."
    assert two in table_of_casts(rows, {})
    assert "One cast met inf or NaN: b, grad_output." in table_of_casts(rows[1:], {})
    assert "inf or NaN" not in table_of_casts([LONG], {})


matplotlib = pytest.importorskip("matplotlib")


def panels(rows, path, monkeypatch, **options):
    """The axes that were drawn on."""
    from matplotlib.figure import Figure

    kept, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        kept.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot_casts(rows, path, **options)
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
