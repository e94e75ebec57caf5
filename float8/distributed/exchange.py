"""Casts and products whose forward or backward exchanges parts of a tensor between ranks.

Autograd functions on plain local tensors, in pairs that are each other's transposes: what is
gathered in forward has its gradient summed and scattered in backward, and the other way round.
Codes are cast by `float8.linear.scaling` before they are sent; the products are those of
`float8.linear.autograd`. `tensor.differentiable` makes results in float8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from float8.config import Float8LinearConfig, LinearPlan, OperandCast
from float8.distributed.shards import Ranks, gather, part_of, reduce_scatter, sum_over
from float8.granularity import WHOLE
from float8.linear.autograd import (
    States,
    _Float8LinearFunction,
    _without_autocast,
    as_matrix,
    compute_dtype,
    refuse_double_backward,
)
from float8.linear.scaling import DelayedState, quantize, sharded_state
from float8.tensor import Float8Tensor
from float8.tensor.differentiable import differentiable


def sends_input(plan: LinearPlan) -> bool:
    """Whether an input's codes serve all of its products, wherever they were cast."""
    return plan.reuses_input and _has_one_scale(plan.output.a)


def _sends_grad_output(plan: LinearPlan) -> bool:
    return plan.reuses_grad_output and _has_one_scale(plan.grad_input.a)


def _has_one_scale(cast: OperandCast | None) -> bool:
    return cast is not None and cast.block.count(WHOLE) == len(cast.block)


class _CastAndGather(torch.autograd.Function):
    """(carrier of the gradient, codes, scale); see `cast_and_gather`."""

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
        sums: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        data, scale = quantize(as_matrix(x), cast, state, record, emulate=emulate)
        data = gather(data.reshape(x.shape), dim, length, ranks)
        scale = scale.clone()  # a delayed scale is a buffer, which sync changes
        ctx.dim, ctx.ranks, ctx.sums = dim, ranks, sums
        ctx.mark_non_differentiable(data, scale)
        return x.new_empty(()).expand(data.shape), data, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _part_of_gradient(ctx, g), *(None,) * 8


class _Gather(torch.autograd.Function):
    """As `_CastAndGather`, in high precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks, ctx.sums = dim, ranks, True
        return gather(x, dim, length, ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _part_of_gradient(ctx, g), None, None, None


def _part_of_gradient(ctx: Any, g: Tensor) -> Tensor:
    if ctx.sums:
        return reduce_scatter(g, ctx.dim, ctx.ranks)
    return part_of(g, ctx.dim, ctx.ranks).contiguous()


def gathered(
    x: Tensor,
    dim: int,
    length: int,
    ranks: Ranks,
    config: Float8LinearConfig,
    state: DelayedState | None = None,
    record: bool = False,
    sums: bool = True,
) -> Tensor:
    """The whole of an input that is cut along ``dim``, for layers that all have ``config``.

    Args:
        x: this rank's part, in high precision.
        dim, length, ranks: see `float8.distributed.shards.gather`.
        config: of the layers.
        state: of the input's cast, if it is delayed.
        record: whether a delayed cast records amaxes.
        sums: whether each rank's gradient of the result is its own summand, else it is the sum.

    Returns:
        a `Float8Tensor` whose scale is that of the whole, or (recipes of which the parts' codes
        would not serve) a plain tensor; in the compute dtype.
    """
    x, dim = x.to(compute_dtype(x)), dim % x.dim()
    cast = config.plan.output.a
    if cast is None or not sends_input(config.plan):
        assert sums
        whole: Tensor = _Gather.apply(x, dim, length, ranks)
        return whole
    arguments = (record, config.emulate, dim, length, ranks, sums)
    carrier, data, scale = _CastAndGather.apply(
        x, cast, sharded_state(state, ranks.group), *arguments
    )
    return _wrap(carrier, data, None, scale)


def _wrap(carrier: Tensor, data: Tensor, data_t: Tensor | None, scale: Tensor) -> Tensor:
    wrapped = differentiable(carrier, data, data_t, scale)
    return wrapped


class _SumGradient(torch.autograd.Function):
    """x, or for a Float8Tensor a carrier of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        if isinstance(x, Float8Tensor):
            return x._scale.new_empty((), dtype=x.dtype).expand(x.shape)
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_over(g, ctx.ranks), None


