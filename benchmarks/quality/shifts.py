"""Sudden changes that a study plants in a training.

=============== ===================================================================================
change          what happens before the first step of it
=============== ===================================================================================
``start``       nothing: it is the first step of the training. Amaxes change faster than ever later
``restart``     the learning rate, which has fallen linearly to zero, jumps to `RESTART` times its
                peak
``alphabet``    every byte of the text turns into another one of the other half of the 256, which
                the model has hardly seen: its loss is that of a wrong guess, and its gradients grow
``growth``      the inputs of all layers grow by `GROWTH`. The layers' outputs are divided by it, so
                that the function does not change. As a power of two it does not change a bit of
                bf16, nor of float8 with dynamic scales: what changes in a delayed recipe is the
                work of its stale scales
``none``        no change; the rate falls to zero at the end, as in `run.schedule`
=============== ===================================================================================

Norms bound the inputs of a layer: a change of text or rate moves their amaxes by less than half an
octave, and those of gradients by up to three. Therefore ``growth`` is planted in the layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.quality import run
from scripts.training import gpt

START, RESTARTED, ALPHABET, GROWN, NONE = "start", "restart", "alphabet", "growth", "none"
SHIFTS = (START, RESTARTED, ALPHABET, GROWN)
RESTART = 4.0
GROWTH = 4.0  # two octaves
HALF = 128  # of the alphabet
WARM_UP = 8  # steps


def rate(shift: str, step: int, before: int, steps: int) -> float:
    """What the peak learning rate is multiplied by.

    Args:
        shift: the change.
        step: counted from 0.
        before: the first step of the change.
        steps: of the training.
    """
    if shift == NONE:
        return run.schedule(step, steps)
    warm = min(1.0, (step + 1) / WARM_UP)
    if shift != RESTARTED:
        return warm
    return min(warm, (before - step) / max(1, before - WARM_UP)) if step < before else RESTART


def text_of(shift: str, changed: bool, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of the other half of the alphabet where that is the change."""
    tokens, targets = pair
    return (tokens ^ HALF, targets ^ HALF) if changed and shift == ALPHABET else pair


class Factor:
    """The factor of ``growth``, in all linear layers of a model but the head.

    Attributes:
        value: a power of two; 1 before the change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.value = 1.0
        for fqn, module in model.named_modules():
            if isinstance(module, nn.Linear) and fqn != "head":
                module.register_forward_pre_hook(self._grow)
                module.register_forward_hook(self._divide)

    def _grow(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] * self.value,)

    def _divide(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output / self.value


def factor_in(shift: str, model: gpt.GPT | nn.Module) -> Factor | None:
    """The factor of a model in which it will grow, else None."""
    return Factor(model) if shift == GROWN else None
