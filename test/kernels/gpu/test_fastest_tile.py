"""The tile of a GEMM is measured once per class of sizes, never where that is not allowed."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from pretend import PretendCuda

pytest.importorskip("triton")

from float8.kernels.gpu import fastest_tile, grouped_mm
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", current)
    return timed


STREAM = threading.local()  # the current one of each thread


@contextmanager
def current(stream):
    STREAM.current = stream
    yield


def choose(sizes=(100, 200), form="a", x=None, run=lambda tile: None) -> str:
    x = torch.empty(1).as_subclass(PretendCuda) if x is None else x
    return fastest(form, x, sizes, list(TIMES), run)


def test_the_fastest_tile_is_measured_once_per_class(measured):
    assert choose() == "quick"
    assert measured == list(TIMES)
    for sizes in ((100, 200), (64, 255), (127, 128)):
        assert choose(sizes) == "quick"
    assert len(measured) == len(TIMES)
    for sizes, form in (((128, 200), "a"), ((100, 256), "a"), ((100, 200), "b")):
        choose(sizes, form)
    assert len(measured) == 4 * len(TIMES)


def test_all_tiles_are_compiled_at_once_on_the_stream_of_the_caller(measured):
    together = threading.Barrier(len(TIMES), timeout=20)
    launched = []

    def run(tile):
        together.wait()  # raises where they come one after the other
        launched.append((tile, STREAM.current))

    assert choose(run=run) == "quick"
    assert sorted(launched) == sorted((tile, "the caller's") for tile in TIMES)


def test_an_error_of_a_tile_reaches_the_caller(measured):
    with pytest.raises(ValueError, match="no shared memory for small"):
        choose(run=lambda tile: None if tile != "small" else _refuse(tile))
    assert measured == []


def _refuse(tile):
    raise ValueError(f"no shared memory for {tile}")


def test_a_capture_measures_nothing_and_remembers_nothing(measured, monkeypatch):
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "large"
    assert measured == []
    assert choose() == "quick"
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "quick"  # what is known may be used


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_measure_nothing(measured, device):
    assert choose(x=torch.empty(1, device=device)) == "large"
    assert measured == []


def test_the_tiles_of_a_grouped_product_share_a_result_that_the_caller_does_not_return(monkeypatch):
    """The memory pool of a CUDA graph that is warmed up is that of one thread."""
    allocated = []

    def allocate(*arguments):
        time.sleep(0.01)  # as torch does, it lets other threads run
        allocated.append(threading.current_thread())
        return arguments[0].new_zeros(32, 48, dtype=torch.bfloat16)

    def measure(form, x, sizes, tiles, run):
        threads = [threading.Thread(target=run, args=(tiles[0],)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tiles[0]

    monkeypatch.setattr(grouped_mm, "_fake", allocate)
    monkeypatch.setattr(grouped_mm, "fastest", measure)
    monkeypatch.setattr(grouped_mm, "launch", lambda *_, **__: None)
    a, b = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((32, 64), (1, 48, 64)))
    offs = torch.tensor([32], dtype=torch.int32)
    whole, scales = (-1, -1), (torch.ones(1, 1), torch.ones(1, 1, 1))
    grouped_mm._launch(
        a, scales[0], b, scales[1], offs, whole, (1, *whole), torch.bfloat16, 16, True
    )
    assert len(allocated) == 2 and allocated[1] is threading.current_thread()
