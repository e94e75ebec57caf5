"""Draw the figures of the documentation from result files; or any result file that has a picture.

    python benchmarks/figures.py                            # all, into docs/figures
    python benchmarks/figures.py overview quality           # some of them
    python benchmarks/figures.py quality --result FILE.json --folder /tmp/x    # of another file

Others are not drawn here: unit_scales.png shows the scales of a model's tensors
(`float8.unit_scaling.analysis.plot`), report.png is a screenshot, 1240 pixels wide, of the page of
step 20 of ``scripts/train_gpt.py --recipe delayed --eval-interval 20 --inspect run.json``. What
drew outliers.png is no longer in the repository.

The overview is the README's figure: what a recipe costs in loss, and what it brings in memory and
speed. Three aligned panels, a row per way of training; every number is read from a file:

    loss     a small GPT's held-out loss, the mean gap to bf16 of paired runs with its 95 % interval
             (`bench_quality.py`); CPU emulation
    memory   the peak of a training step of Llama-2-7B, traced without a GPU
    speed    two compiled blocks of Llama-3-8B, forward and backward, on a GPU: measured, or
             predicted from bf16's time by `float8.estimate`, and then drawn hatched

The control's row shows how large noise is in the loss. A cell without a bar names the row whose
arithmetic it shares (`SAME_AS`): float8 states and saved activations do not change linear layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import bench_mup_transfer, bench_quality, check_estimate, gpu
from benchmarks.measuring import picture
from benchmarks.measuring.picture import BLUE, GREY, PALE
from benchmarks.measuring.report import ROOT
from benchmarks.quality.contenders import CONTROLS, NOISE, SAVING
from float8.config import RECIPES
from float8.estimate.devices import DEVICES, find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
STUDIES = {  # figure -> its file, and what draws the rows
    "mup_transfer": ("cpu_mup_transfer", bench_mup_transfer.draw),
    "quality": ("cpu_quality", bench_quality.draw),
}
OVERVIEW = {"loss": "cpu_quality", "memory": "cpu_memory_recipes"}
BLOCKS = ("blocks", "compiled_recipes", "split")  # experiments of benchmarks/gpu.py
FIGURES = ("overview", *STUDIES)
# run -> name of its row, and what stands below the name
WAYS = {
    "bf16": ("bf16", "the baseline, not in float8"),
    NOISE: ("control", "bf16, with other rounding"),
    "tensorwise": ("tensorwise", "the default recipe"),
    "delayed": ("delayed", "scales of earlier steps"),
    "rowwise": ("rowwise", "a scale per row"),
    SAVING: ("tensorwise + memory", "activations, Adam in float8"),
}
SAME_AS = {NOISE: "bf16", SAVING: "tensorwise"}


@dataclass(frozen=True)
class Way:
    """A row of the overview.

    Args:
        run: its name in the files.
        gap: to bf16 in per cent, and half of its 95 % interval.
        study: seeds and steps of the gap's runs.
        peak_gib: the most memory in a step.
        speedup: of two blocks over bf16.
        is_measured: whether that is.
    """

    run: str
    gap: tuple[float, float] | None
    study: str
    peak_gib: float | None
    speedup: float | None
    is_measured: bool = True


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def ways() -> list[Way]:
    """The rows, top to bottom, as the files have them."""
    losses, memory = (result(name)["rows"] for name in OVERVIEW.values())
    measured, predicted, _ = speedups()
    lines = {line["layer"]: line for line in bench_quality.lines(losses)}
    peaks = {row["layer"]: row["peak_mib"] / 1024 for row in memory if "peak_mib" in row}
    found = []
    for run in WAYS:
        line, gap, study = lines.get(run, {}), None, ""
        if line.get("gap_half_width") is not None:
            gap = line["gap_percent"], line["gap_half_width"]
            study = f"{line['fields']['steps']:,} steps, {line['seeds']} seeds"
        speedup = measured.get(run, predicted.get(run))
        found.append(Way(run, gap, study, peaks.get(run), speedup, run in measured))
    return found


def speedups() -> tuple[dict[str, float], dict[str, float], str]:
    """Of two compiled blocks over bf16, by recipe: measured, predicted; and the GPU's name."""
    entries, measured = gpu.newest(gpu.folders_of(None)), {"bf16": 1.0}
    known = sorted((entries[n] for n in BLOCKS if n in entries), key=lambda e: str(e["date"]))
    known = [entry for entry in known if entry["device"] == known[-1]["device"]]
    base: dict[str, Any] = {}
    for found in (found for entry in known for found in gpu.results_of(entry).values()):
        rows = [row for row in found["rows"] if row["mode"] == "compiled" and "ratio" in row]
        measured |= {row["layer"]: 1 / row["ratio"] for row in rows}
        base = found if rows else base
    device = find_device(next(word for word in known[-1]["device"].split() if word in DEVICES))
    names = [run for run in WAYS if run in RECIPES and run not in measured]
    predicted = {n: check_estimate.model_speedup(base, "compiled", n, device) for n in names}
    return measured, predicted, device.name.split()[0]


