"""What each cast does to one step, on the same weights: a measure without the noise of training.

Two trainings that differ by one rounding end apart, because small differences grow. The effect of
a cast on a single step has no such noise. A `Probe` trains in bf16 for half of its steps. On those
weights, for a number of batches, it then compares gradients and loss with casts, g and l, to those
without, g0 and l0 (of the linear layers' weights, all in one vector):

    error         sqrt(mean |g - g0|^2 / |g0|^2)     of a batch
    mean_error    |sum (g - g0)| / |sum g0|          of the mean gradient: what does not average out
    loss_change   100 (sum l / sum l0 - 1)           in per cent; casts of backward have none

An error that is independent in every batch has a mean_error near error / sqrt(batches) times
sqrt(mean |g0|^2) / |mean g0|; an optimizer averages it away over steps. The weight's rounding is
the same in every batch, so its error stays.

``float32`` stands for the gradient without autocast: bf16's own error is the control.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measuring.harness import Row
from benchmarks.quality.ablated import ABLATIONS, CASTS, AblatedLinear, ablate, casts_in
from benchmarks.quality.contenders import BASE, contender
from benchmarks.quality.run import Run, autocast, losses_of_steps, text_of

FLOAT32, ALL = "float32", "tensorwise"


@dataclass(frozen=True, kw_only=True)
class Probe(Run):
    """A training whose half-way weights are probed.

    Args:
        batches: whose gradients are compared; of steps that are not trained on.
    """

    batches: int


def probe(run: Probe, data: Path | None = None, device: str = "cpu") -> Row:
    """A row whose ``casts`` has the three measures of every ablation, of `ALL` and of `FLOAT32`."""
    text = text_of(data)
    model = run.new_model(device)
    what = contender(BASE, model)
    for _ in itertools.islice(losses_of_steps(run, what, text, device), run.steps // 2):
        pass
    layers = ablate(model)
    steps = range(run.steps, run.steps + run.batches)
    batches = [run.batch_of(text, step, device) for step in steps]
    references = [_gradient(model, layers, batch, device) for batch in batches]
    casts = {
        name: compared(references, (_gradient(model, layers, batch, device) for batch in batches))
        for name in _with_casts(layers)
    }
    exact = (_gradient(model, layers, batch, None) for batch in batches)
    casts[FLOAT32] = compared(references, exact)
    loss = sum(loss for _, loss in references) / len(references)
    return {"text": text.digest, "loss": loss, "casts": casts}


def compared(
    references: Sequence[tuple[Tensor, float]], others: Iterable[tuple[Tensor, float]]
) -> dict[str, float]:
    """The measures of gradients and losses, batch by batch; see the file's docstring."""
    squares, error_sum, loss, loss0 = 0.0, torch.tensor(0.0), 0.0, 0.0
    for (g0, l0), (g, l1) in zip(references, others, strict=True):
        difference = g - g0
        squares += float(difference.square().sum() / g0.square().sum())
        error_sum = error_sum + difference
        loss, loss0 = loss + l1, loss0 + l0
    whole = torch.stack([g0 for g0, _ in references]).sum(0)
    return {
        "error": math.sqrt(squares / len(references)),
        "mean_error": float(error_sum.norm() / whole.norm()),
        "loss_change": 100 * (loss / loss0 - 1),
    }


def _with_casts(layers: Sequence[AblatedLinear]) -> Iterator[str]:
    """Names of sets of casts; those are on until the next name is asked for."""
    for name in (*ABLATIONS, ALL):
        for layer in layers:
            layer.casts = frozenset(CASTS) if name == ALL else casts_in(name)
        yield name
    for layer in layers:
        layer.casts = frozenset()


def _gradient(
    model: nn.Module,
    layers: Sequence[AblatedLinear],
    batch: tuple[Tensor, Tensor],
    device: str | None,
) -> tuple[Tensor, float]:
    """Of the layers' weights, in one vector, and the loss; in float32 where device is None."""
    with nullcontext() if device is None else autocast(device):
        loss = model(*batch)
    gradients = torch.autograd.grad(loss, [layer.weight for layer in layers])
    return torch.cat([gradient.flatten() for gradient in gradients]), float(loss.item())
