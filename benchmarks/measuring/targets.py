"""The speed-ups that a float8 layer should reach on Hopper: target, measured, met.

The layer is M = 16384 tokens, K = N = 8192, the attention output of LLaMA-3-70B, in bfloat16,
forward and backward. Speed-ups are time(nn.Linear) / time(layer), both eager or both compiled;
against torchao, time(its layer) / time(ours), both compiled. Medians over rounds, paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measuring import harness
from benchmarks.measuring.contenders import BASELINE, PEER, PEER_RECIPES
from benchmarks.measuring.harness import Row

SIZES = (16384, 8192, 8192)


class Target(NamedTuple):
    """A layer should be `speedup` times as fast as another layer."""

    layer: str
    mode: str
    against: str
    speedup: float


TARGETS = (
    Target("tensorwise", "eager", BASELINE, 1.3),
    Target("tensorwise", "compiled", BASELINE, 1.5),
    Target("static", "compiled", BASELINE, 1.6),
    Target("rowwise", "compiled", BASELINE, 1.3),
    Target("blockwise", "compiled", BASELINE, 1.25),
    *(Target(recipe, "compiled", PEER + recipe, 1.05) for recipe in PEER_RECIPES),
)


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row per target whose shape was asked for; no speed-up where one of the two did not run."""
    here = {
        (row["layer"], row["mode"]): row for row in rows if (row["M"], row["K"], row["N"]) == SIZES
    }
    return [judge(target, here) for target in TARGETS if (target.layer, target.mode) in here]


def judge(target: Target, rows: dict[tuple[str, str], Row]) -> Row:
    ours, other = (rows.get((name, target.mode), {}) for name in (target.layer, target.against))
    verdict: Row = {
        "layer": target.layer,
        "mode": target.mode,
        "against": target.against,
        "target": target.speedup,
        "met": "not measured",
    }
    if "samples_s" in ours and "samples_s" in other:
        verdict["measured"] = harness.paired_ratio(other["samples_s"], ours["samples_s"])
        verdict["met"] = "yes" if verdict["measured"] >= target.speedup else "no"
    return verdict
