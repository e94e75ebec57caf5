"""The trained GPT with a planted channel, from which all contenders of a seed start.

The GPT is trained in bf16, the channel is planted, and training goes on until ``down`` uses it
(`outliers.py`). A base takes longer than what a contender does with it: it is kept in a folder, and
a process that finds none there makes it. Processes that make one at the same time write the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import outliers, pretrained, run
from benchmarks.quality.contenders import Contender
from scripts.training import corpus, gpt

RISE = 20  # steps in which the learning rate rises


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides the row of one contender, seed and kind of outlier.

    Args:
        contender: a name of `outlier_contenders.py`.
        seed: of weights and batches.
        byte: that the outlier answers to.
        exponents: of the sizes of the outlier to convert at.
        trained: those of them to train on from.
        steps: of the training after the conversion.
        base_steps: of the training before the channel is planted.
        settling_steps: of the training between planting and conversion.
        every: how many steps lie between two inspections.
        learning_rate: of the base's training, after a rise; then it falls to zero.
        layers, width, heads, context: of the model.
        batch: windows of text in a step.
        held_out: bytes of an evaluation.
    """

    contender: str
    seed: int
    byte: int
    exponents: tuple[int, ...]
    trained: tuple[int, ...]
    steps: int
    base_steps: int
    settling_steps: int
    every: int
    learning_rate: float = 1e-3
    layers: int = 2
    width: int = 128
    heads: int = 2
    context: int = 64
    batch: int = 16
    held_out: int = 2**15

    @property
    def sizes(self) -> gpt.Sizes:
        return gpt.Sizes(self.layers, self.width, self.heads, self.context)

    @property
    def steps_of_base(self) -> int:
        return self.base_steps + self.settling_steps


def base_of(
    what: Run, text: corpus.Corpus, bases: Path, device: str
) -> tuple[dict[str, Tensor], int]:
    """The weights of the trained model with a planted channel, and the channel.

    Args:
        what: a run; its contender and exponents do not count.
        text: to train on.
        bases: a folder, in which a base that is there is read, and another is written.
        device: to train on.
    """
    path = bases / f"{what.seed}_{what.byte}.pt"
    if not path.exists():
        torch.manual_seed(what.seed)
        model = gpt.GPT(what.sizes)
        base = Contender(model.to(device))
        _train(base, what, text, device, range(what.base_steps))
        tokens = outliers.windows(text, what.byte, seed=what.seed, context=what.context)
        channel = outliers.plant(model.cpu(), tokens, what.byte)
        outliers.hold(model.to(device), channel, column=False)
        _train(base, what, text, device, range(what.base_steps, what.steps_of_base))
        pretrained.save((model.cpu().state_dict(), channel), path)
    weights, channel = torch.load(path, weights_only=True)
    return weights, channel


def _train(base: Contender, what: Run, text: corpus.Corpus, device: str, steps: range) -> None:
    """Train at one learning rate, after a rise at the beginning."""
    optimizer = run.optimizer_of(base, what.learning_rate)
    for count, step in enumerate(steps, start=1):
        run.set_rate(optimizer, min(1.0, count / RISE))
        run.train_step(base, optimizer, batch_of(what, text, step), device)


def batch_of(what: Run, text: corpus.Corpus, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, counted from the beginning of the base's training."""
    return text.batch(step, seed=what.seed, batch=what.batch, context=what.context)
