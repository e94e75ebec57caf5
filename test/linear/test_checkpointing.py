"""What activation checkpointing repeats of a float8 step, and what repeats nothing."""

from functools import partial

import pytest
import torch
from assertions import assert_bitwise
from meter import GemmCounter
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from float8 import convert_to_float8_training
from float8.config import RECIPES

# The policy of docs/troubleshooting.md.
KEPT = (
    "aten.mm.default",
    "aten._scaled_mm.default",
    "float8.blockwise_mm.default",
    "float8.cublas_blockwise_mm.default",
    "aten._scaled_grouped_mm.default",
    "float8.grouped_mm_gpu.default",
    "float8.grouped_mm.default",
)


def policy(ctx, op, *args, **kwargs):
    kept = str(op) in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_checkpointing_multiplies_nothing_twice(recipe):
    """Three products a layer and step; full checkpointing repeats those that others read."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)), nn.SiLU())
    convert_to_float8_training(model, config=RECIPES[recipe])
    x, g = (torch.randn(32, 64).bfloat16() for _ in range(2))
    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = {}
    for name, run in {
        "no": model,
        "full": partial(checkpoint, model, use_reentrant=False),
        "selective": partial(checkpoint, model, use_reentrant=False, context_fn=contexts),
    }.items():
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with GemmCounter() as counter:
            out = run(leaf)
            out.backward(g)
        gradients = [out.detach(), leaf.grad, *(p.grad for p in model.parameters())]
        found[name] = counter.products, gradients
    assert found["no"][0] == found["selective"][0] == 9
    assert found["full"][0] == 9 + 3
    for name in ("full", "selective"):
        for mine, theirs in zip(found[name][1], found["no"][1], strict=True):
            assert_bitwise(mine, theirs, (recipe, name))
