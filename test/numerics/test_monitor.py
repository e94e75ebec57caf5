"""`inspect_every`: every n-th step, into a file that is always complete, and to a writer.

Its alarms: in the log once, in the file, to the writer, to a callback that may stop the training.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    after_step,
    convert_to_float8_training,
)
from float8.numerics import inspect_every, load_alarms, load_run


class Writer:
    def __init__(self):
        self.steps, self.alarms = [], []

    def add_scalar(self, tag, value, step):
        self.steps.append(step)
        if tag == "float8/alarms":
            self.alarms.append((step, value))


def model():
    torch.manual_seed(0)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))


def step(layers):
    layers(torch.randn(8, 16)).square().sum().backward()


def test_every_nth_step_and_step_4_are_in_the_file(tmp_path):
    path, writer, layers = tmp_path / "run.json", Writer(), model()
    monitor = inspect_every(layers, 3, path=path, writer=writer)
    reports = []
    for i in range(7):
        with monitor:
            step(layers)
        reports.append(monitor.report)
        assert not layers[0]._forward_hooks
        assert [r.step for r in load_run(path)] == [s for s in (0, 3, 4, 6) if s <= i]
    assert [r.step for r in reports] == [0, 0, 0, 3, 4, 4, 6]
    assert sorted(set(writer.steps)) == [0, 3, 4, 6]
    assert [r.rows() for r in load_run(path)] == [reports[i].rows() for i in (0, 3, 4, 6)]


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


# --- alarms


def saturating():
    """A layer that casts its input with a static scale made for 1.8: 7 % saturate; two alarms."""
    torch.manual_seed(0)
    static = CastConfig(ScalingType.STATIC, static_scale=1.8 / 448)
    config = Float8LinearConfig(cast_config_input=static)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 32)), config=config)


def looked_at(layers, looks, factor=1.0, **options):
    monitor = inspect_every(layers, 1, **options)
    for _ in range(looks):
        with monitor:
            layers(factor * torch.randn(32, 16)).square().sum().backward()
    return monitor


def test_an_alarm_is_logged_once_when_it_starts_and_once_when_it_ends(tmp_path, caplog):
    layers, path, writer, seen = saturating(), tmp_path / "run.json", Writer(), []
    options = {"path": path, "writer": writer, "on_alarm": seen.append}
    with caplog.at_level(logging.INFO, "float8"):
        looked_at(layers, 6, **options)
        looked_at(layers, 4, factor=0.01, step=6, **options)
    saturation, stale, *ended = [record.getMessage() for record in caplog.records]
    assert saturation.startswith("alarm at step 2: saturation: 0, input. ")
    assert "It has been so since step 0." in saturation and "calibrated again" in saturation
    assert stale.startswith("alarm at step 2: stale scale: 0, input. Its amax lies ")
    assert "also 2, input" in stale or len(seen) == 2
    assert [text.split(":")[0] for text in ended] == ["the alarm of step 2 has ended at step 8"] * 2
    assert {(alarm.rule, alarm.layer) for alarm in seen} >= {("saturation", "0")}
    stored = load_alarms(path)
    assert [(a.first, a.last, a.ended) for a in stored] == [(0, 5, 8)] * len(seen)
    counts = dict(writer.alarms)
    assert counts == {i: len(seen) if 2 <= i < 8 else 0 for i in range(10)}


def test_a_jump_of_the_gradient_in_step_4_is_an_alarm_at_once():
    """By 2^4.4, as in a training whose projections started at zero."""
    torch.manual_seed(0)
    layers, seen = nn.Sequential(nn.Linear(32, 32, bias=False)), []
    convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name("delayed"))
    monitor = inspect_every(layers, on_alarm=seen.append)  # n = 50: steps 0, 4 and 50
    for factor in (1.0, 1.0, 1.0, 1.0, 2**4.4, 2**4.4):
        with monitor:
            layers(torch.randn(64, 32)).backward(factor * torch.randn(64, 32))
            after_step(layers)
    (alarm,) = [each for each in seen if each.rule == "saturation"]
    assert (alarm.layer, alarm.operand, alarm.started) == ("0", "grad_output", 4)


def test_a_training_that_resumes_does_not_say_an_alarm_again(tmp_path, caplog):
    path, layers, seen = tmp_path / "run.json", saturating(), []
    looked_at(layers, 4, path=path)
    caplog.clear()
    monitor = looked_at(layers, 2, path=path, step=4, on_alarm=seen.append, keep=2)
    assert (caplog.records, seen) == ([], [])
    assert {(alarm.first, alarm.last) for alarm in monitor.alarms} == {(0, 5)}
    assert load_alarms(path) == monitor.alarms
