"""The rows of targets: target, measured, met."""

from __future__ import annotations

from benchmarks.measuring import targets
from benchmarks.measuring.contenders import BASELINE


def row(layer: str, mode: str, *samples: float, sizes=targets.SIZES) -> dict:
    M, K, N = sizes
    made = {"layer": layer, "mode": mode, "M": M, "K": K, "N": N}
    return {**made, "samples_s": list(samples)} if samples else {**made, "error": "no"}


def verdicts(*rows: dict) -> dict[tuple[str, str, str], tuple[float | None, str]]:
    return {
        (v["layer"], v["mode"], v["against"]): (v.get("measured"), v["met"])
        for v in targets.summary(rows)
    }


def test_eager_is_judged_beside_eager_and_compiled_beside_compiled():
    rows = [
        row(BASELINE, "eager", 1.4, 1.4, 2.8),
        row("tensorwise", "eager", 1.0, 1.0, 2.0),
        row(BASELINE, "compiled", 1.4, 1.4, 1.4),
        row("tensorwise", "compiled", 1.0, 1.0, 1.0),
    ]
    judged = verdicts(*rows)
    assert judged["tensorwise", "eager", BASELINE] == (1.4, "yes")  # of 1.3
    assert judged["tensorwise", "compiled", BASELINE] == (1.4, "no")  # of 1.5


def test_a_peer_is_judged_where_it_ran():
    ours, base = row("rowwise", "compiled", 1.0), row(BASELINE, "compiled", 1.3)
    peer = "rowwise", "compiled", "torchao rowwise"
    assert verdicts(base, ours, row("torchao rowwise", "compiled", 1.06))[peer] == (1.06, "yes")
    assert verdicts(base, ours, row("torchao rowwise", "compiled"))[peer] == (None, "not measured")
    assert verdicts(base, ours)[peer] == (None, "not measured")


def test_other_shapes_are_not_judged():
    assert targets.summary([row("tensorwise", "eager", 1.0, sizes=(2048, 1024, 4096))]) == []


def test_the_targets_are_those_of_the_plan():
    beside_bf16 = {(t.layer, t.mode): t.speedup for t in targets.TARGETS if t.against == BASELINE}
    assert beside_bf16 == {
        ("tensorwise", "eager"): 1.3,
        ("tensorwise", "compiled"): 1.5,
        ("static", "compiled"): 1.6,
        ("rowwise", "compiled"): 1.3,
        ("blockwise", "compiled"): 1.25,
    }
    beside_peer = [t for t in targets.TARGETS if t.against != BASELINE]
    assert {(t.mode, t.speedup, t.against == f"torchao {t.layer}") for t in beside_peer} == {
        ("compiled", 1.05, True)
    }
