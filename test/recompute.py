"""A module whose activations are recomputed in backward, in each of torch's three ways."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KINDS = ("reentrant", "not reentrant", "selective")
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.float8.scaled_mm.default,
)


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of products, recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """``body``, of which only the input is saved, for "selective" the results of products too."""

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        self.body = body
        self.options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
        if kind == "selective":
            self.options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, keep_products
            )

    def forward(self, x: Tensor) -> Tensor:
        # The reentrant kind computes gradients only if an input wants one.
        return checkpoint(self.body, x.requires_grad_(), **self.options)
