"""Measuring names its sources, covers every pass, and finds usable figures."""

import itertools
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.cost_model import measure as measuring
from benchmarks.cost_model.measure import Clock, _call, _operands, measure
from benchmarks.measuring.harness import host_timer
from float8.config import RECIPES
from float8.estimate import DEVICES, estimate
from float8.estimate.cast_passes import passes_of_layer
from float8.estimate.devices import BF16, FLOAT8, Device
from float8.estimate.shapes import Use
from float8.kernels.scaled_mm import SUPPORT

SMALL = ((32, 128, 64), (64, 128, 128), (64, 256, 128))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def here() -> Device:
    with pytest.MonkeyPatch.context() as patch:  # shorter samples of smaller operands
        patch.setattr(measuring, "SAMPLE_S", 2e-4)
        patch.setattr(measuring, "CAST_SIZES", ((128, 128), (256, 128), (256, 256)))
        patch.setitem(measuring.COPY_BYTES, "cpu", 2**20)
        return measure("cpu", sizes=SMALL, rounds=2)


def test_every_figure_of_a_cpu_is_measured(here):
    # Times as short and as few as these do not always tell a half_size, which is then assumed.
    told = {name: f.kind for name, f in here.figures().items() if not name.endswith("half_size")}
    assert set(told.values()) <= {"measured", "exact"} and here.emulates
    assert set(here.products) == {BF16, *FLOAT8}


def test_every_pass_that_a_recipe_makes_has_a_rate(here):
    for config in RECIPES.values():
        x, w, g, _ = passes_of_layer(config.plan, Use(), emulates=True)
        assert {each.name for each in (*x, *w, *g)} <= set(here.passes)


def test_a_measured_device_predicts_and_is_saved(here, tmp_path):
    here.save(tmp_path / "here.json")
    result = estimate([(64, 256, 128)], device=str(tmp_path / "here.json"))
    (row,) = result.rows
    assert row.bf16_s > 0 and all(row.speedup(recipe) > 0 for recipe in row.recipes)
    assert any("measured: here, cpu" in line for line in result.device.provenance())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "meta"}, "device='meta' cannot be measured; known: cpu, cuda"),
        ({"device": "cpu", "sizes": SMALL[:2]}, "at least three, of different M"),
        ({"device": "cpu", "sizes": [(64, 64, 64)] * 3}, "at least three, of different M"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        measure(**arguments)


def runs_on(monkeypatch, now: list[float]) -> None:
    """Lets the clock read its time from ``now``."""
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measuring, "timer_for", lambda _: host_timer(lambda: now[0]))


def test_a_clock_takes_turns_and_keeps_the_fastest(monkeypatch):
    # Each call moves the clock: a by 1 s or 3 s in turn, b by 2 s or 7 s.
    now, order = [0.0], []
    runs_on(monkeypatch, now)
    costs = {"a": itertools.cycle([1.0, 3.0]), "b": itertools.cycle([2.0, 7.0])}

    def run(name: str) -> None:
        order.append(name)
        now[0] += next(costs[name])

    clock = Clock(CPU, 4)
    assert clock(lambda: run("a"), lambda: run("b")) == [1.0, 2.0]
    assert order[:4] == ["a", "a", "b", "b"], "a call warms up, another is timed for the count"
    assert order[4:] == ["a", "b"] * 2, "slow things stop after two rounds"


def test_short_calls_are_repeated_until_they_fill_a_sample(monkeypatch):
    now, calls = [0.0], []
    runs_on(monkeypatch, now)

    def tick() -> None:
        calls.append(1)
        now[0] += 1e-3

    (seconds,) = Clock(CPU, 3)(tick)
    assert seconds == pytest.approx(1e-3)
    assert len(calls) == 2 + 3 * 5, "samples of 5 ms"


@pytest.mark.parametrize("kind", [BF16, *FLOAT8])
def test_what_is_timed_is_the_product(kind):
    here = replace(DEVICES["H100"], arch="cpu")
    for name, a, b in _operands((128, 256, 384), CPU):
        out = _call(kind, name, here, a, b)()
        expected = a.double() @ b.double().t()
        assert out.shape == expected.shape
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (0.01 if kind == BF16 else 0.1), f"{kind} {name}: {error}"


def test_a_product_that_a_gpu_refuses_is_not_timed(monkeypatch):
    ((name, a, b), *_) = _operands((128, 256, 384), CPU)
    monkeypatch.setitem(SUPPORT["sm_100"], "rowwise", "for this test")
    assert _call("rowwise", name, DEVICES["B200"], a, b) is None
    assert _call("tensorwise", name, DEVICES["B200"], a, b) is not None


@pytest.mark.cuda
def test_a_gpu_is_measured_with_its_own_products():
    device = measure("cuda", sizes=((512,) * 3, (1024,) * 3, (2048,) * 3, (4096,) * 3))
    assert not device.emulates and not device.passes
    assert device.products["tensorwise"].peak.value > 0
    assert estimate([(8192,) * 3], device=device).rows[0].speedup("tensorwise") > 1
