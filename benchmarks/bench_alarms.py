"""Do alarms stay silent in healthy trainings, and start soon after a fault?

Small trainings under `float8.inspect_every`: each recipe healthy, and each planted fault. Two
targets: no alarm in a healthy training, nor before a fault; and after a fault the alarm that is
expected of it within as many looks as its rule asks for, or it is missed
(`float8.numerics.alarms`). Seeds 0 to 5 were used to choose the limits of the rules: report
others.

A fault begins at a look, or with the training:

========== ============ ============================================================================
fault      recipe       what is done to one layer or one operand
========== ============ ============================================================================
saturates  static       inputs are cast with a static scale made for 0.25, and reach about 4
stale      delayed      a weight is multiplied by 2^12, and `float8.after_step` is not called again
forgotten  delayed      the loss is divided by 2^12, and `float8.after_step` is not called again
decays     static       the inputs of a layer shrink into the subnormal numbers of their scale
flushes    static       the loss is divided by 2^28, and the scale of the gradients is static
outgrows   unit         the rows of a SwiGLU's weight are multiplied by 16: its output, a product of
                        two of them, outgrows a scale of 1
outlier    tensorwise   one channel of a SwiGLU grows by 2^16; what reads it is divided by as much
inf        tensorwise   one element of a weight becomes inf
drowns     tensorwise   the gradients of two halves of a batch cancel to 1 %
========== ============ ============================================================================

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks.

    python benchmarks/bench_alarms.py --seeds 6 7 8 9 10 11 --jobs 2 -o alarms.json
    python benchmarks/bench_alarms.py --quick
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

import torch
from torch import Tensor, nn

import float8
from benchmarks.measuring import report
from benchmarks.measuring.harness import Row
from benchmarks.models import text as texts
from benchmarks.models.text import Pair
from benchmarks.quality.contenders import Contender, contender, convert
from benchmarks.quality.intervals import grouped
from benchmarks.quality.study import Study
from benchmarks.quality.training import (
    SHOWN,
    GPTRun,
    alarm_line,
    in_autocast,
    optimizer_of,
    steps_of,
    straight_to_zero,
)
from float8 import CastConfig, Float8LinearConfig, ScalingType
from float8.config import RECIPES
from float8.numerics import Alarm
from float8.numerics.alarms import PROBLEM_KINDS

HEALTHY = "none"
VICTIM = "blocks.1.feed_forward.down"
NORMED = "blocks.1.feed_forward.gate_up"  # reads a norm: its input is near a Gaussian
LOOKS = {kind.name: kind.looks for kind in PROBLEM_KINDS}
LOOKS_BEFORE = 3  # healthy ones before a fault
DECAYS, GRADIENTS = "static for 28", "static gradients"
STATIC = {"static for 0.25": 0.25 / 448, DECAYS: 2.0**-4, GRADIENTS: 2.0**-16}  # data * scale
COLUMNS = report.columns(
    "layer recipe rule runs looks false_alarms missed looks_until allowed",
    layer="fault", rule="alarm", looks_until="looks until the alarm", allowed="at most",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Watched(GPTRun):
    """What decides a training.

    Args:
        recipe: of the layers.
        fault: a name of `FAULTS`, or "none".
        steps: of the optimizer.
        every: steps between two looks.
        fault_step: the step at which a fault begins that does not begin with the training.
    """

    recipe: str
    fault: str
    steps: int
    every: int
    fault_step: int
    width: int = 64
    batch: int = 8


class Training:
    """A model and its optimizer; faults change what a step does."""

    def __init__(self, run: Watched, device: str) -> None:
        model = run.new_model(device)
        if run.recipe in STATIC:
            cast = CastConfig(ScalingType.STATIC, static_scale=STATIC[run.recipe])
            operand = "grad_output" if run.recipe == GRADIENTS else "input"
            changed: dict[str, Any] = {f"cast_config_{operand}": cast}
            config = replace(Float8LinearConfig(), **changed)
            self.what = Contender(convert(model, config))
        else:
            self.what = contender(run.recipe, model)
        self.model = self.what.model
        self.optimizer = optimizer_of(self.what, 2**-4 if self.what.unit_scaled else 2e-3)
        self.forgets = self.cancels = False
        self.loss_factor = 1.0

    def after_step(self) -> None:
        if not self.forgets:
            self.what.after_step()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = in_autocast(self.model)(tokens, targets)
        if self.cancels:
            loss = loss - 0.99 * in_autocast(self.model)(tokens, targets)
        return loss * self.loss_factor

    def weight(self, layer: str) -> Tensor:
        return self.model.get_parameter(f"{layer}.weight").data

    def forget(self, loss_factor: float = 1.0, weight_factor: float = 1.0) -> None:
        """Leave out `float8.after_step` from here on."""
        self.forgets, self.loss_factor = True, loss_factor
        self.weight(VICTIM).mul_(weight_factor)

    def divide_loss(self, divisor: float) -> None:
        self.loss_factor = 1 / divisor

    def put_inf(self) -> None:
        self.weight(VICTIM)[0, 0] = math.inf

    def cancel(self) -> None:
        self.cancels = True

    def shrink_input(self) -> None:
        def shrunk(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            # To 0.6 of the smallest normal number: 24 dB are left, and little becomes zero.
            wanted = 0.6 * 2.0**-6 * STATIC[DECAYS]
            return (args[0] * (wanted / args[0].detach().float().std()).to(args[0].dtype),)

        self.model.get_submodule(NORMED).register_forward_pre_hook(shrunk)

    def grow_a_channel(self) -> None:
        weight = self.model.get_parameter(f"{VICTIM}.weight")
        factors = torch.ones(weight.shape[1], device=weight.device)
        factors[0] = 2.0**16
        layer = self.model.get_submodule(VICTIM)
        layer.register_forward_pre_hook(lambda _, args: (args[0] * factors.to(args[0].dtype),))
        weight.register_hook(lambda grad: grad * (factors == 1))
        weight.data /= factors
        self.optimizer.state.clear()  # its momentum would move the column


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Args:
        recipe: of the training.
        rule: of the alarm that is expected.
        operand: of the cast that it names.
        begin: makes it, at its step; None where the recipe is the fault.
    """

    recipe: str
    rule: str
    operand: str
    begin: Callable[[Training], object] | None = None


