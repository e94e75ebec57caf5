"""`inspect_every`: every n-th step, into a file that is always whole, and to a writer."""

import json

import pytest
import torch
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


def test_misuse_is_an_error(tmp_path):
    for wrong in ({"n": 0}, {"n": 2.5}, {"keep": 0}):
        with pytest.raises(ValueError, match="integer >= 1"):
            inspect_every(model(), **wrong)
    with pytest.raises(TypeError, match="Tensor has no add_scalar"):
        inspect_every(model(), writer=torch.zeros(1))
    (tmp_path / "x").write_text("notes")
    with pytest.raises(ValueError, match="not a report"):
        inspect_every(model(), path=tmp_path / "x")
    monitor = inspect_every(model())
    with pytest.raises(RuntimeError, match="no step is open"):
        monitor.end_step()
    with monitor, pytest.raises(RuntimeError, match="open already"):
        monitor.start_step()
    with pytest.raises(ValueError, match="Linear has no float8 layer"):
        inspect_every(nn.Linear(2, 2)).start_step()