def with_summed_gradient(x: Tensor, ranks: Ranks) -> Tensor:
    """x, which every rank has, and of whose gradient each computes a summand."""
    result: Tensor = _SumGradient.apply(x, ranks)
    if isinstance(x, Float8Tensor):
        return _wrap(result, x._data, x._data_t, x._scale)
    return result


class _SummedLinear(torch.autograd.Function):
    """See `summed_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        config: Float8LinearConfig,
        dtype: torch.dtype,
        states: States,
        record: bool,
        grad_enabled: bool,
        scatter: int | None,
        ranks: Ranks,
    ) -> Tensor:
        product = _Float8LinearFunction.forward(
            ctx, x, w_NK, None, config, dtype, states, record, grad_enabled
        )
        ctx.scatter, ctx.ranks = scatter, ranks
        if scatter is None:
            return sum_over(product, ranks)
        ctx.length = product.shape[scatter]
        return reduce_scatter(product, scatter, ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Float8RowwiseParallel")
        with _without_autocast(g.device.type):
            if ctx.scatter is not None:
                g = _gathered_gradient(ctx, g)
            grads = _Float8LinearFunction._gradients(ctx, g)
        return grads[0], grads[1], *(None,) * 7


def _gathered_gradient(ctx: Any, g: Tensor) -> Tensor:
    """grad_output of the whole, in float8 where the parts' codes serve both of its products."""
    plan: LinearPlan = ctx.config.plan
    if plan.grad_input.a is None or not _sends_grad_output(plan):
        return gather(g, ctx.scatter, ctx.length, ctx.ranks)
    state = sharded_state(ctx.states[2], ctx.ranks.group)
    cast, emulate = plan.grad_input.a, ctx.config.emulate
    data, scale = quantize(as_matrix(g), cast, state, ctx.record, emulate=emulate)
    data = gather(data.reshape(g.shape), ctx.scatter, ctx.length, ctx.ranks)
    return Float8Tensor(as_matrix(data), scale, (WHOLE, WHOLE), g.dtype)


def summed_linear(
    x: Tensor,
    weight: Tensor,
    config: Float8LinearConfig,
    states: States,
    record: bool,
    scatter: int | None,
    ranks: Ranks,
) -> Tensor:
    """``x @ weight.T`` of operands whose contraction is cut, summed over ranks.

    Args:
        x: (..., K / ranks).
        weight: (N, K / ranks).
        config, states, record: as for `float8.linear.autograd.linear_in_float8`.
        scatter: the dimension of the result of which this rank keeps its part; None keeps all.
        ranks: who holds the other parts.

    Returns:
        (..., N), or this rank's part of it, in the compute dtype.
    """
    dtype, grad_enabled = compute_dtype(x), torch.is_grad_enabled()
    with _without_autocast(x.device.type):
        result: Tensor = _SummedLinear.apply(
            x, weight, config, dtype, states, record, grad_enabled, scatter, ranks
        )
    return result


class _AsReplicated(torch.autograd.Function):
    """A tensor that every rank has as a DTensor, whose gradient stays a summand of each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.is_first = mesh.get_local_rank() == 0
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Tensor, None]:
        if g.placements[0].is_partial():
            return g.to_local(), None
        whole = g.redistribute(placements=[Replicate()]).to_local()  # the sum already: count once
        return whole if ctx.is_first else torch.zeros_like(whole), None


def as_replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, which every rank has and whose gradient wants a summand of each, as a DTensor."""
    result: Tensor = _AsReplicated.apply(x, mesh)
    return result


def as_local_summand(x: DTensor) -> Tensor:
    """The local tensor of a replicated DTensor, of whose gradient each rank gives a summand."""
    local: Tensor = x.to_local(grad_placements=[Partial()])
    return local