def overview() -> Figure:
    """Draw the rows."""
    found = ways()
    figure = picture.new(8, 4)
    loss, memory, speed = panels = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for axes in panels:
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        picture.plain(axes)
        for edge in range(1, len(found)):
            axes.axhline(edge - 0.5, color=PALE, linewidth=0.8, zorder=0)
    labels = [f"$\\bf{{{name.replace(' ', '~')}}}$\n{below}" for name, below in WAYS.values()]
    loss.set_yticks(range(len(found)), labels, fontsize=8.5)
    loss.tick_params(axis="y", length=0)
    _draw_loss(loss, found)
    studies = " or ".join(dict.fromkeys(row.study for row in found if row.study))
    _title(loss, "Loss, against bf16", f"small GPT, {studies},\non a CPU, 95 % interval")
    peaks = {row.run: row.peak_gib for row in found}
    _draw_bars(memory, peaks, {row.run for row in found}, "{:.0f} GiB")
    _title(memory, "Memory", "peak of a Llama-2-7B step,\ntraced without a GPU")
    measured = {row.run for row in found if row.is_measured}
    _draw_bars(speed, {row.run: row.speedup for row in found}, measured, "{:.2f}x")
    _title(speed, "Speed", f"two compiled Llama-3-8B blocks,\n{speedups()[2]}; hatched: predicted")
    return figure


def _title(axes: Any, text: str, below: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", pad=34)
    axes.text(0, 1.025, below, transform=axes.transAxes, va="bottom", fontsize=8.5, color=GREY)


def _draw_loss(axes: Any, found: Sequence[Way]) -> None:
    """Dots with their intervals and numbers; what is not float8 is grey."""
    gaps = [row.gap or (0.0, 0.0) for row in found]
    axes.set_xlim(1.15 * min(gap - half for gap, half in gaps), 1.8 * max(map(sum, gaps)))
    axes.axvline(0, color=GREY, linewidth=1)
    for y, (row, (gap, half)) in enumerate(zip(found, gaps, strict=True)):
        colour = GREY if row.run in CONTROLS or row.run == NOISE else BLUE
        axes.errorbar(gap, y, xerr=half, fmt="o", color=colour, markersize=7, linewidth=2)
        text = f" {gap:+.2f} %".replace("-", "\N{MINUS SIGN}") if row.gap else "  0, by definition"
        axes.text(gap + half, y, text, va="center", color=colour, fontsize=9.5)


def _draw_bars(
    axes: Any, values: Mapping[str, float | None], measured: Collection[str], form: str
) -> None:
    """Bars from zero with their numbers, the first grey; those that are predictions are hatched."""
    top = max(value for value in values.values() if value is not None)
    axes.set_xlim(0, top * 1.02)
    for y, (run, value) in enumerate(values.items()):
        if value is None:
            text = f"as {SAME_AS[run]}"
            axes.text(0.03 * top, y, text, va="center", fontsize=9.5, color=GREY)
            continue
        colour, hatch = BLUE if y else GREY, "" if run in measured else "////"
        face = "white" if hatch else colour
        axes.barh(y, value, 0.5, color=face, edgecolor=colour, hatch=hatch)
        style: Any = {"va": "center", "fontweight": "bold", "color": colour if hatch else "white"}
        style["bbox"] = {"facecolor": face, "linewidth": 0, "pad": 1.5}
        axes.text(0.03 * top, y, form.format(value), **style)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of: {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are written")
    parser.add_argument("--result", type=Path, metavar="FILE", help="instead of a study's own")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - {*FIGURES}:
        parser.error(f"no figure is called {', '.join(sorted(unknown))}: {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        if name == "overview":
            figure = overview()
        else:
            file, draw = STUDIES[name]
            path = options.result or RESULTS / f"{file}.json"
            figure = draw(json.loads(path.read_text(encoding="utf-8"))["rows"])
        picture.save(figure, options.folder / f"{name}.png")
        print(options.folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
