"""Training in one process: the reference of every parallel form of the same training.

Data parallelism changes two things only. Each rank casts its own tokens, so one process must cast
the same microbatches, one by one. And a collective sums the ranks' gradients, so one process must
add them in the same order: first those of a rank's microbatches, then those of the ranks, pairwise.
Then every bit is equal, under the **exact condition** that the number of ranks is a power of two
(dividing by it rounds nothing) and that the collective adds pairs (two ranks, or 2 x 2: two floats
have only one sum, three have several).

The loss is ``(model(x) * g).sum()``: its value depends on the outputs, and its gradient is g, which
is random.
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
    if recipe is not None and recipe.removeprefix(GATHERED) == "unit":
        layers = uu.Linear(width, hidden), uu.GELU(), uu.Linear(hidden, width)
    else:
        layers = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
    pads = width % 16 > 0 or hidden % 16 > 0
    return convert(wrap(nn.Sequential(*layers)), recipe, pads)


def convert(model: Any, recipe: str | None, pads: bool = False) -> Any:
    """The model with a recipe, or as it is for None.

    ``"gathered NAME"`` is recipe NAME with weights that FSDP2 gathers in float8.
    """
    if recipe is None:
        return model
    name = recipe.removeprefix(GATHERED)
    gathers = name != recipe
    config = replace(RECIPES[name], enable_fsdp_float8_all_gather=gathers, pad_inner_dim=pads)
    return convert_to_float8_training(model, config=config)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state; steps large enough that a wrong one is seen."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int, microbatch: int = 0, width: int = WIDTH) -> Batch:
    """The batch of a rank in a microbatch; values and scales differ in each."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    x, g = torch.randn(2, TOKENS, width, generator=generator)
    return x * (1 + rank), g / (1 + microbatch)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """A scalar whose gradient at the output is the batch's g."""
    x, g = batch
    return (model(x) * g).sum()


def rank_step(
    model: nn.Module, microbatches: list[Batch], without_sync: Any = nullcontext
) -> list[float]:
    """Run forward and backward of a rank's microbatches; ``without_sync`` around all but the last.

    Returns:
        their losses.
    """
    losses = []
    for i, microbatch in enumerate(microbatches):
        with nullcontext() if i == len(microbatches) - 1 else without_sync():
            loss = loss_of(model, microbatch)
            loss.backward()
        losses.append(loss.item())
    return losses


def global_step(model: nn.Module, ranks: list[list[Batch]]) -> list[list[float]]:
    """Run the same step for all ranks, one after the other; gradients are the mean over ranks.

    Returns:
        the losses of each rank's microbatches.
    """
    losses, gradients = [], []
    trained = [p for p in model.parameters() if p.requires_grad]
    for microbatches in ranks:
        model.zero_grad()
        losses.append(rank_step(model, microbatches))
        gradients.append([p.grad for p in trained])
    for p, *parts in zip(trained, *gradients, strict=True):
        p.grad = pairwise_sum([part / len(ranks) for part in parts])
    return losses


def pairwise_sum(parts: list[Tensor]) -> Tensor:
    """((a + b) + (c + d)), for a power of two of parts."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> None:
    """End a step; ``group`` has the ranks that hold the same layers, by default all."""
    optimizer.step()
    optimizer.zero_grad()
    sync_float8_amax_and_scale_history(model, group)


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Gather sharded tensors; return others as they are."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def assert_same_model(found: nn.Module, expected: nn.Module, replay: object) -> None:
    """Compare the bits of all parameters and buffers; ``found`` may have a wrapper."""
    for kind in ("parameters", "buffers"):
        mine, theirs = (whole(getattr(m, kind)()) for m in (found, expected))
        assert len(mine) == len(theirs), (replay, kind)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), (replay, kind, i, (a - b).abs().max())


def assert_same_training(
    rank: int,
    single: nn.Module,
    parallel: nn.Module,
    steps: list[list[list[Batch]]],
    replay: object,
    *,
    forward: Any = None,
    without_sync: Any = nullcontext,
    autocast: Any = nullcontext,
    whole_parameters: Any = nullcontext,
    optimizer: Any = adamw,
    end_step: Any = sync_float8_amax_and_scale_history,
) -> None:
    """Train in one process and in parallel; compare losses, parameters and buffers, bit for bit.

    Args:
        rank: selects this rank's batches, modulo the number of ranks in ``steps``.
        single, parallel: equal models, the second one wrapped or sharded.
        steps: for each step, for each rank, its microbatches.
        replay: says which case it is, for messages.
        forward: runs instead of ``parallel``, such as its compiled form.
        without_sync: around the microbatches of ``parallel`` whose gradients only accumulate.
        autocast: around the steps of ``single``.
        whole_parameters: around comparisons, where ``parallel`` shows whole parameters on request.
        optimizer: makes that of a model.
        end_step: ends a step of a model.
    """
    optimizers = optimizer(single), optimizer(parallel)
    for step, ranks in enumerate(steps):
        with autocast():
            expected = global_step(single, ranks)[rank % len(ranks)]
        found = rank_step(
            parallel if forward is None else forward, ranks[rank % len(ranks)], without_sync
        )
        assert found == expected, (replay, step, found, expected)
        for model, each in zip((single, parallel), optimizers, strict=True):
            each.step()
            each.zero_grad()
            end_step(model)
        with whole_parameters():
            assert_same_model(parallel, single, (replay, step))
