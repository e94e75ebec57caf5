"""The numbers that docs/unit_scaling.md takes from result files are those of the files."""

from __future__ import annotations

import json
import re

from fresh import ROOT

from benchmarks import bench_bert, bench_unit_gpt
from benchmarks.models.training import held_out

PAGE = " ".join((ROOT / "docs" / "unit_scaling.md").read_text(encoding="utf-8").split())


def _result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_how_far_the_best_learning_rates_lie_apart():
    found = re.search(r"within ([\d.]+) powers of two .* parametrisation within ([\d.]+)", PAGE)
    assert found is not None
    spread = {
        row["layer"]: row["measured"]
        for row in _result("cpu_mup_transfer")["targets"]
        if row["mode"] == "spread"
    }
    assert [f"{spread[name]:.1f}" for name in ("u-mup", "standard")] == list(found.groups())


def test_how_stable_the_mus_variant_is():
    found = re.search(
        r"rate 1 its residual stream has a standard deviation of ([\d.]+), that of the default "
        r"variant ([\d.]+); at 64 times that rate it ends at ([\d.]+) nats, the default variant at "
        r"([\d.]+)\. Its linear layers read larger values, though: up to (\d+) at rate 1",
        PAGE,
    )
    assert found is not None
    rows = {(r["layer"], r["log2_lr"]): r for r in _result("cpu_mus_stability")["rows"]}
    measured = [f"{rows[name, 0]['last_std']:.1f}" for name in ("mus", "u-mup")]
    measured += [f"{held_out(rows[name, 6]):.1f}" for name in ("mus", "u-mup")]
    assert [*measured, f"{rows['mus', 0]['operand_max']:.0f}"] == list(found.groups())


def test_how_a_bert_trains_with_scale_1():
    lines = bench_bert.lines(_result("cpu_bert")["rows"])
    gaps = {line["layer"]: line["gap"].lstrip("+") for line in lines if line["mode"] == "fp8"}
    assert f"its loss ends {gaps['base']} above that of float32" in PAGE
    assert f"the unit-scaled one ends {gaps['unit']} above its own" in PAGE
    assert f", {({3: 'three', 5: 'five'})[lines[0]['seeds']]} seeds)." in PAGE
    found = {x["layer"]: x for x in bench_unit_gpt.lines(_result("cpu_unit_gpt")["rows"])}
    naive, unit = found["naive"]["gap"].lstrip("+"), found["unit"]["gap"].lstrip("+")
    assert f"nanoGPT ends {naive} above bf16, and unit-scaled {unit} above its own" in PAGE
