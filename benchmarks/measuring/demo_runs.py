"""The demo GPT in `bench_memory`: its memory in each run, and its loss.

`scripts/train_gpt.py` reports the sizes, each run in a separate process, because a process's peak
never falls. The model is wider than the demo's (`WIDE`), so that the interpreter is not most of the
resident memory. Quality is at the demo's own sizes, trained as `scripts/demo.py`
does; a way's gap is

    loss / loss of bf16 from the same seed - 1        on held-out text, after the last step

and the spread over the baseline's seeds is the noise of a gap. `scripts/training/savings.py` names
the runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measuring import harness, savers
from benchmarks.measuring.harness import Row
from benchmarks.measuring.savers import BASELINE
from float8.config import RECIPES
from scripts.training import gpt, savings

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MODEL = "demo GPT"
MAX_GAP = 1.0  # per cent
QUALITY = (
    BASELINE,
    "bf16+float8_adamw",
    "bf16+float8_adamw_v16",
    "tensorwise",
    "tensorwise+saved_activations",
    "tensorwise+O1",
    "tensorwise+O2",
    "tensorwise+O3",
    "tensorwise+saved_activations+float8_adamw",
)
WIDE = {"layers": 4, "width": 768, "heads": 8, "context": 64, "batch": 4, "steps": 2}
TINY = {"layers": 1, "width": 64, "heads": 2, "context": 32, "batch": 2, "steps": 2}


def knows(way: str) -> bool:
    """Whether the demo can train this way."""
    return way not in (*savers.PEERS, savers.MASTER, savers.NARROW)


def check(way: str) -> None:
    """Refuse what is no run.

    Raises:
        ValueError: saying what is wrong with it.
    """
    parts = {"optimizer": "adamw", "ms_amp": None, **savings.parts_of(way)}
    if parts["recipe"] not in (known := (*gpt.OWN, *RECIPES)):
        raise ValueError(f"{way}: unknown recipe {parts['recipe']!r}; known: {', '.join(known)}")
    savings.check(parts["recipe"], parts["optimizer"], parts["ms_amp"], processes=1)


def sizes_of(way: str, quick: bool) -> Row:
    """What a short training holds, in MiB, and its process's peak."""
    sizes = {**(TINY if quick else WIDE), "eval_batches": 1, "device": "cpu"}
    row: Row = {"layer": way, "mode": MODEL}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        files = {"out": out, "checkpoint": Path(folder) / "gpt.pt"}
        given = flags({**savings.parts_of(way), **sizes, **files, "data": SCRIPTS})
        command = [sys.executable, str(SCRIPTS / "train_gpt.py"), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return row | {"error": done.stderr.strip().splitlines()[-1], "refused": False}
        (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    names = ("parameters_mib", "gradients_mib", "optimizer_mib", "peak_rss_mib")
    kept = {"activations_mib": run["saved_for_backward_mib"]}
    return row | kept | {name: run[name] for name in names}


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as a command line gives them."""
    named = (("--" + name.replace("_", "-"), value) for name, value in options.items())
    pairs = ([name] if value is True else [name, str(value)] for name, value in named)
    return list(itertools.chain.from_iterable(pairs))


def train(options: argparse.Namespace, rows: list[Row]) -> None:
    """Train every way from every seed, and add a row for each."""
    from scripts import train_gpt
    from scripts.training import corpus
    from scripts.training import options as script_options

    parser = script_options.parser("")
    sizes = {**TINY, "eval_batches": 1, "data": SCRIPTS} if options.quick else {}
    sizes |= {"steps": options.steps} if options.steps else {}
    args = parser.parse_args(flags({"device": options.device, **sizes}))
    text = corpus.load(args.data)
    jobs = [(seed, way) for seed in options.seeds for way in options.ways or QUALITY]
    for seed, way in harness.in_time(jobs, options.stop_after):
        with tempfile.TemporaryDirectory() as folder:
            given = {**vars(args), **savings.parts_of(way), "seed": seed}
            given["checkpoint"] = Path(folder) / "gpt.pt"
            own = script_options.options_from(argparse.Namespace(**given))
            trainer = train_gpt.Trainer(own, text)
            trainer.fit()
            rows.append(_row(way, seed, trainer.summary()))


def _row(way: str, seed: int, run: Row) -> Row:
    return {
        "layer": way,
        "mode": f"{MODEL}, seed {seed}",
        "seed": seed,
        "val_loss": run["final_val_loss"],
        "train_loss": run["train_loss"],
        "optimizer_mib": run["optimizer_mib"],
        "activations_mib": run["saved_for_backward_mib"],
    }


def judge(rows: Sequence[Row]) -> list[Row]:
    """Write each row's gap, and say of each way whether its mean over the seeds is small enough."""
    base = {row["seed"]: row["val_loss"] for row in rows if row["layer"] == BASELINE}
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row["layer"] != BASELINE and row["seed"] in base:
            row["gap_percent"] = 100 * (row["val_loss"] / base[row["seed"]] - 1)
            gaps.setdefault(row["layer"], []).append(row["gap_percent"])
    luck = _spread([100 * loss / statistics.fmean(base.values()) for loss in base.values()])
    return [_verdict(way, own, luck) for way, own in gaps.items()]


def _verdict(way: str, gaps: list[float], luck: str) -> Row:
    measured = statistics.fmean(gaps)
    return {
        "layer": way,
        "mode": f"{MODEL}, {len(gaps)} seeds",
        "against": f"gap to {BASELINE}, %, at most ({_spread(gaps)}; {BASELINE}'s seeds {luck})",
        "target": MAX_GAP,
        "measured": measured,
        "met": "yes" if measured <= MAX_GAP else "no",
    }


def _spread(values: Sequence[float]) -> str:
    return f"± {statistics.stdev(values):.2f}" if len(values) > 1 else "one seed"