# name -> recipe, rule, operand, what makes it
FAULTS = {
    "saturates": Fault("static for 0.25", "saturation", "input"),
    "stale": Fault("delayed", "stale scale", "weight", lambda t: t.forget(1.0, 2.0**12)),
    "forgotten": Fault("delayed", "stale scale", "grad_output", lambda t: t.forget(2.0**-12)),
    "decays": Fault(DECAYS, "noise", "input", Training.shrink_input),
    "flushes": Fault(GRADIENTS, "flush", "grad_output", lambda t: t.divide_loss(2.0**28)),
    "outgrows": Fault("unit", "saturation", "input", lambda t: t.weight(NORMED).mul_(16)),
    "outlier": Fault("tensorwise", "flush", "input", Training.grow_a_channel),
    "inf": Fault("tensorwise", "inf or NaN", "weight", Training.put_inf),
    "drowns": Fault("tensorwise", "gradient noise", "grad_output", Training.cancel),
}


def watch(run: Watched, data: Path | None = None, device: str = "cpu") -> Row:
    """Train, and say which alarms started, how many before the fault, and when the expected one."""
    text = texts.load(data)
    training, alarms = Training(run, device), list[Alarm]()
    monitor = float8.inspect_every(training.model, run.every, on_alarm=alarms.append)
    fault = FAULTS.get(run.fault)
    plant = None if fault is None else fault.begin
    begin = 0 if plant is None else run.fault_step

    def batches() -> Iterator[Pair]:
        for step, batch in enumerate(run.batches(text, range(run.steps), device)):
            if plant is not None and step == begin:
                plant(training)
            yield batch

    last, looks = math.nan, 0
    losses = steps_of(
        training.loss, training.optimizer, straight_to_zero(run.steps), batches(),
        training.what.clipped, training.after_step, monitor,
    )  # fmt: skip
    for step, loss in enumerate(map(float, losses)):
        looks += monitor.report is not None and monitor.report.step == step
        last = loss / training.loss_factor if math.isfinite(loss) else last
    row: Row = {"error": "no loss is finite"} if math.isnan(last) else {"loss": last}
    row |= {"looks": looks, "alarms": len(alarms)}
    row["shown"] = [alarm_line(alarm) for alarm in alarms[:SHOWN]]
    if fault is not None:
        row["early"] = sum(alarm.started < begin for alarm in alarms)
        expected = [a.started for a in alarms if (a.rule, a.operand) == (fault.rule, fault.operand)]
        if expected:
            row["looks_until"] = (min(expected) - begin) // run.every + 1
    return row


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per recipe and fault; ``looks_until`` is of the latest alarm of its seeds."""
    groups = grouped(rows, lambda row: (row["run"]["fault"], row["run"]["recipe"]))
    found = []
    for (name, recipe), own in groups.items():
        line: Row = {"layer": name, "recipe": recipe, "runs": len(own)}
        line["looks"] = sum(row["looks"] for row in own)
        if name == HEALTHY:
            line["false_alarms"] = sum(row["alarms"] for row in own)
        else:
            rule = FAULTS[name].rule
            line |= {"rule": rule, "false_alarms": sum(row["early"] for row in own)}
            line["allowed"] = LOOKS[rule]
            until = [row["looks_until"] for row in own if "looks_until" in row]
            line["missed"] = len(own) - len(until)
            line |= {"looks_until": max(until)} if until else {}
        found.append(line)
    return found


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per recipe and fault, and the targets: no false alarm, and no expected one missed."""
    found = lines(rows)
    targets = [
        {"layer": line["layer"], "mode": COLUMNS[name][0], "against": line["recipe"],
         "target": 0, "measured": line[name], "met": line[name] == 0}
        for line in found
        for name in ("false_alarms", "missed")
        if name in line
    ]  # fmt: skip
    return found, targets


def runs_of(options: argparse.Namespace) -> list[Watched]:
    """Every recipe healthy, and every fault, for every seed."""
    sizes, every = STUDY.sizes(options), options.every
    trainings = [(recipe, HEALTHY, options.steps) for recipe in options.recipes]
    trainings += [
        (fault.recipe, name, every * (LOOKS_BEFORE + LOOKS[fault.rule]))
        for name, fault in FAULTS.items()
        if name in options.faults
    ]
    return [
        Watched(
            **sizes | {"steps": steps}, recipe=recipe, fault=fault, seed=seed,
            fault_step=LOOKS_BEFORE * every,
        )
        for seed in options.seeds
        for recipe, fault, steps in trainings
    ]  # fmt: skip


NUMBERS = {
    "steps": (300, "of a healthy training"),
    "every": (10, "steps from look to look"),
    "width": (64, "of the model"),
    "layers": (2, "transformer blocks, 2 at least"),
    "batch": (8, "windows in a step"),
    "context": (64, "bytes of a window"),
}
QUICK = {"steps": 4, "width": 32, "layers": 2, "batch": 2, "context": 16, "every": 2}
STUDY = Study(
    "bench_alarms", __doc__, COLUMNS, runs_of, watch, summary, NUMBERS, QUICK, 1,
    {"recipes": RECIPES, "faults": FAULTS},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
