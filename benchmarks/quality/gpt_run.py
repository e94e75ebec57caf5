"""The seed and the sizes of a run: the first weights of its GPT, and its batches.

The GPT is that of `scripts/training/gpt.py`. Runs of one seed and sizes start from the same bits,
and their steps see the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.training import corpus, gpt


@dataclass(frozen=True, kw_only=True)
class GPTRun:
    """What all runs of the GPT say of themselves; each study adds its own fields.

    Args:
        seed: of weights and batches.
        layers, width, heads, context: of the model.
        batch: windows of text in a step.
    """

    seed: int
    layers: int = 2
    width: int = 128
    heads: int = 2
    context: int = 64
    batch: int = 16

    @property
    def sizes(self) -> gpt.Sizes:
        return gpt.Sizes(self.layers, self.width, self.heads, self.context)

    def new_model(self, device: str = "cpu") -> gpt.GPT:
        """The GPT before the first step."""
        torch.manual_seed(self.seed)
        return gpt.GPT(self.sizes).to(device)

    def batch_of(
        self, text: corpus.Corpus, step: int, device: str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets (B, T) of a step, counted from 0."""
        pair = text.batch(step, seed=self.seed, batch=self.batch, context=self.context)
        return pair[0].to(device), pair[1].to(device)
