"""One training under `float8.inspect_every`, healthy or with a planted fault.

The model is that of `run.py`. A fault begins at a look, or with the training:

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

A row says which alarms started, how many of them before the fault, and after how many faulty looks
the alarm that is expected of the fault started.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import float8
from benchmarks.measuring.harness import Row
from benchmarks.quality.contenders import Contender, all_but_the_head
from benchmarks.quality.run import (
    SHOWN,
    GPTRun,
    alarm_line,
    autocast,
    optimizer_of,
    schedule,
    set_rate,
    text_of,
    update,
)
from float8 import CastConfig, Float8LinearConfig, ScalingType
from float8.numerics import Alarm
from scripts.training import gpt

HEALTHY = "none"
VICTIM = "blocks.1.feed_forward.down"
NORMED = "blocks.1.feed_forward.gate_up"  # reads a norm: its input is near a Gaussian


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
        self.run, self.model = run, _model(run).to(device)
        is_unit = run.recipe == "unit"
        self.what = Contender(self.model, is_unit, self._after_step)
        self.optimizer = optimizer_of(self.what, 2**-4 if is_unit else 2e-3)
        self.forgets = self.cancels = False
        self.loss_factor = 1.0

    def _after_step(self) -> None:
        if not (self.forgets or self.what.unit_scaled):
            float8.after_step(self.model)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(tokens.device):
            loss: Tensor = self.model(tokens, targets)
            return loss - 0.99 * self.model(tokens, targets) if self.cancels else loss

    def step(self, step: int, batch: tuple[Tensor, Tensor]) -> float:
        set_rate(self.optimizer, schedule(step, self.run.steps))
        loss = self.loss(*batch)
        (loss * self.loss_factor).backward()
        update(self.what, self.optimizer)
        return loss.item()


# --- faults


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


def _weight(training: Training, layer: str) -> Tensor:
    return training.model.get_parameter(f"{layer}.weight")


def _multiply_weight(training: Training) -> None:
    with torch.no_grad():
        _weight(training, VICTIM).mul_(2.0**12)
    training.forgets = True


def _divide_loss(training: Training) -> None:
    training.loss_factor = 2.0**-12
    training.forgets = True


def _divide_loss_under_a_static_scale(training: Training) -> None:
    training.loss_factor = 2.0**-28


def _shrink_input(training: Training) -> None:
    def shrunk(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        # To 0.6 of the smallest normal number: 24 dB are left, and little becomes zero.
        wanted = 0.6 * 2.0**-6 * STATIC[DECAYS]
        return (args[0] * (wanted / args[0].detach().float().std()).to(args[0].dtype),)

    training.model.get_submodule(NORMED).register_forward_pre_hook(shrunk)


def _grow_a_product(training: Training) -> None:
    with torch.no_grad():
        _weight(training, NORMED).mul_(16)


def _grow_a_channel(training: Training) -> None:
    weight = _weight(training, VICTIM)
    factors = torch.ones(weight.shape[1], device=weight.device)
    factors[0] = 2.0**16
    layer = training.model.get_submodule(VICTIM)
    layer.register_forward_pre_hook(lambda _, args: (args[0] * factors.to(args[0].dtype),))
    weight.register_hook(lambda grad: grad * (factors == 1))
    with torch.no_grad():
        weight /= factors
    training.optimizer.state.clear()  # its momentum would move the column


def _put_inf(training: Training) -> None:
    with torch.no_grad():
        _weight(training, VICTIM)[0, 0] = math.inf


def _cancel(training: Training) -> None:
    training.cancels = True


DECAYS, GRADIENTS = "static for 28", "static gradients"
STATIC = {"static for 0.25": 0.25 / 448, DECAYS: 2.0**-4, GRADIENTS: 2.0**-16}  # data * scale
FAULTS = {
    "saturates": Fault("static for 0.25", "saturation", "input"),
    "stale": Fault("delayed", "stale scale", "weight", _multiply_weight),
    "forgotten": Fault("delayed", "stale scale", "grad_output", _divide_loss),
    "decays": Fault(DECAYS, "falling SQNR", "input", _shrink_input),
    "flushes": Fault(GRADIENTS, "flush", "grad_output", _divide_loss_under_a_static_scale),
    "outgrows": Fault("unit", "saturation", "input", _grow_a_product),
    "outlier": Fault("tensorwise", "flush", "input", _grow_a_channel),
    "inf": Fault("tensorwise", "inf or NaN", "weight", _put_inf),
    "drowns": Fault("tensorwise", "gradient noise", "grad_output", _cancel),
}


# --- one training


def watch(run: Watched, data: Path | None = None, device: str = "cpu") -> Row:
    """Train, and say which alarms started."""
    text = text_of(data)
    training, alarms = Training(run, device), list[Alarm]()
    monitor = float8.inspect_every(training.model, run.every, on_alarm=alarms.append)
    fault = FAULTS.get(run.fault)
    begin = 0 if fault is None or fault.begin is None else run.fault_step
    last, looks = math.nan, 0
    for step in range(run.steps):
        if fault is not None and fault.begin is not None and step == begin:
            fault.begin(training)
        with monitor:
            loss = training.step(step, run.batch_of(text, step, device))
        looks += monitor.report is not None and monitor.report.step == step
        last = loss if math.isfinite(loss) else last
    row: Row = {"error": "no loss is finite"} if math.isnan(last) else {"loss": last}
    row |= {"looks": looks, "alarms": len(alarms)}
    row["shown"] = [alarm_line(alarm) for alarm in alarms[:SHOWN]]
    if fault is not None:
        row["early"] = sum(alarm.started < begin for alarm in alarms)
        expected = [a.started for a in alarms if (a.rule, a.operand) == (fault.rule, fault.operand)]
        if expected:
            row["looks_until"] = (min(expected) - begin) // run.every + 1
    return row


def _model(run: Watched) -> nn.Module:
    model = run.new_model()
    if run.recipe not in STATIC:
        return gpt.in_recipe(model, run.recipe)
    cast = CastConfig(ScalingType.STATIC, static_scale=STATIC[run.recipe])
    config = (
        Float8LinearConfig(cast_config_grad_output=cast)
        if run.recipe == GRADIENTS
        else Float8LinearConfig(cast_config_input=cast)
    )
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=all_but_the_head
    )
