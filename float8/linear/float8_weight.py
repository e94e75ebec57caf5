"""Weights that are in float8 before the call: one type for all of them, `Float8Weight`.

`float8_weight` obtains it. A weight may be in float8 for three reasons:

- *cached*: `float8.cached_weights` cast it when it changed (`cast_of`);
- *gathered*: FSDP2 gathered its shards in float8 (`float8.distributed.gathered_weights`);
- *resident*: the layer's ``.weight`` is a `Float8Tensor` Parameter (`float8.linear.resident`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.granularity import scale_shape
from float8.kernels import Float8Matrix
from float8.kernels.matrix import ROW, TENSOR
from float8.linear.casts import cast_operand, record
from float8.linear.plan import VIEW, LinearPlan, plan_of, rounded
from float8.linear.resident import (
    KEEPS_FACTORS_OUT,
    contraction_last,
    is_resident,
    reason_against_training,
)
from float8.tensor import Float8Tensor

# How backward reads what it has of a weight, with `Call`: (saved, call) -> w_KN for grad_input, and
# a scale by which grad_output is multiplied before its cast, or None. ``saved`` is what forward
# saved: data, or a matrix in high precision; and a scale or None.
Saved = Any  # of two
Read = tuple[Any, Tensor | None]
Reads = Callable[[Saved, Any], Read]


def cast_again(saved: Saved, call: Any) -> Read:
    """Casts w_NK in high precision, by forward's scale of it if both casts share one."""
    (w_NK, scale), plan, operand = saved, call.plan, call.plan.w
    # A shared cast was recorded in forward. A delayed second cast that differs from the first is
    # refused by the config, so any other is the only cast of the weight.
    records, state = call.records_amax and not operand.shares_data, call.states[1]
    source = rounded(w_NK, plan)
    _, w8_KN, amax = cast_operand(source, operand, state, records, first=False, scale=scale)
    if amax is not None:
        record(state, amax)
    return w8_KN, None


def as_it_is(saved: Saved, call: Any) -> Read:
    """Takes data and scale of w_KN unchanged."""
    data, scale = saved
    return Float8Matrix(data, scale, call.plan.w.second.block), None


def with_scaled_gradient(saved: Saved, call: Any) -> Read:
    """Takes the data of w_KN; its scales (1, N) along the contraction multiply grad_output.

    Those of experts are (E, 1, N). Such a weight gets no gradient (`reason_against_training`), for
    which grad_output would be another.
    """
    (w_KN, scale), block = saved, call.plan.w.second.block
    return Float8Matrix(w_KN, scale.new_ones(scale_shape(w_KN.shape, block)), block), scale


def dequantize_and_cast(saved: Saved, call: Any) -> Read:
    """Dequantises data and scale of w_NK, and casts it again as grad_input does."""
    (data, scale), plan = saved, call.plan
    w_NK = kernels.dequantize(data, scale, plan.w.first.block, plan.dtype)
    return cast_again((w_NK, None), call)


@dataclass(eq=False, slots=True)
class Float8Weight:
    """A weight in float8, for both GEMMs that read it.

    Args:
        row_major: w_NK, for the output.
        transposed: for grad_input: w_KN, or what ``read`` makes w_KN of.
        read: how backward reads the data and scale of ``transposed``.
        dtype: the dtype to which the weight was rounded before its cast; None if the data does not
            depend on it.
        amax: for a delayed cast, the amax that each forward records.
        source: the high-precision weight that was cast, or None.

    Attributes:
        version: the version counter of ``source`` at its cast.
    """

    row_major: Float8Matrix
    transposed: Float8Matrix
    read: Reads = as_it_is
    dtype: torch.dtype | None = None
    amax: Tensor | None = None
    source: Any = None
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = 0 if self.source is None else version_of(self.source)

    def tensors(self) -> list[Tensor]:
        """All tensors that it stores."""
        stored = (*self.row_major[:2], *self.transposed[:2], self.amax)
        return [x for x in stored if x is not None]


