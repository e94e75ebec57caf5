"""FSDP2: a reduce-scatter whose bytes are float8, for ``set_custom_reduce_scatter``.

FSDP2 lays the gradients of one unit out as (N ranks, shard) and calls `Float8ReduceScatter` in its
own reduce-scatter stream; what it does there, and when it frees what, stays as it is. Only the
first half of the reduction runs: one cast, a float32 sum, no second cast. Nothing can saturate in
it (`wire`), so there is no mu and no controller. The result is rounded once, to FSDP's
``reduce_dtype``: let that be float32, which costs nothing on the wire here.

Under HSDP torch all-reduces the shards between replicas afterwards, in ``reduce_dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from float8.distributed.gradients.reduce import check_gradient, reduce_scatter
from float8.distributed.gradients.state import Float8Gradients


class Float8ReduceScatter:
    """What FSDP2 calls instead of ``reduce_scatter_tensor``; the protocol is torch's.

    Args:
        state: format, tile and counts, shared by all units.
        unit: the unit's name, for messages.
    """

    def __init__(self, state: Float8Gradients, unit: str) -> None:
        self.state = state
        self.unit = unit

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """FSDP2's buffers: ordinary ones."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce in the current stream.

        Args:
            output_tensor: (C,): written, in its own dtype.
            input_tensor: (N * C,): this rank's gradients, shard after shard.
            group: the N ranks.
            op: SUM or AVG.
            async_op: FSDP2 never asks for it.

        Raises:
            TypeError: gradients that cannot travel as float8.
            ValueError: another reduction.
            RuntimeError: ranks have other settings (first call only).
        """
        assert not async_op
        check_gradient(input_tensor, f"FSDP2 unit {self.unit!r}")
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"float8_gradients: FSDP2 unit {self.unit!r} reduces with {op}, which hides its "
                "factor; call set_force_sum_reduction_for_comms(True) beside "
                "set_gradient_divide_factor(...)"
            )
        state, mean = self.state, op == dist.ReduceOp.AVG
        x_NC = input_tensor.view(group.size(), -1)
        state.agree(group)
        lost = reduce_scatter(output_tensor, x_NC, group, state.format, mean, state.tile)
        state.count_unit(lost, input_tensor.numel(), output_tensor.numel())


def attach(units: Sequence[tuple[str, FSDPModule]], state: Float8Gradients) -> None:
    """Give each FSDP2 unit its reduce-scatter.

    Args:
        units: (name, module).
        state: shared by all of them.
    """
    for name, unit in units:
        comm = Float8ReduceScatter(state, name or "the root")
        unit.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # the protocol is enough
