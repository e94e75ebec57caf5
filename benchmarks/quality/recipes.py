"""The study of recipes: a line per contender, its mean loss and its paired gap to its base."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from benchmarks.measuring.harness import Row
from benchmarks.quality.contenders import BASE, NOISE, PEER, UNIT_BASE, base_of
from benchmarks.quality.paired import by_contender, difference, settings
from benchmarks.quality.run import Run, usual_runs

LIMIT = 0.25  # per cent of the base's loss
CONTENDERS = (
    *(BASE, NOISE, "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"),
    *(UNIT_BASE, "unit", PEER + "tensorwise", PEER + "rowwise"),
)
COLUMNS = {
    "layer": ("contender", ""),
    "setting": ("setting", ""),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to base", ""),
    "bf16_gap": ("evaluated in bf16", ""),
    "diverged": ("diverged", ".0f"),
}


def runs(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed, a seed after the other."""
    return usual_runs(options, options.seeds)


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender and setting: the mean loss, and the paired difference to the base."""
    found: list[Row] = []
    for setting, of_setting in settings(rows, "contender", "seed").items():
        contenders = by_contender(of_setting)
        for name, own in contenders.items():
            losses = [row["loss"] for row in own if "loss" in row]
            line: Row = {"layer": name, "seeds": len(losses), "diverged": len(own) - len(losses)}
            line["fields"] = json.loads(setting)
            if losses:
                line["loss"] = sum(losses) / len(losses)
            if name != base_of(name):
                line |= _gap(own, contenders.get(base_of(name), []))
            found.append(line)
    _name_settings(found)
    return found


def _gap(own: Sequence[Row], bases: Sequence[Row]) -> Row:
    """The columns of the difference; none before a seed has both runs."""
    gap = difference(own, bases)
    if not gap.values:
        return {}
    line: Row = {"gap": str(gap), "gap_percent": gap.mean, "half_width": gap.half_width}
    line["met"] = gap.within(LIMIT)
    if (in_bf16 := difference(own, bases, "bf16_loss")).values:
        line["bf16_gap"] = str(in_bf16)
    return line


def _name_settings(found: Sequence[Row]) -> None:
    """Name the fields by which lines of one contender differ; a study of one setting has none."""
    for line in found:
        others = [other["fields"] for other in found if other["layer"] == line["layer"]]
        mine = line["fields"]
        differing = [key for key in mine if any(other[key] != mine[key] for other in others)]
        if differing:
            line["setting"] = ", ".join(f"{key} {mine[key]}" for key in differing)


def targets(found: Sequence[Row]) -> list[Row]:
    """Which contenders' intervals lie within the limit; ``measured`` is their farther end."""
    return [
        {
            "layer": line["layer"],
            "mode": line.get("setting", "interval"),
            "against": base_of(line["layer"]),
            "target": LIMIT,
            "measured": abs(line["gap_percent"]) + line["half_width"],
            "met": line["met"],
        }
        for line in found
        if math.isfinite(line.get("half_width", math.inf))
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, and the targets."""
    found = lines(rows)
    return found, targets(found)