def version_of(x: Tensor) -> int:
    """The version counter of x, which writes through ``.data`` skip; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


def float8_weight(layer: Any, plan: LinearPlan) -> Float8Weight | None:
    """The weight of a layer in float8, if it is in float8 before this call; else None.

    ``layer`` is a `Float8Linear`. A cached weight is used only if the weight has not changed.
    Raises ValueError if the weight was cast for another compute dtype than that of ``plan``, or
    requires a gradient that its scales do not allow.
    """
    weight, cached = layer.weight, layer.cached_weights.get("weight")
    if isinstance(weight, Float8Tensor):
        if (
            reason := reason_against_training(weight) or _reason_against_plan(weight, plan)
        ) is not None:
            raise ValueError(f"{layer._name}: {reason}")
        return _of_float8_tensor(weight, plan)
    return None if cached is None else fitting(cached, weight, plan, layer)


def fitting(
    cached: Float8Weight, weight: Any, plan: LinearPlan, layer: Any = None
) -> Float8Weight | None:
    """A cached weight, or None if the weight was replaced or written to since.

    Raises ValueError if `cached_weights` cast it for another compute dtype than that of ``plan``.
    """
    is_traced = torch.compiler.is_compiling()
    if not is_traced and (cached.source is not weight or cached.version != version_of(weight)):
        return None
    if cached.dtype == plan.dtype:
        return cached
    name = "" if layer is None else f"{layer._name}: "
    raise ValueError(
        f"{name}the weight was cached in {cached.dtype} and is used in {plan.dtype}: "
        f"write `with cached_weights(model, dtype={plan.dtype})`"
    )


def _reason_against_plan(weight: Float8Tensor, plan: LinearPlan) -> str | None:
    """The reason why this weight does not fit a plan, or None."""
    if plan.smooth_input:
        return f"its weight is a Float8Tensor, {KEEPS_FACTORS_OUT}"
    if plan.w.first is None or plan.w.second is None:
        return (
            "its weight is a Float8Tensor, and this config multiplies weights in high precision; "
            "give the layer weight.dequantize(), or a config that casts weights"
        )
    if is_resident(weight) or weight.dtype == plan.dtype:
        return None
    return (
        f"its weight was gathered for {weight.dtype} and is used in {plan.dtype}; give fully_shard "
        f"the dtype, as MixedPrecisionPolicy(param_dtype={plan.dtype}), in place of autocast"
    )


def _of_float8_tensor(weight: Float8Tensor, plan: LinearPlan) -> Float8Weight:
    """A resident or gathered weight, or a stack, in both orientations; nothing is copied."""
    w_NK, second = Float8Matrix(weight.float8_data, weight.scale, weight.block), plan.w.second
    assert second is not None
    if weight.scale.dtype != torch.float32 and not plan.w.shares_data:
        return Float8Weight(w_NK, w_NK, dequantize_and_cast)
    scale_t, block = weight.scale.mT, weight.block[-2:]
    if block == TENSOR and not second.is_whole:
        scale_t = weight.scale.expand(scale_shape(w_NK.data.mT.shape, second.block))
    is_by_row = block == ROW and plan.w.second_is != VIEW
    read = with_scaled_gradient if is_by_row else as_it_is
    return Float8Weight(w_NK, w_NK.t()._replace(scale=scale_t), read)


def of_experts(weight: Float8Tensor, plan: LinearPlan) -> Float8Weight:
    """The weights of experts (E, N, K) that are in float8, in both orientations; nothing is copied.

    Raises ValueError if the output's GEMM does not read them as they are, or if they require a
    gradient that their scales do not allow.
    """
    first, reason = plan.w.first, _reason_against_plan(weight, plan)
    if reason is None and weight.requires_grad and not plan.w.shares_data:
        reason = f"experts get no gradient by scales of {weight.block}: freeze them"
    dtype = weight.float8_data.dtype
    # dynamo of torch 2.11 fails at the != of two blocks
    fits = first is not None and weight.block == first.block and dtype == first.dtype
    if reason is None and not fits:
        reason = f"experts are {dtype} by blocks {weight.block}, not {first}: pass dequantize()"
    if reason is not None:
        raise ValueError(reason)
    return _of_float8_tensor(weight, plan)


def cast_of(layer: Any, weight: Tensor, dtype: torch.dtype) -> Float8Weight | None:
    """A high-precision weight of a layer, or a stack of experts, cast for both GEMMs that read it.

    ``weight`` is a Parameter of the `Float8Linear`, or of the experts, ``layer``. It is rounded to
    the compute dtype ``dtype`` first. The amax of a delayed cast is not recorded: each forward
    records it. Returns None if a GEMM that reads the weight does not read it in float8.
    """
    is_stack = weight.dim() == 3
    plan = plan_of(layer.float8_config, weight, dtype=dtype, grouped=is_stack)
    if plan.w.first is None or plan.w.second is None:
        return None
    state = None if is_stack else layer.states[1]
    # A backward cannot save tensors that were made in inference mode.
    with torch.no_grad(), torch.inference_mode(False):
        source = contraction_last(layer, weight.clone() if weight.is_inference() else weight)
        source = rounded(source.detach(), plan)
        w_NK, w_KN, amax = cast_operand(source, plan.w, state, state is not None)
        if state is not None:  # a delayed scale is a buffer, and a cache in place writes its own
            w_NK = w_NK._replace(scale=w_NK.scale.clone())
            w_KN = w_KN._replace(scale=w_KN.scale.clone())
            amax = None if amax is None else amax.reshape(())
    return Float8Weight(w_NK, w_KN, as_it_is, plan.dtype, amax, weight)
