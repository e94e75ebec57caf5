"""A partitioner for torch.compile by which backward repeats casts whose operand is kept anyway.

By itself torch.compile keeps the float8 copy of every layer's input, beside bfloat16 tensors that
norms, attention and SwiGLU keep. `RecomputeCasts` lets it compute the copy again from those, as it
does with ops of its own, wherever that keeps fewer bytes::

    torch.compile(model, options={"custom_partitioner_fn": RecomputeCasts()})

Two compiled blocks of Llama-3-8B keep 2,950 MiB and not 3,782. The casts, and what is recomputed
for them, take 4 % of a step (predicted: ``python benchmarks/bench_model.py --traced``). Scales are
kept. The recomputed operand may have other bits where inductor fuses its ops in another way.

Inductor takes the partitioner as a setting, and its caches know it. Which ops may be recomputed is
a private table of PyTorch, seen in torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

__all__ = ["RecomputeCasts"]

TABLE = "get_default_op_list"


class RecomputeCasts(CustomPartitionerFn):
    """Inductor's partitioner, to which a cast is an op like those that it recomputes and fuses.

    Raises RuntimeError if this torch has no table of such ops.
    """

    def __init__(self) -> None:
        if not hasattr(partitioners, TABLE):
            raise RuntimeError(
                f"torch {torch.__version__} has no {TABLE} in torch/_functorch/partitioners.py: "
                "compile without RecomputeCasts, which keeps each layer's input in float8"
            )

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Forward and backward."""
        table_of = getattr(partitioners, TABLE)
        table = table_of()
        for ops in (table.recomputable_ops, table.fusible_ops):
            # On a CPU the amax is an op of ours, too. It is small and kept, but leads to a cast.
            ops.update({torch.ops.float8.cast, torch.ops.float8.amax})
        setattr(partitioners, TABLE, lambda: table)
        try:
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        finally:
            setattr(partitioners, TABLE, table_of)

    def uuid(self) -> Any:
        """The name in keys of inductor's caches."""
        return "float8.RecomputeCasts 1"
