"""Train the same GPT on the same text in five recipes, and show what each costs.

    bash scripts/demo.sh                  # sets up .venv, then runs this
    python scripts/demo.py --steps 50     # every option of train_gpt.py but the recipe

All runs share the initial weights, the order of the data, and bf16 mixed precision around the
linear layers (see gpt.py, also for why the output head is not in float8). Four of them should lie
on top of each other, give or take the noise of so short a training: over learning rates and step
counts the same recipe came out from 1.3 % better than bf16 to 1.7 % worse. The fifth, "naive",
casts to float8 without scales: it shows what the scales are for. Nothing about it is rigged; it is
an ordinary model with an ordinary mean loss, whose gradients E5M2 cannot hold unscaled (the comment
in gpt.py has the numbers).

The recipes take turns, from one validation to the next: one watches their losses side by side, and
whatever else the machine does slows all of them, so that the speeds compare.

Writes demo.json (numbers) and demo.png (loss curves) into --out-dir. Ctrl-C leaves a checkpoint,
and --resume goes on from there, with the recipes that were already done.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
from environment import environment, write_json
from matplotlib.figure import Figure  # not pyplot: a file is all we want, and no display is needed
from options import Options, options_from, parser
from tabulate import tabulate
from train_gpt import CtrlC, Trainer

RECIPES = ("bf16", "tensorwise", "delayed", "rowwise", "naive")
SMOOTHING = 0.8  # of the training losses in the plot; the JSON has them as they are


def trainers(options: Options, recipes: list[str], folder: Path) -> list[Trainer]:
    """One for each recipe; with --resume from its checkpoint, where it has one already."""
    text, made = corpus.load(options.data), []
    for recipe in recipes:
        path = folder / f"{recipe}.pt"
        resume = options.resume and path.is_file()
        made.append(Trainer(replace(options, recipe=recipe, checkpoint=path, resume=resume), text))
    return made


def take_turns(team: list[Trainer], options: Options, stop: CtrlC) -> bool:
    """Train each to the next validation, again and again; False if interrupted."""
    turns = range(
        options.eval_interval, options.steps + options.eval_interval, options.eval_interval
    )
    for turn in turns:
        until = min(turn, options.steps)
        behind = (trainer for trainer in team if trainer.step < until)
        if not all(trainer.fit(stop, until) for trainer in behind):
            return False
    return True


def add_gaps(runs: list[dict[str, Any]]) -> None:
    """How much worse than bf16 each run ended, in percent of bf16's validation loss."""
    reference = {run["recipe"]: run["final_val_loss"] for run in runs}.get("bf16")
    for run in runs:
        gap = None if reference is None else 100 * (run["final_val_loss"] / reference - 1)
        run["gap_to_bf16_percent"] = gap


def table(runs: list[dict[str, Any]]) -> str:
    columns = {
        "recipe": "recipe",
        "final_val_loss": "val. loss",
        "gap_to_bf16_percent": "gap to bf16 [%]",
        "tokens_per_second": "tokens/s",
        "saved_for_backward_mib": "saved for backward [MiB]",
    }
    rows = [[run[column] for column in columns] for run in runs]
    return tabulate(
        rows, headers=list(columns.values()), floatfmt=("", ".4f", "+.2f", ",.0f", ".1f")
    )


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for run in runs:
        (line,) = axes.plot(smooth(run["train_loss"]), label=run["recipe"], linewidth=1)
        steps, losses = zip(*run["val_loss"], strict=True)
        axes.plot(steps, losses, "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title("Training loss (lines, smoothed) and validation loss (dots)")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def smooth(losses: list[float]) -> list[float]:
    """An exponential average, unbiased at its start as Adam's are."""
    averages, average = [], 0.0
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**step))
    return averages


def main(argv: list[str] | None = None) -> int:
    p = parser((__doc__ or "").partition("\n")[0])
    p.add_argument("--recipes", nargs="+", default=list(RECIPES), help=" ".join(RECIPES))
    p.add_argument("--out-dir", type=Path, default=Path("out/demo"))
    args = p.parse_args(argv)
    try:
        options = options_from(args)
        team = trainers(options, args.recipes, args.out_dir)
    except (ValueError, OSError) as error:
        sys.exit(f"demo.py: {error}")
    with CtrlC() as stop:
        finished = take_turns(team, options, stop)
    if not finished:
        print("stopped: continue with the same command and --resume")
        return 130
    report([trainer.summary() for trainer in team], options, args.out_dir)
    return 0


def report(runs: list[dict[str, Any]], options: Options, folder: Path) -> None:
    add_gaps(runs)
    shared = {k: v for k, v in options.identity().items() if k != "recipe"}
    write_json(folder / "demo.json", {**environment(options.seed), "options": shared, "runs": runs})
    plot(runs, folder / "demo.png")
    print(f"\n{table(runs)}\n\nnumbers: {folder / 'demo.json'}, curves: {folder / 'demo.png'}")


if __name__ == "__main__":
    sys.exit(main())
