"""`inspect_every`: every n-th step, into a file that is always complete, and to a writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from disk import full_after
from torch import nn

from float8 import convert_to_float8_training
from float8.numerics import inspect_every, load_run


class Writer:
    def __init__(self):
        self.steps = []

    def add_scalar(self, tag, value, step):
        self.steps.append(step)


def model():
    torch.manual_seed(0)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))


def step(layers):
    layers(torch.randn(8, 16)).square().sum().backward()


def test_every_nth_step_is_in_the_file(tmp_path):
    path, writer, layers = tmp_path / "run.json", Writer(), model()
    monitor = inspect_every(layers, 3, path=path, writer=writer)
    reports = []
    for i in range(7):
        with monitor:
            step(layers)
        reports.append(monitor.report)
        assert not layers[0]._forward_hooks
        assert [r.step for r in load_run(path)] == [s for s in (0, 3, 6) if s <= i]
    assert [r.step for r in reports] == [0, 0, 0, 3, 3, 3, 6]
    assert sorted(set(writer.steps)) == [0, 3, 6]
    assert [r.rows() for r in load_run(path)] == [json_like(reports[i]) for i in (0, 3, 6)]


def json_like(report):
    """Its rows; a file has tuples as lists, which `load_run` makes tuples again."""
    json.dumps([row.key for row in report.casts])
    return report.rows()


def test_a_training_that_resumes_continues_its_file(tmp_path):
    path, layers = tmp_path / "run.json", model()
    for first, until in ((0, 5), (3, 7)):  # killed after 5 steps, resumed from a checkpoint of 3
        monitor = inspect_every(layers, 2, path=path, step=first, keep=3)
        for _ in range(first, until):
            monitor.start_step()
            step(layers)
            monitor.end_step()
    assert [r.step for r in load_run(path)] == [2, 4, 6]


def test_a_step_that_raises_is_not_written_and_leaves_no_hook(tmp_path):
    path, layers = tmp_path / "run.json", model()
    monitor = inspect_every(layers, 1, path=path)
    with pytest.raises(ValueError, match="16"), monitor:
        layers(layers(torch.randn(8, 16)).repeat(1, 2))
    assert len(monitor.report) == 4  # of the first call: two inputs, two weights
    assert not path.exists() and not layers[0]._forward_hooks
    with monitor:
        step(layers)
    assert [r.step for r in load_run(path)] == [1]


# --- files that cannot be written


def test_a_disk_that_is_full_at_the_start_is_an_error_then(tmp_path):
    path = tmp_path / "run.json"
    with full_after(0), pytest.raises(OSError, match=rf"{path} cannot be written"):
        inspect_every(model(), path=path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_later_is_one_warning_and_the_old_report_stays(tmp_path):
    path, layers = tmp_path / "run.json", model()
    monitor = inspect_every(layers, 1, path=path)

    def train():
        with monitor:
            step(layers)

    train()
    before = path.read_bytes()
    with full_after(100):
        with pytest.warns(UserWarning, match=f"{path} could not be written at step 1") as caught:
            train()
        train()
    assert len(caught) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert path.read_bytes() == before
    assert monitor.step == 3
    train()  # there is space again
    assert [r.step for r in load_run(path)] == [0, 1, 2, 3]


def test_an_interrupted_write_leaves_nothing_beside_the_file(tmp_path, monkeypatch):
    path, layers = tmp_path / "run.json", model()
    monitor = inspect_every(layers, 1, path=path)

    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), monitor:
        step(layers)
    assert not list(tmp_path.iterdir())
