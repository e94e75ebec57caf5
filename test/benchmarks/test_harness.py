"""Timing in turns, paired ratios, warm-up, and the report."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks.measuring import harness, report


class Clock:
    """A clock that advances only by the work done, and a list of the work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def work(self, name: str, seconds) -> object:
        def fn() -> None:
            self.calls.append(name)
            self.now += seconds(self.calls.count(name)) if callable(seconds) else seconds

        return fn

    def measure(self, repeats=3, warmup=1, **seconds):
        candidates = {name: self.work(name, s) for name, s in seconds.items()}
        timer = harness.host_timer(lambda: self.now)
        return harness.interleave(candidates, timer, repeats=repeats, warmup=warmup)


def test_candidates_take_turns():
    clock = Clock()
    clock.measure(repeats=2, warmup=1, A=1.0, B=2.0, C=3.0)
    assert "".join(clock.calls) == "ABC" * 3


def test_short_work_is_repeated_within_a_sample():
    clock = Clock()
    samples = clock.measure(repeats=1, warmup=1, A=harness.TARGET_S / 8)
    assert len(clock.calls) == 1 + 8
    assert samples["A"] == [pytest.approx(harness.TARGET_S / 8)]


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    samples = Clock().measure(repeats=5, A=lambda n: 1.0 * 2**n, B=lambda n: 3.0 * 2**n)
    assert harness.paired_ratio(samples["B"], samples["A"]) == pytest.approx(3.0)


def fail(error: Exception):
    def fn() -> None:
        raise error

    return fn


def test_a_candidate_that_fails_is_a_row_with_its_reason():
    makers = {
        "base": lambda: lambda: None,
        "refuses": lambda: fail(ValueError("sm_80 has no float8 tensor cores\nmore")),
        "breaks": lambda: fail(RuntimeError("boom")),
    }
    able, errors = harness.runnable(makers)
    assert list(able) == ["base"]
    assert errors == {
        "refuses": {"error": "ValueError: sm_80 has no float8 tensor cores more", "refused": True},
        "breaks": {"error": "RuntimeError: boom", "refused": False},
    }


COLUMNS = {"name": ("layer", ""), "ms": ("time", ".1f"), "error": ("not run", ".10")}
TARGET = {"layer": "a", "mode": "eager", "against": "b", "target": 1.5, "met": "not measured"}


def test_a_run_keeps_what_it_measured_and_fails_with_its_rows(tmp_path, capsys):
    options = argparse.Namespace(device="cpu", output=tmp_path / "x.json", stop_after=None)

    def measure(row):
        return [{"name": row}] if row != "stop" else 1 / 0

    def run(work, *targets):
        return report.run("bench_x", ["-n"], options, work, measure, COLUMNS, lambda _: targets)

    with pytest.raises(ZeroDivisionError):
        run(["a", "stop", "b"])
    assert json.loads(options.output.read_text())["rows"] == [{"name": "a"}]
    assert run(["a", "b"], TARGET) == 0
    written = json.loads(options.output.read_text())
    assert written["targets"] == [TARGET]
    assert written["command"] == "python benchmarks/bench_x.py -n"
    assert "not measured" in capsys.readouterr().out
    for error, peer, status in (("broke", False, 1), ("refused", False, 0), ("broke", True, 0)):
        row = {"error": "", "refused": error == "refused", "layer": "torchao x" if peer else "x"}
        made = report.run("bench_x", [], options, [row], lambda row: [row], COLUMNS)
        assert made == status, row


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_time_is_the_devices_time():
    cycles = 20_000_000  # ten milliseconds at 2 GHz; returning from the launch takes microseconds
    seconds = harness.timer_for("cuda")(lambda: torch.cuda._sleep(cycles), 3)
    assert 3 * cycles / 4e9 < seconds < 3 * cycles / 0.2e9
