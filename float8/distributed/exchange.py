"""Exchange parts of a tensor between the ranks of one mesh dimension.

The first half gathers, sums and splits plain tensors. The second half has autograd functions on
plain local tensors. If forward gathers, backward sums the gradients and scatters them; if forward
sums and scatters, backward gathers.

A dimension of ``length`` is split into chunks of ``ceil(length / size)``, as by ``torch.chunk`` and
DTensor: the parts of the last ranks may be shorter, or empty. Collectives need parts of one size,
so a short part is padded with zeros, which are removed from the result.

Float8 data is sent as bytes: gloo has no float8 type, and NCCL must not sum it. The collectives are
torch's functional ones, which ``torch.compile`` traces. Waiting for one orders streams and does not
block the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from float8.config import Float8LinearConfig, LinearPlan, OperandCast
from float8.granularity import WHOLE
from float8.linear.autograd import (
    Call,
    Float8LinearFunction,
    as_matrix,
    gradients,
    refuse_double_backward,
)
from float8.linear.bound_plan import compute_dtype, without_autocast
from float8.linear.scaling import DelayedState, bind_and_cast, cast_matrix, sharded_state
from float8.tensor import Float8Tensor
from float8.tensor.differentiable import differentiable


class Ranks(NamedTuple):
    """The ranks of one mesh dimension: their group's name, their number, and this rank's index."""

    group: str
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh of one dimension."""
        return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def length_here(self, length: int) -> int:
        """The length of this rank's part of a dimension."""
        chunk = -(-length // self.size)
        return min(max(length - self.rank * chunk, 0), chunk)


def gather(x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
    """Gather a tensor of any dtype, float8 too, that is split along ``dim`` >= 0.

    ``length`` is the length of that dimension over all ranks.
    """
    bytes_ = x.view(torch.uint8) if x.element_size() == 1 else x
    chunk = -(-length // ranks.size)
    part = _padded(bytes_, dim, chunk).contiguous()
    ops = torch.ops._c10d_functional
    parts = ops.wait_tensor(ops.all_gather_into_tensor(part, ranks.size, ranks.group))
    whole = parts if dim == 0 else torch.cat(parts.chunk(ranks.size), dim)
    if whole.shape[dim] != length:
        whole = whole.narrow(dim, 0, length).contiguous()
    return whole.view(x.dtype)


def reduce_scatter(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks of x; the transpose of `gather`."""
    length = x.shape[dim]
    whole = _padded(x, dim, -(-length // ranks.size) * ranks.size)
    whole = whole if dim == 0 else torch.cat(whole.chunk(ranks.size, dim))
    ops = torch.ops._c10d_functional
    part = ops.reduce_scatter_tensor(whole.contiguous(), "sum", ranks.size, ranks.group)
    part, own = ops.wait_tensor(part), ranks.length_here(length)
    return part if part.shape[dim] == own else part.narrow(dim, 0, own).contiguous()


def sum_over(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks of x."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", ranks.group))


def part_of(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part, along ``dim``, of a tensor that every rank has."""
    chunk = -(-x.shape[dim] // ranks.size)
    start = min(ranks.rank * chunk, x.shape[dim])
    return x.narrow(dim, start, ranks.length_here(x.shape[dim]))


def check_mesh(x: DTensor, mesh: DeviceMesh, name: str) -> None:
    """Raise ValueError, on every rank, if an input is on another mesh."""
    if x.device_mesh != mesh:
        raise ValueError(
            f"{name}: the input lies on {x.device_mesh}, the parallel plan is for {mesh}; "
            "redistribute it, or pass its local tensor"
        )


def check_even(x: Tensor, dim: int, ranks: Ranks, name: str) -> None:
    """Raise ValueError, on every rank, if the parts of the ranks have different lengths.

    Only plain tensors on a CPU are checked: on an accelerator this check would block the host.
    There the collective raises, as with torch's own styles; ``TORCH_DISTRIBUTED_DEBUG=DETAIL``
    gives a clearer message.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ops = torch.ops._c10d_functional
    lengths = torch.tensor([x.shape[dim], -x.shape[dim]])
    largest, smallest = ops.wait_tensor(ops.all_reduce(lengths, "max", ranks.group)).tolist()
    if largest != -smallest:
        raise ValueError(
            f"{name}: the input is split along dimension {dim} into parts of unequal length (on "
            f"this rank {x.shape[dim]}, the longest {largest}, the shortest {-smallest}), and a "
            "plain tensor has no whole length: pass a DTensor, or pad the sequence to a multiple "
            f"of {ranks.size}"
        )


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


# --- casts and GEMMs that exchange parts


def sends_input_in_float8(plan: LinearPlan) -> bool:
    """Whether all GEMMs that read an input can read the same float8 data, cast on any rank.

    The factors of a smooth input need the amaxes of whole channels, before the cast.
    """
    return plan.reuses_input and _has_one_scale(plan.output.a) and not plan.smooth_input


def _has_one_scale(cast: OperandCast | None) -> bool:
    return cast is not None and cast.block.count(WHOLE) == len(cast.block)


class _CastAndGather(torch.autograd.Function):
    """(carrier of the gradient, float8 data, scale) of the whole input; see `gather_input`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: OperandCast,
        state: DelayedState | None,
        record: bool,
        emulate: bool,
        dim: int,
        length: int,
        ranks: Ranks,
        sums_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        data, scale = bind_and_cast(as_matrix(x), cast, state, record, emulate=emulate)
        data = gather(data.reshape(x.shape), dim, length, ranks)
        scale = scale.clone()  # a delayed scale is a buffer, which sync changes
        ctx.dim, ctx.ranks, ctx.sums_gradient = dim, ranks, sums_gradient
        ctx.mark_non_differentiable(data, scale)
        return x.new_empty(()).expand(data.shape), data, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _part_of_gradient(ctx, g), *(None,) * 8


class _Gather(torch.autograd.Function):
    """The whole input in high precision; see `gather_input`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks, ctx.sums_gradient = dim, ranks, True
        return gather(x, dim, length, ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _part_of_gradient(ctx, g), None, None, None


def _part_of_gradient(ctx: Any, g: Tensor) -> Tensor:
    if ctx.sums_gradient:
        return reduce_scatter(g, ctx.dim, ctx.ranks)
    return part_of(g, ctx.dim, ctx.ranks).contiguous()


def gather_input(
    x: Tensor,
    dim: int,
    length: int,
    ranks: Ranks,
    config: Float8LinearConfig,
    state: DelayedState | None = None,
    record: bool = False,
    sums_gradient: bool = True,
) -> Tensor:
    """Gather an input that is split along ``dim``, for layers that all have ``config``.

    ``x`` is this rank's part, in high precision; for ``length`` see `gather`. A delayed cast has a
    ``state``, and records amaxes if ``record`` is True. ``sums_gradient`` is True if each rank
    computes a summand of the result's gradient, False if each rank computes the whole gradient.
    Returns a `Float8Tensor` whose scale is that of the whole input. For recipes whose GEMMs cannot
    all read the same float8 data, it returns a plain tensor in the compute dtype.
    """
    x, dim = x.to(compute_dtype(x)), dim % x.dim()
    cast = config.plan.output.a
    if cast is None or not sends_input_in_float8(config.plan):
        assert sums_gradient
        whole: Tensor = _Gather.apply(x, dim, length, ranks)
        return whole
    arguments = (record, config.emulate, dim, length, ranks, sums_gradient)
    carrier, data, scale = _CastAndGather.apply(
        x, cast, sharded_state(state, ranks.group), *arguments
    )
    return differentiable(carrier, data, None, scale)


class _SumGradient(torch.autograd.Function):
    """Return x, or for a Float8Tensor a carrier of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        if isinstance(x, Float8Tensor):
            return x.scale.new_empty((), dtype=x.dtype).expand(x.shape)
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_over(g, ctx.ranks), None


def with_summed_gradient(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x, which every rank has, so that its gradient is summed over the ranks."""
    result: Tensor = _SumGradient.apply(x, ranks)
    if isinstance(x, Float8Tensor):
        return differentiable(result, x.float8_data, x.data_t, x.scale)
    return result


class _SummedLinear(torch.autograd.Function):
    """See `summed_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_NK: Tensor, call: Call, scatter: int | None, ranks: Ranks
    ) -> Tensor:
        product = Float8LinearFunction.forward(ctx, x, w_NK, None, call)
        ctx.scatter, ctx.ranks = scatter, ranks
        if scatter is None:
            return sum_over(product, ranks)
        ctx.length = product.shape[scatter]
        return reduce_scatter(product, scatter, ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Float8RowwiseParallel")
        with without_autocast(g):
            if ctx.scatter is not None:
                g = _gather_grad_output(ctx, g)
            grad_x, grad_w, _ = gradients(ctx, g)
        return grad_x, grad_w, None, None, None


def _gather_grad_output(ctx: Any, g: Tensor) -> Tensor:
    """The whole grad_output, in float8 if both GEMMs that read it can read the same data."""
    operand = ctx.plan.g
    if operand.first is None or not (operand.is_shared and operand.first.is_whole):
        return gather(g, ctx.scatter, ctx.length, ctx.ranks)
    state = sharded_state(ctx.states[2], ctx.ranks.group)
    data, scale = cast_matrix(as_matrix(g), operand.first, state, ctx.record, None)
    data = gather(data.reshape(g.shape), ctx.scatter, ctx.length, ctx.ranks)
    return Float8Tensor(as_matrix(data), scale, (WHOLE, WHOLE), g.dtype)


def summed_linear(
    x: Tensor, weight: Tensor, call: Call, scatter: int | None, ranks: Ranks
) -> Tensor:
    """``x @ weight.T`` summed over ranks; each rank has a part of the contraction.

    ``x`` is (..., K / ranks), ``weight`` (N, K / ranks). Returns (..., N) in the compute dtype, or
    this rank's part of it along ``scatter``; None returns all of it. ``call`` is as for
    `float8.linear.autograd.linear_in_float8`.
    """
    with without_autocast(x):
        result: Tensor = _SummedLinear.apply(x, weight, call, scatter, ranks)
    return result


class _AsReplicated(torch.autograd.Function):
    """Make a DTensor of a tensor that every rank has; the gradient stays one summand per rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.is_first = mesh.get_local_rank() == 0
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Tensor, None]:
        if g.placements[0].is_partial():
            return g.to_local(), None
        whole = g.redistribute(placements=[Replicate()]).to_local()  # the sum: count it once
        return whole if ctx.is_first else torch.zeros_like(whole), None


def as_replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor of x, which every rank has; each rank's gradient of x is its own summand."""
    result: Tensor = _AsReplicated.apply(x, mesh)
    return result


def as_local_summand(x: DTensor) -> Tensor:
    """The local tensor of a replicated DTensor; each rank computes a summand of its gradient."""
    local: Tensor = x.to_local(grad_placements=[Partial()])
    return local
