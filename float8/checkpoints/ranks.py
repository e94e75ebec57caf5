"""Ranks that save or push a sharded model together: which they are, and errors of all of them."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from float8 import kernels
from float8.checkpoints.weights import Checkpoint
from float8.distributed.rank_comparison import compare_ranks

_REMEDY = "Give each rank the same model, layout and arguments"


def ranks_of(model: nn.Module) -> list[int]:
    """The ranks over which parameters of a model are sharded; none if it is whole here."""
    found: set[int] = set()
    for tensor in [*model.parameters(), *model.buffers()]:
        if kernels.is_sharded(tensor):
            found |= set(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    return sorted(found)


def agree(
    ranks: list[int], entry: str, error: Exception | None, checkpoint: Checkpoint | None = None
) -> None:
    """Raise the error of one rank on all ranks, or an error if their checkpoints differ."""
    if len(ranks) > 1:
        specs = {} if checkpoint is None else checkpoint.specs
        facts = {key: {"dtype": str(s.dtype), "shape": str(s.shape)} for key, s in specs.items()}
        own = None if error is None else f"rank {dist.get_rank()} {entry}: {error}"
        try:
            compare_ranks(ranks, entry, facts, _REMEDY, own, "checkpoints")
        except RuntimeError as verdict:
            raise verdict from error
    if error is not None:
        raise error
