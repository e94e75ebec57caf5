"""Training in one process: what every parallel form of the same training has to equal.

Data parallelism changes two things and no others. Each rank casts its own tokens, so one process
has to cast the same microbatches, one by one. And the ranks' gradients are summed by a collective,
so one process has to add them in the same order: first those of a rank's microbatches, then those
of the ranks, pairwise. With that every bit is equal, under the **exact condition** that the number
of ranks is a power of two (dividing by it rounds nothing) and that the collective adds pairs (two
ranks, or 2 x 2: two floats have only one sum, three have several).

The loss is ``(model(x) * g).sum()``: its value tells outputs, its gradient is g, which is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import float8.unit_scaling as uu
from float8 import convert_to_float8_training, sync_float8_amax_and_scale_history
from float8.config import RECIPES

WIDTH, HIDDEN, TOKENS = 32, 48, 16
GATHERED = "gathered "
Batch = tuple[Tensor, Tensor]


def make(
    recipe: str | None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    width: int = WIDTH,
    hidden: int = HIDDEN,
) -> Any:
    """Two linear layers around a GELU, wrapped, then converted (None: plain); equal weights."""
    torch.manual_seed(0)
    if recipe == "unit":
        layers = uu.Linear(width, hidden), uu.GELU(), uu.Linear(hidden, width)
    else:
        layers = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
    return convert(wrap(nn.Sequential(*layers)), recipe)


def convert(model: Any, recipe: str | None) -> Any:
    """The model with a recipe, or as it is for None.

    ``"gathered NAME"`` is recipe NAME with weights that FSDP2 gathers in float8.
    """
    if recipe is None:
        return model
    name = recipe.removeprefix(GATHERED)
    config = replace(RECIPES[name], enable_fsdp_float8_all_gather=name != recipe)
    return convert_to_float8_training(model, config=config)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state; steps large enough that a wrong one is seen."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int, microbatch: int = 0, width: int = WIDTH) -> Batch:
    """What one rank reads in one microbatch: other values, and other scales, for each."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    x, g = torch.randn(2, TOKENS, width, generator=generator)
    return x * (1 + rank), g / (1 + microbatch)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """A scalar whose gradient at the output is the batch's g."""
    x, g = batch
    return (model(x) * g).sum()


def rank_step(
    model: nn.Module, microbatches: list[Batch], last: Any = nullcontext, others: Any = nullcontext
) -> list[float]:
    """Forward and backward of a rank's microbatches; ``others`` around all but the last.

    Returns:
        their losses.
    """
    losses = []
    for i, microbatch in enumerate(microbatches):
        with last() if i == len(microbatches) - 1 else others():
            loss = loss_of(model, microbatch)
            loss.backward()
        losses.append(loss.item())
    return losses


def global_step(model: nn.Module, ranks: list[list[Batch]]) -> list[list[float]]:
    """The same step for all ranks, one behind the other; gradients are the mean over ranks.

    Returns:
        the losses of each rank's microbatches.
    """
    losses, gradients = [], []
    for microbatches in ranks:
        model.zero_grad()
        losses.append(rank_step(model, microbatches))
        gradients.append([p.grad for p in model.parameters()])
    for p, *parts in zip(model.parameters(), *gradients, strict=True):
        p.grad = pairwise_sum([part / len(ranks) for part in parts])
    return losses


def pairwise_sum(parts: list[Tensor]) -> Tensor:
    """((a + b) + (c + d)), for a power of two of parts."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> None:
    """What ends a step; ``group`` is of the ranks that hold the same layers, by default all."""
    optimizer.step()
    optimizer.zero_grad()
    sync_float8_amax_and_scale_history(model, group)


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sharded tensors gathered, others as they are."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def assert_same_model(found: nn.Module, expected: nn.Module, replay: object) -> None:
    """Equal bits of all parameters and buffers, whatever wrapper is around ``found``."""
    for kind in ("parameters", "buffers"):
        mine, theirs = (whole(getattr(m, kind)()) for m in (found, expected))
        assert len(mine) == len(theirs), (replay, kind)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), (replay, kind, i, (a - b).abs().max())
