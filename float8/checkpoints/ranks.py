"""Ranks that save or push a sharded model together: which they are, and errors of all of them."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from float8 import kernels
from float8.checkpoints.weights import Checkpoint
from float8.distributed.rank_comparison import compare_ranks

_REMEDY = "Give each rank the same model, layout and arguments"


class Sharing(NamedTuple):
    """The ranks over which parameters of a model are sharded, and their process groups."""

    ranks: list[int]
    groups: list[dist.ProcessGroup]

    @classmethod
    def of(cls, model: nn.Module) -> Sharing:
        """Those of a model; both lists are empty if it is whole here."""
        ranks: set[int] = set()
        groups: dict[str, dist.ProcessGroup] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            if kernels.is_sharded(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                ranks |= set(mesh.mesh.flatten().tolist())
                groups |= {group.group_name: group for group in mesh.get_all_groups()}
        return cls(sorted(ranks), list(groups.values()))

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files."""
        return not self.ranks or dist.get_rank() == self.ranks[0]


def agree(
    sharing: Sharing, entry: str, error: Exception | None, checkpoint: Checkpoint | None = None
) -> None:
    """Raise the error of one rank on all ranks, or an error if their checkpoints differ."""
    if len(sharing.ranks) > 1:
        specs = {} if checkpoint is None else checkpoint.specs
        facts = {key: {"dtype": str(s.dtype), "shape": str(s.shape)} for key, s in specs.items()}
        own = None if error is None else f"rank {dist.get_rank()} {entry}: {error}"
        try:
            compare_ranks(sharing.groups, facts, _REMEDY, own, "checkpoints")
        except RuntimeError as verdict:
            raise verdict from error
    if error is not None:
        raise error
