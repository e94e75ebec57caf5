"""What the study of other models trains: a model, its batches, and held-out batches.

``vit``       the vision transformer of `models/vit.py` on digits that are drawn for each step
``encoder``   the BERT of `models/bert.py`: masked bytes of torch's own sources, from both sides.
              Texts are of 20 to `CONTEXT` bytes, and padding fills the batch; it attends to the
              text, no text attends to it, and it has no loss.

Batches follow from the seed and the step, held-out batches are the same for all seeds. The rows of
a batch, 37 B and 61 B, are no multiple of 16 where B is odd.

Shapes: B images or texts, T bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import bert, hex_digits
from benchmarks.models.bert import IGNORED, PADDING
from benchmarks.models.decoders import HEAD
from benchmarks.models.vit import ViT
from scripts.training import corpus

CONTEXT, SHORTEST = 61, 20  # bytes of a text
HELD_OUT_SEED = 2**40  # of what is drawn for evaluation: no run has it
AT_ONCE = 128  # images or texts of an evaluation's batch
Batch = tuple[Tensor, Tensor]  # what the model takes; targets, those that count or `IGNORED`


@dataclass(frozen=True)
class Task:
    """A model to train, and on what.

    Attributes:
        model: the first of a batch -> logits, the classes last.
        batch: a step, counted from 0 -> its batch.
        held_out: the batches of an evaluation.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    held_out: Callable[[], Iterator[Batch]]


def vit(layers: int, width: int, batch: int, held_out: int, seed: int) -> Task:
    """Digits; ``held_out`` of them are drawn for evaluation."""
    return Task(
        ViT(layers, width, width // HEAD),
        lambda step: hex_digits.draw(batch, _seed(seed, step)),
        lambda: (
            hex_digits.draw(count, HELD_OUT_SEED + start) for start, count in _parts(held_out)
        ),
    )


def encoder(layers: int, width: int, batch: int, held_out: int, seed: int) -> Task:
    """Masked bytes; ``held_out`` texts are for evaluation."""
    text = corpus.torch_sources()

    def held_out_batches() -> Iterator[Batch]:
        last = len(text.val) - CONTEXT
        starts = torch.linspace(0, last, held_out, dtype=torch.float64).long()
        for start, count in _parts(held_out):
            bytes_BT = _windows(text.val, starts[start : start + count])
            yield _padded(bytes_BT, HELD_OUT_SEED + start)

    return Task(
        bert.BaseBert(width, layers, CONTEXT),
        lambda step: _padded(
            text.batch(step, seed=seed, batch=batch, context=CONTEXT)[0], _seed(seed, step)
        ),
        held_out_batches,
    )


TASKS: dict[str, Callable[[int, int, int, int, int], Task]] = {"vit": vit, "encoder": encoder}


def _padded(bytes_BT: Tensor, seed: int) -> Batch:
    """Texts of random lengths with bytes hidden, and the hidden bytes."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = bert.hide(bytes_BT, generator)
    lengths_B1 = torch.randint(SHORTEST, CONTEXT + 1, (len(bytes_BT), 1), generator=generator)
    beyond_BT = torch.arange(bytes_BT.shape[1]) >= lengths_B1
    return tokens_BT.masked_fill(beyond_BT, PADDING), targets_BT.masked_fill(beyond_BT, IGNORED)


def _windows(text: Tensor, starts_B: Tensor) -> Tensor:
    return text[starts_B[:, None] + torch.arange(CONTEXT)].long()


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """Where the parts of so many items start, and how many each has."""
    return ((start, min(AT_ONCE, count - start)) for start in range(0, count, AT_ONCE))


def _seed(seed: int, step: int) -> int:
    return seed * 1_000_000 + step
