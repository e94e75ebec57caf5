"""Train the same GPT on the same text in several recipes, and show what each costs.

    bash scripts/demo.sh                     # sets up .venv, then runs this for 4 minutes
    python scripts/demo.py --steps 50        # every option of train_gpt.py but the recipe
    python scripts/demo.py --seeds 0 1 2     # each recipe three times: mean and spread
    python scripts/demo.py --recipes bf16 bf16+float8_adamw tensorwise+saved_activations
    bash scripts/demo.sh --nproc 2           # in one process, then in two under FSDP2

Without --steps it first measures a few steps of each recipe, and then trains all of them for as
many as take 4 minutes together.

All runs share the initial weights, the order of the data, and bf16 mixed precision around the
linear layers (see training/gpt.py, also for why the output head is not in float8). Recipes with
scales should agree with bf16 within the noise of so short a training. "bf16_rounded" shows that
noise: it is bf16 again, from initial weights that were rounded to bf16. Its gap to bf16 is one
rounding that grew in training. The demo ends by saying how large it was.

"naive" casts to float8 without scales, to show their effect. It is the same model with the same
mean loss, whose gradients are too small for E5M2 without scales (the comment in training/gpt.py has
the numbers). "unit" casts without scales too, the same model after `unit_scale`, and is to be
compared with "unit_bf16", which is that model in bf16. The two train by u-muP's rules, hence with a
learning rate of their own.

A recipe may be followed by the names of savings, each after a "+" (training/savings.py).

The recipes take turns, from one validation to the next: other load on the machine then slows all of
them alike, so that their speeds are comparable. On a CPU float8 products are emulated and their
speed means nothing: the table has it on a GPU only, the file always.

With --nproc the recipes of `SHARDED`, or of --recipes, train once in this process and then in that
many under torchrun and FSDP2, with weights gathered as float8 where the recipe can
(training/parallel.py says which, and why the losses are comparable). The table shows both.

Writes demo.json (numbers) and demo.png (loss curves, training/curves.py) into --out-dir.
Ctrl-C leaves a checkpoint, and --resume with the same --steps goes on from there.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import picture
from benchmarks.models import text as texts
from scripts.train_gpt import Trainer, progress
from scripts.training import curves
from scripts.training.ctrl_c import CtrlC, at_once
from scripts.training.curves import base_of, name_of
from scripts.training.environment import check_writable, environment, write_json
from scripts.training.options import Options, give_up, options_from, parser, processes
from scripts.training.parallel import launch, leave
from scripts.training.savings import SAVED, parts_of

SHARDED = ("bf16", "tensorwise", "delayed")  # with --nproc, unless --recipes says otherwise
SECONDS = 220  # of training, unless --steps says otherwise; imports and the report take the rest
CONTROL = "bf16_rounded"
RECIPES = ("bf16", CONTROL, "tensorwise", "delayed", "rowwise", "naive", "unit_bf16", "unit")


def steps_in_time(options: Options, recipes: list[str], seeds: int, text: texts.Text) -> int:
    """The steps for which all runs, in turns, take `SECONDS` on this machine; at least one."""
    together = 0.0
    for recipe in recipes:
        trial = Trainer(replace(options, **parts_of(recipe), resume=False), text)
        together += seeds * trial.seconds_per_step()
    steps = max(1, int(SECONDS / together))
    if trial.team.rank == 0:
        print(f"{steps} steps of each recipe: they take about 4 minutes here (or give --steps)")
    return steps


def trainers(
    options: Options, recipes: list[str], seeds: list[int], folder: Path, text: texts.Text
) -> list[Trainer]:
    """One for each seed and recipe; with --resume from its checkpoint, where it has one already."""
    made = []
    for seed in seeds:
        for recipe in recipes:
            path = folder / f"{recipe}_{seed}_{options.nproc}.pt"
            own = replace(options, **parts_of(recipe), seed=seed, checkpoint=path)
            resume = options.resume and path.is_file()
            made.append(Trainer(replace(own, resume=resume), text))
    return made


def take_turns(team: list[Trainer], options: Options, stop: CtrlC) -> bool:
    """Train each to the next validation, again and again; False if interrupted."""
    turns = range(options.eval_interval, options.steps, options.eval_interval)
    with progress(team) as bar:
        for until in (*turns, options.steps):
            behind = (trainer for trainer in team if trainer.step < until)
            if not all(trainer.fit(stop, until, bar) for trainer in behind):
                return False
    return True


def add_gaps(runs: list[dict[str, Any]]) -> None:
    """How much worse than bf16, than its own base, and than in one process each run ended.

    All in percent of their loss; the first two among runs of as many processes.
    """
    losses = {(run["seed"], run["processes"], run["recipe"]): run["final_val_loss"] for run in runs}
    for run in runs:
        seed, processes, recipe = run["seed"], run["processes"], run["recipe"]
        alone = 1 if processes > 1 else None  # of one process there is nothing to compare with
        for name, other in (
            ("bf16", (seed, processes, "bf16")),
            ("base", (seed, processes, base_of(recipe))),
            ("alone", (seed, alone, recipe)),
        ):
            is_known = other in losses
            gap = 100 * (run["final_val_loss"] / losses[other] - 1) if is_known else None
            run[f"gap_to_{name}_percent"] = gap


COLUMNS = {
    "final_val_loss": ("val. loss", "{:.4f}"),
    "gap_to_bf16_percent": ("gap to bf16 [%]", "{:+.2f}"),
    "gap_to_base_percent": ("gap to its base [%]", "{:+.2f}"),
    "gap_to_alone_percent": ("gap to 1 process [%]", "{:+.2f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "saved_for_backward_mib": ("saved for backward [MiB]", "{:.1f}"),
    "optimizer_mib": ("optimizer [MiB]", "{:.1f}"),
}
# Measured: benchmarks/results/cpu_noamx_demo_control.json
USUAL_NOISE = (
    "Eight such pairs, after 160 steps on a CPU, ended 0.5 % apart in the mean and up to 1.8 %: a "
    "gap of that size is no difference between recipes."
)
SPREAD = tuple(COLUMNS)[:4]  # what differs between seeds


def table(runs: list[dict[str, Any]], device: str) -> str:
    """A row per recipe: the mean over the seeds, and of several the standard deviation."""
    shown = {k: c for k, c in COLUMNS.items() if any(run[k] is not None for run in runs)}
    if torch.device(device).type == "cpu":  # products are emulated
        del shown["tokens_per_second"]
    rows = []
    for name in dict.fromkeys(map(name_of, runs)):
        own = [run for run in runs if name_of(run) == name]
        cells = (_cell([run[k] for run in own], shown[k][1], k in SPREAD) for k in shown)
        rows.append([name, *cells])
    align = ["left", *["right"] * len(shown)]
    headers = ["recipe", *(name for name, _ in shown.values())]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align)


def _cell(values: list[float | None], form: str, spread: bool) -> str:
    numbers = [value for value in values if value is not None]
    mean = form.format(statistics.fmean(numbers)) if numbers else ""
    if not spread or len(numbers) < 2:
        return mean
    return f"{mean} ± {form.replace('+', '').format(statistics.stdev(numbers))}"


def remarks(runs: list[dict[str, Any]]) -> str:
    """How to read the table: what naive is, how large noise is, and what to do next."""
    said = []
    if any(run["recipe"] == "naive" for run in runs):
        said.append(
            "naive: a cast to float8 without scales, which rounds most gradients to 0. It shows "
            "what scales are for: do not train with it."
        )
    noise = [
        abs(run["gap_to_bf16_percent"])
        for run in runs
        if run["recipe"] == CONTROL and run["gap_to_bf16_percent"] is not None
    ]
    if noise:
        of = f"in the mean of {len(noise)} pairs" if len(noise) > 1 else "in this one pair"
        said.append(
            f"noise: {CONTROL} is bf16 again, from weights rounded to bf16. It ended "
            f"{statistics.fmean(noise):.2f} % from bf16 {of}. {USUAL_NOISE}"
        )
    said.append(
        "next: call float8.convert_to_float8_training(model) in your own script (README.md, Use). "
        'float8.estimate(model, tokens=..., device="H100") predicts whether it gains.'
    )
    return "\n".join(said)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = parser((__doc__ or "").partition("\n")[0])
    p.add_argument("--recipes", nargs="+", help=f"{' '.join(RECIPES)}; RECIPE+float8_adamw")
    p.add_argument("--seeds", type=int, nargs="+", help="in place of --seed: one run each")
    p.add_argument("--out-dir", type=Path, default=Path("out/demo"))
    args = p.parse_args(argv)
    try:
        options = options_from(args)
        default = RECIPES if options.nproc == 1 else SHARDED
        recipes = list(dict.fromkeys(args.recipes or default))
        seeds = list(dict.fromkeys(args.seeds or [options.seed]))
        launches = options.nproc > processes()
        check_writable(args.out_dir / "demo.json", "--out-dir")
        text = texts.load(options.data, standard_library=True)
        nproc = 1 if launches else options.nproc
        if args.steps is None:
            own = replace(options, nproc=nproc)
            options = replace(options, steps=steps_in_time(own, recipes, len(seeds), text))
        team = trainers(replace(options, nproc=nproc), recipes, seeds, args.out_dir, text)
    except (ValueError, OSError) as error:
        give_up("demo.py", error)
    finished = _train(team, options, args.out_dir, first_half=launches)
    if finished and launches:
        team.clear()
        return launch(__file__, [*argv, "--steps", str(options.steps)], options.nproc)
    return 0 if finished else 130


def _train(team: list[Trainer], options: Options, folder: Path, first_half: bool) -> bool:
    """Train and report; False if interrupted."""
    ranks = team[0].team
    with CtrlC() as stop:
        finished = take_turns(team, options, stop)
    if finished:
        runs = [trainer.summary() for trainer in team]
        if ranks.rank == 0:
            report(runs, options, folder, first_half)
    elif ranks.rank == 0:
        print(f"stopped: continue with the same command and --resume --steps {options.steps}")
    ranks.close()
    return finished


def report(runs: list[dict[str, Any]], options: Options, folder: Path, first_half: bool) -> None:
    """Write and print the report; with `first_half` only save the runs for the report to come."""
    alone = folder / "alone.json"
    about = {**environment(runs[0]["seed"], options.device), "options": _shared(options)}
    if first_half:
        write_json(alone, {**about, "runs": runs})
        return
    if options.nproc > 1 and alone.is_file():  # the runs of one process with these options
        kept = json.loads(alone.read_text(encoding="utf-8"))
        runs = (kept["runs"] if kept["options"] == about["options"] else []) + runs
    add_gaps(runs)
    write_json(folder / "demo.json", {**about, "runs": runs})
    picture.save(curves.draw(runs), folder / "demo.png")
    print(f"\n{table(runs, options.device)}\n")
    print(f"numbers: {folder / 'demo.json'}, curves: {folder / 'demo.png'}\n\n{remarks(runs)}")


def _shared(options: Options) -> dict[str, str | int | float | None]:
    own = {"seed", *parts_of("+".join(("bf16", SAVED, "adamw", "O1")))}
    return {name: value for name, value in options.record().items() if name not in own}


if __name__ == "__main__":
    leave(at_once(main, "demo.py"))
