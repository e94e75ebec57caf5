"""The tile of a GEMM is measured once per class of sizes, never where that is not allowed."""

from __future__ import annotations

import pytest
import torch
from pretend import PretendCuda

pytest.importorskip("triton")

from float8.kernels.gpu import fastest_tile
from float8.kernels.gpu.fastest_tile import fastest

TIMES = {"large": 3.0, "quick": 1.0, "as quick": 1.0, "small": 2.0}


@pytest.fixture
def measured(monkeypatch):
    """The tiles that were timed, in order, on a GPU that captures no graph."""
    timed = []

    def seconds(run, tile):
        timed.append(tile)
        return TIMES[tile]

    monkeypatch.setattr(fastest_tile, "_seconds", seconds)
    monkeypatch.setattr(fastest_tile, "_CHOSEN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return timed


def choose(sizes=(100, 200), form="a", x=None) -> str:
    x = torch.empty(1).as_subclass(PretendCuda) if x is None else x
    return fastest(form, x, sizes, list(TIMES), "by rule", run=lambda tile: None)


def test_the_fastest_tile_is_measured_once_per_class(measured):
    assert choose() == "quick"
    assert measured == list(TIMES)
    for sizes in ((100, 200), (64, 255), (127, 128)):
        assert choose(sizes) == "quick"
    assert len(measured) == len(TIMES)
    for sizes, form in (((128, 200), "a"), ((100, 256), "a"), ((100, 200), "b")):
        choose(sizes, form)
    assert len(measured) == 4 * len(TIMES)


def test_a_capture_measures_nothing_and_remembers_nothing(measured, monkeypatch):
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "by rule"
    assert measured == []
    assert choose() == "quick"
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "quick"  # what is known may be used


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_measure_nothing(measured, device):
    assert choose(x=torch.empty(1, device=device)) == "by rule"
    assert measured == []
