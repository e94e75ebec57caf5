"""The picture shows two models of the same axis, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import scale_plot

TINY = ["--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]


def test_it_writes_one_picture_of_two_panels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = str(Path(scale_plot.__file__).parent), tmp_path / "new" / "scales.png"
    assert scale_plot.main([*TINY, "--data", data, "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_panels_of_different_height_are_padded_with_white() -> None:
    high, low = np.zeros((5, 2, 4), np.uint8), np.ones((3, 1, 4), np.uint8)
    both = scale_plot.side_by_side([high, low])
    assert both.shape == (5, 3, 4)
    assert (both[:, :2] == 0).all()
    assert (both[:3, 2] == 1).all()
    assert (both[3:, 2] == 255).all()


def test_bad_input_is_one_line() -> None:
    with pytest.raises(SystemExit, match="does not split into --heads 3"):
        scale_plot.main(["--width", "32", "--heads", "3"])
