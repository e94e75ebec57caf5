"""Send tokens to the ranks that hold their experts, as float8, and send the results back.

*Dispatch* sends each row to the rank of its expert, in float8. *Combine* sends the results back in
the compute dtype, because they are sums that rounding would harm. Each is the gradient of the
other, so gradients take the same way (DeepSeek-V3, arXiv 2412.19437, section 3.3.3)::

    forward   dispatch  x  float8    -> experts -> combine   y   compute dtype
    backward  combine   dx compute   <- experts <- dispatch  dy  float8

A row is cast where it is, with scales of its own, which travel in the same message::

    1 message per rank: rows of  D bytes of data | bytes of the row's scales

The cast is the recipe's own cast of that operand, if rows have scales of their own under it
(rowwise, 1x128, 1x32; a static scale is not sent). The receiving rank dequantises the rows, and the
GEMMs cast them again. With scales of powers of two, a number that E4M3 holds under one scale it
holds under another, unless it becomes subnormal. So casting again by rows gives the same values,
and the results are those of one process, to the bit; casting along the tokens, for grad_weight,
loses next to nothing. Other recipes (one dynamic scale per tensor) send 1x128 blocks in E4M3 with
scales of powers of two, as DeepSeek-V3 does.

Legend: R rows of this rank, sorted by expert; S rows that arrive; D features; E experts in all, e
of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast, ScalingType
from float8.distributed.exchange import Ranks
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE
from float8.linear.bound_plan import compute_dtype
from float8.linear.scaling import bind_and_cast


class Route:
    """The way of the rows of one call, to their experts and back.

    Args:
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
        order: (S,) for each row sorted by expert, its place among the rows as they arrive, which
            are sorted by rank.
        group: the name of the process group.
    """

    __slots__ = ("group", "order", "received", "sent")

    def __init__(self, sent: list[int], received: list[int], order: Tensor, group: str) -> None:
        self.sent, self.received, self.order, self.group = sent, received, order, group


def find_route(
    counts_E: Tensor, rows: int, row_bytes: int, ranks: Ranks, name: str
) -> tuple[Route, Tensor]:
    """Exchange the numbers of rows per expert, and the bytes of a row, which must be equal.

    Experts are sharded as by ``torch.chunk``. The numbers are read on the host: collectives need
    the sizes of their messages.

    Args:
        counts_E: (E,) integers, the number of this rank's rows for each expert.
        rows: the number of this rank's rows, at least the sum of ``counts_E``.
        row_bytes: the bytes of a row that is dispatched.
        ranks: the ranks that hold the experts.
        name: of the experts' module, for messages.

    Returns:
        the route; and the rows that arrive for each expert of this rank, (e,).

    Raises:
        ValueError: on every rank, if the counts of one do not fit its rows, or if rows differ.
    """
    counts = counts_E.to(torch.int64)
    parts = counts.split(-(-counts.numel() // ranks.size))
    lengths = [part.numel() + 1 for part in parts]
    is_bad = (counts.sum() > rows) | (counts < 0).any()
    form = torch.where(is_bad, -1, row_bytes).reshape(1)  # a rank that refuses tells the others
    message = torch.cat([piece for part in parts for piece in (part, form)])
    ops, here = torch.ops._c10d_functional, lengths[ranks.rank]
    arriving = ops.all_to_all_single(message, [here] * ranks.size, lengths, ranks.group)
    table = ops.wait_tensor(arriving).view(ranks.size, here)
    per_rank, forms = table[:, :-1], table[:, -1]
    numbers = [torch.stack([part.sum() for part in parts]), per_rank.sum(1), forms]
    sent, received, bytes_ = torch.stack(numbers).tolist()
    if bytes_ != [row_bytes] * ranks.size:
        raise ValueError(f"{name}: {_refusal(counts_E, rows, row_bytes, bytes_, ranks.rank)}")
    expert = torch.arange(here - 1, device=counts.device).repeat(ranks.size)
    arrived = expert.repeat_interleave(per_rank.flatten(), output_size=sum(received))
    route = Route(sent, received, arrived.argsort(stable=True), ranks.group)
    return route, per_rank.sum(0).to(counts_E.dtype)


def _refusal(counts_E: Tensor, rows: int, row_bytes: int, bytes_: list[int], rank: int) -> str:
    if bytes_[rank] < 0:
        return (
            f"num_tokens_per_expert must be >= 0 with a sum of at most the {rows} rows of the "
            f"input, got {counts_E.tolist()}"
        )
    other = next(r for r, each in enumerate(bytes_) if each != row_bytes)
    if bytes_[other] < 0:
        return f"rank {other} of its mesh has a num_tokens_per_expert that does not fit its input"
    return (
        f"rank {rank} of its mesh sends {row_bytes} bytes per token and rank {other} "
        f"{bytes_[other]}: all must have inputs of one size and dtype, and the same ranks run "
        "under float8.high_precision"
    )


def bytes_per_row(x: Tensor, cast: OperandCast | None) -> int:
    """The bytes of a row of x (R, D) that `dispatch` sends."""
    if cast is None:
        return x.shape[1] * compute_dtype(x).itemsize
    if cast.block[0] == WHOLE:
        return x.shape[1]
    scales = 1 if cast.block[1] == WHOLE else -(-x.shape[1] // cast.block[1])
    return x.shape[1] + scales * (1 if cast.scale_format.is_e8m0 else 4)


def row_cast(cast: OperandCast | None) -> OperandCast | None:
    """The cast by which rows travel for a GEMM that casts them by ``cast``; None sends them as is.

    Raises:
        ValueError: the cast is delayed.
    """
    if cast is None or cast.block[0] == 1 or cast.scaling_type is ScalingType.STATIC:
        return cast
    if cast.scaling_type is ScalingType.DELAYED:
        raise ValueError("delayed scaling has no recipe for experts; use a dynamic or static one")
    return OperandCast(ScalingType.DYNAMIC, E4M3, (1, 128), ScaleFormat.POWER_OF_TWO)


def dispatch(
    x_RD: Tensor, route: Route, x_cast: OperandCast | None, emulate: bool = False
) -> Tensor:
    """Send each row to its expert's rank, in float8 if there is a cast.

    Args:
        x_RD: sorted by expert.
        route: of `find_route`.
        x_cast: of `row_cast`, or None.
        emulate: cast in plain PyTorch.

    Returns:
        (S, D), sorted by this rank's experts, in the compute dtype. Its gradient is combined.
    """
    result: Tensor = _Dispatch.apply(x_RD.to(compute_dtype(x_RD)), route, x_cast, emulate)
    return result


def combine(
    y_SD: Tensor, route: Route, g_cast: OperandCast | None, emulate: bool = False
) -> Tensor:
    """Send the experts' results back: the inverse of `dispatch`, in the dtype of y.

    Args:
        y_SD: sorted by this rank's experts.
        route, emulate: as for `dispatch`.
        g_cast: of `row_cast`, by which the result's gradient is dispatched; or None.

    Returns:
        (R, D), sorted as the rows were before `dispatch`.
    """
    result: Tensor = _Combine.apply(y_SD.to(compute_dtype(y_SD)), route, g_cast, emulate)
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, route: Route, cast: OperandCast | None, emulate: bool
    ) -> Tensor:
        ctx.route = route
        return _dispatched(x, route, cast, emulate)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _combined(g, ctx.route), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, route: Route, cast: OperandCast | None, emulate: bool
    ) -> Tensor:
        ctx.route, ctx.cast, ctx.emulate = route, cast, emulate
        return _combined(y, route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _dispatched(g, ctx.route, ctx.cast, ctx.emulate), None, None, None


def _dispatched(x_RD: Tensor, route: Route, cast: OperandCast | None, emulate: bool) -> Tensor:
    if cast is None:
        return _exchanged(x_RD, route.sent, route.received, route.group)[route.order]
    # A kernel may write E8M0 scales in the layout of a GEMM, where a row has none of its own.
    emulate = emulate or cast.scale_format.is_e8m0
    data, scale = bind_and_cast(x_RD.contiguous(), cast, emulate=emulate)
    message, has_scales = data.view(torch.uint8), cast.block[0] == 1  # else every rank knows it
    if has_scales:
        message = torch.cat([message, scale.contiguous().view(torch.uint8)], 1)
    arrived = _exchanged(message, route.sent, route.received, route.group)[route.order]
    if has_scales:
        scale = arrived[:, x_RD.shape[1] :].contiguous().view(scale.dtype)
        arrived = arrived[:, : x_RD.shape[1]].contiguous()
    return kernels.dequantize(arrived.view(data.dtype), scale, cast.block, x_RD.dtype)


def _combined(y_SD: Tensor, route: Route) -> Tensor:
    by_rank = torch.empty_like(y_SD)
    by_rank[route.order] = y_SD
    return _exchanged(by_rank, route.received, route.sent, route.group)


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(rows.contiguous(), received, sent, group))
