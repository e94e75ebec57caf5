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

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from float8 import kernels
from float8.config import OperandCast, ScalingType
from float8.formats import E4M3, ScaleFormat
from float8.linear.casts import cast_alone
from float8.linear.plan import compute_dtype


class Route(NamedTuple):
    """The way of the rows of one call, to their experts and back.

    ``sent`` and ``received`` are numbers of rows, for and from each rank. ``order`` (S,) has for
    each row sorted by expert its place among the rows as they arrive, which are sorted by rank.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    group: str


def find_route(
    counts_E: Tensor, rows: int, row_bytes: int, mesh: DeviceMesh
) -> tuple[Route, Tensor]:
    """Exchange the numbers of rows per expert, and the bytes of a row, which must be equal.

    ``counts_E`` has the number of this rank's rows for each expert, and ``rows`` is at least its
    sum. ``row_bytes`` leaves out the scales. Experts are sharded as by ``torch.chunk``. The numbers
    are read on the host: collectives need the sizes of their messages. Returns the route, and the
    rows that arrive for each expert of this rank, (e,). Raises ValueError, on every rank, if the
    counts of one do not fit its rows, or if the bytes of rows differ.
    """
    ranks, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name
    counts = counts_E.to(torch.int64)
    parts = counts.split(-(-counts.numel() // ranks))
    lengths = [part.numel() + 1 for part in parts]
    is_bad = (counts.sum() > rows) | (counts < 0).any()
    form = torch.where(is_bad, -1, row_bytes).reshape(1)  # a rank that refuses tells the others
    message = torch.cat([piece for part in parts for piece in (part, form)])
    here = lengths[rank]
    table = _all_to_all(message, lengths, [here] * ranks, group).view(ranks, here)
    per_rank, forms = table[:, :-1], table[:, -1]
    numbers = [torch.stack([part.sum() for part in parts]), per_rank.sum(1), forms]
    sent, received, bytes_ = torch.stack(numbers).tolist()
    if bytes_ != [row_bytes] * ranks:
        raise ValueError(
            f"{innermost_module()}: the ranks send rows of {bytes_} bytes (-1: more tokens than "
            f"its {rows} rows). Give all ranks inputs of one size and dtype, and run "
            "float8.high_precision on all or none"
        )
    expert = torch.arange(here - 1, device=counts.device).repeat(ranks)
    arrived = expert.repeat_interleave(per_rank.flatten(), output_size=sum(received))
    route = Route(sent, received, arrived.argsort(stable=True), group)
    return route, per_rank.sum(0).to(counts_E.dtype)


def row_cast(first: OperandCast | None, second: OperandCast | None) -> OperandCast | None:
    """The cast by which rows travel to two GEMMs with these casts; None sends them as they are."""
    if first is None or second is None:
        return None
    if first.block[0] == 1 or first.scaling_type is ScalingType.STATIC:
        return first
    return OperandCast(ScalingType.DYNAMIC, E4M3, (1, 128), ScaleFormat.POWER_OF_TWO)


def exchange(
    x: Tensor, route: Route, cast: OperandCast | None, emulate: bool, back: bool = False
) -> Tensor:
    """Dispatch rows (R, D), sorted by expert; or combine results (S, D), sorted by own experts.

    ``x`` is sent in the compute dtype, or in float8. ``cast`` is of `row_cast`: that of x for
    dispatching, that of its gradient for combining. ``emulate`` casts in plain PyTorch. Returns (S,
    D), or with ``back`` (R, D), in the dtype of x. Its gradient goes the other way.
    """
    result: Tensor = _Exchange.apply(x.to(compute_dtype(x)), route, cast, emulate, back)
    return result.to(x.dtype)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return _combined(x, how[0]) if how[-1] else _dispatched(x, *how[:-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.how
        grad = _dispatched(g, *how[:-1]) if how[-1] else _combined(g, how[0])
        return grad, None, None, None, None


def _dispatched(x_RD: Tensor, route: Route, cast: OperandCast | None, emulate: bool) -> Tensor:
    if cast is None:
        return _all_to_all(x_RD, route.sent, route.received, route.group)[route.order]
    data, scale, _ = cast_alone(x_RD.contiguous(), cast, emulate=emulate)
    message, has_scales = data.view(torch.uint8), cast.block[0] == 1  # else every rank knows it
    if has_scales:
        message = torch.cat([message, _in_order(scale).view(torch.uint8)], 1)
    arrived = _all_to_all(message, route.sent, route.received, route.group)[route.order]
    if has_scales:
        scale = _in_order(arrived[:, x_RD.shape[1] :]).view(scale.dtype)
        arrived = arrived[:, : x_RD.shape[1]].contiguous()
    return kernels.dequantize(arrived.view(data.dtype), scale, cast.block, x_RD.dtype)


def _in_order(x: Tensor) -> Tensor:
    """A copy that other dtypes can view, unlike one row or column of any strides."""
    return x.clone(memory_format=torch.contiguous_format)


def _combined(y_SD: Tensor, route: Route) -> Tensor:
    by_rank = torch.empty_like(y_SD)
    by_rank[route.order] = y_SD
    return _all_to_all(by_rank, route.received, route.sent, route.group)


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(rows.contiguous(), received, sent, group))


# --- for errors


def innermost_module() -> str:
    """The module whose forward is running, as ``"layers.0.mlp (MLP)"``; "" where there is none.

    An op on a tensor does not know for which module it runs; the Python stack does. Every frame
    whose ``self`` is an ``nn.Module`` is one level of the model, and the outermost module knows the
    names of all others.
    """
    stack: list[nn.Module] = []  # the innermost first
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            stack.append(module)
        frame = frame.f_back
    for outer in reversed(stack):
        for name, module in outer.named_modules():
            if module is stack[0] and name:
                return f"{name} ({type(module).__name__})"
    return type(stack[0]).__name__ if stack else ""
