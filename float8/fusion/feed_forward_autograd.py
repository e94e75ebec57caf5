"""The autograd function behind `float8.fusion.feed_forward`: three layers and SwiGLU between them.

For M tokens, width K, F hidden features; gate and up are two layers, or one that computes both::

    gate_MF = x_MK @ w_gate_FK.T     up_MF = x_MK @ w_up_FK.T
    y_MF    = silu(gate_MF) * up_MF
    out_MK  = y_MF @ w_down_KF.T

Between forward and backward it keeps x in float8, gate and up; a `Float8Linear` that reads y keeps
y in float8 besides. Backward casts y again, from gate and up, which the gradients of SwiGLU read
anyway.

Where y and the gradients of gate and up are cast by one scale each, SwiGLU is computed in float32
and rounded once. A GPU does that and the casts in one kernel (`float8.kernels.gpu.swiglu_cast` and
``swiglu_gradients``), so that none of the three is written in high precision. Otherwise torch's own
ops compute it, with the bits of ``F.silu(gate) * up``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.formats import E4M3, ScaleFormat
from float8.kernels import CastSpec, Float8Matrix, definition
from float8.kernels.matrix import BY_128
from float8.kernels.registration import op_on
from float8.linear.autograd import (
    Call,
    as_arguments,
    as_matrix,
    in_shape_of,
    product,
    read_float8_input,
    refuse_double_backward,
    save,
    saved_by,
    weight_of_forward,
)
from float8.linear.casts import cast_operand, known_scale, record
from float8.linear.plan import LinearPlan, without_autocast
from float8.tensor import Float8Tensor

Matrices = tuple[Any, Any]  # one orientation of an operand and the other


@dataclass(eq=False, slots=True)  # as `float8.linear.autograd.Call`
class FeedForwardCall:
    """The parameters of one call, except its tensors.

    Args:
        first: the calls of gate and up, or of the layer that computes both.
        down: that of the layer that reads y.
        rounds_once: whether y and the gradients of gate and up have one scale each.
        by_kernel: whether the kernels of a GPU compute SwiGLU and its casts.
        copies: how gate and up are cast for backward; None keeps them as they are.
    """

    first: tuple[Call, ...]
    down: Call
    rounds_once: bool
    by_kernel: bool
    copies: CastSpec | None


def cast_by_one_scale(plan: LinearPlan) -> bool:
    """Whether y and the gradients of gate and up have one scale each, in both orientations."""
    return all([x.shares_data and x.first.is_whole for x in (plan.x, plan.g)])  # type: ignore[union-attr]


class FeedForwardFunction(torch.autograd.Function):
    """Forward and backward of the feed-forward."""

    @staticmethod
    def forward(
        ctx: Any, call: FeedForwardCall, x: Tensor, w_down: Tensor, *w_first: Tensor
    ) -> Tensor:
        """(..., K), the weight of down (K, F), and (F, K) twice or (2 F, K) -> (..., K)."""
        lead, down = call.first[0], call.down
        _, needs_x, _, *needs_first = ctx.needs_input_grad
        with without_autocast(x):
            x8_MK, x8_KM = _operands_of_x(x, call, lead.has_backward and any(needs_first))
            outputs: list[Tensor] = []
            saved: list[Tensor | None] = []
            for its, w in zip(call.first, w_first, strict=True):
                w8_FK, w_saved, w_amax = weight_of_forward(w, its)
                outputs.append(product(its.plan.output, x8_MK, w8_FK))
                record(its.states[1], w_amax)
                saved += w_saved if needs_x else (None, None)
            gate_MF, up_MF = _halves(outputs)
            y8_MF = _cast_y(gate_MF, up_MF, call)
            w8_KF, w_saved, w_amax = weight_of_forward(w_down, down)
            out_MK = product(down.plan.output, y8_MF, w8_KF)
            record(down.states[1], w_amax)
        saved += w_saved if needs_x or any(needs_first) else (None, None)
        y_scale = y8_MF.scale if down.plan.x.shares_data else None
        kept = _copies(gate_MF, up_MF, call.copies) if call.copies else outputs
        save(ctx, lead, (x, w_first[0], None), x8_KM, (None, None), y_scale, *kept, *saved)
        first = tuple([its.for_backward() for its in call.first])
        ctx.feed_forward = replace(call, first=first, down=down.for_backward())
        return in_shape_of(x, out_MK)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """The gradients of forward's tensors, each None if it is not needed."""
        refuse_double_backward("a fused feed-forward")
        call = ctx.feed_forward
        down, count = call.down, len(call.first)
        _, needs_x, needs_down, *needs_first = ctx.needs_input_grad
        x, x_scale, _, _, y_scale, *rest = saved_by(ctx)
        size = 4 if call.copies else count
        kept, saved = rest[:size], rest[size : size + 2 * count + 2]
        needs_y = needs_x or any(needs_first)
        grad_x = grad_down = grad_y = None
        grads_first: list[Tensor | None] = [None] * count
        with without_autocast(g):
            g8_MK, g8_KM, amax = cast_operand(
                as_matrix(g), down.plan.g, down.states[2], down.records_amax,
                first=needs_y, second=needs_down,
            )  # fmt: skip
            record(down.states[2], amax)
            if needs_y:
                w8_FK, _ = down.read_weight(saved[-2:], down)
                grad_y = product(down.plan.grad_input, g8_MK, w8_FK)
            by: Any = _cast_by_kernel if call.by_kernel and needs_y else _cast_plainly
            wanted = needs_down, needs_x, any(needs_first)
            y8_FM, gradients = by(grad_y, kept, y_scale, call, wanted)
            if needs_down:
                grad_down = product(down.plan.grad_weight, g8_KM, y8_FM)
            for i, (its, (g8_MF, g8_FM)) in enumerate(zip(call.first, gradients, strict=True)):
                if needs_x:
                    w8_KF, _ = its.read_weight(saved[2 * i : 2 * i + 2], its)
                    part: Any = product(its.plan.grad_input, g8_MF, w8_KF)
                    part, *_ = as_arguments(ctx, part, None, None)  # autograd adds in x's dtype
                    grad_x = part if grad_x is None else grad_x + part
                if needs_first[i]:
                    second = its.plan.x.second
                    x8_KM = x if x_scale is None else Float8Matrix(x, x_scale, second.block)
                    grads_first[i] = product(its.plan.grad_weight, g8_FM, x8_KM)
        grads = [as_arguments(ctx, None, grad, None)[1] for grad in (grad_down, *grads_first)]
        return None, grad_x, *grads


def _operands_of_x(x: Tensor, call: FeedForwardCall, second: bool) -> Matrices:
    """x_MK and x_KM, by the cast of the first layer; the amax is that of all."""
    lead = call.first[0]
    if isinstance(x, Float8Tensor):
        return read_float8_input(x, lead, second)[:2]
    x_MK = as_matrix(x).to(lead.plan.dtype)
    x8_MK, x8_KM, amax = cast_operand(
        x_MK, lead.plan.x, lead.states[0], lead.records_amax, second=second
    )
    for its in call.first:
        record(its.states[0], amax)
    return x8_MK, x8_KM


def _halves(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """gate and up, each (M, F)."""
    gate, up = outputs[0].chunk(2, 1) if len(outputs) == 1 else outputs
    return gate, up


def copies_on(device: torch.device, emulate: bool) -> CastSpec:
    """How float8 copies are cast: E4M3 in groups of 128 of a row, as `float8.saved_activations`."""
    kernel = kernels.kernel_for(kernels.family_of(device), BY_128, emulate)
    return CastSpec(BY_128, E4M3.dtype, ScaleFormat.POWER_OF_TWO.value, kernel)


def _copies(gate_MF: Tensor, up_MF: Tensor, how: CastSpec) -> list[Tensor]:
    """Data (M, F) and scale (M, groups) of the float8 copies of gate and up."""
    found: list[Any] = [kernels.cast(x, how).row_major for x in (gate_MF, up_MF)]
    return [part for copy in found for part in copy[:2]]


def _cast_y(gate_MF: Tensor, up_MF: Tensor, call: FeedForwardCall) -> Any:
    """y_MF, cast for the product with the weight of down."""
    down, state = call.down, call.down.states[0]
    if call.by_kernel:
        how, records = down.plan.x.first, state is not None and down.records_amax
        assert how is not None
        cast = known_scale(how, state, gate_MF), how.dtype, how.scales != ScaleFormat.FLOAT32.value
        data, scale, amax = op_on("swiglu_cast", gate_MF)(gate_MF, up_MF, *cast, records)
        record(state, amax if records else None)
        return Float8Matrix(data, scale, how.block)
    y_MF = _swiglu(gate_MF, up_MF, call.rounds_once)
    y8_MF, _, amax = cast_operand(y_MF, down.plan.x, state, down.records_amax, second=False)
    record(state, amax)
    return y8_MF


def _swiglu(gate_MF: Tensor, up_MF: Tensor, rounds_once: bool) -> Tensor:
    if rounds_once:
        return definition.swiglu(gate_MF, up_MF).to(gate_MF.dtype)
    return F.silu(gate_MF) * up_MF


# y_FM, or None, for the weight gradient of down, and both orientations of the gradient of each
# layer before SwiGLU: of gate and up, or of the one that computes both.
BackwardOperands = tuple[Any, list[Matrices]]
# Whether y_FM is wanted, and each of the two orientations.
Wanted = tuple[bool, bool, bool]


def _cast_plainly(
    grad_y: Tensor | None, kept: Sequence[Tensor], y_scale: Tensor | None, call: FeedForwardCall,
    wanted: Wanted,
) -> BackwardOperands:  # fmt: skip
    down, y8_FM, gradients = call.down, None, []
    needs_down, first, second = wanted
    if call.copies:
        pairs = kept[:2], kept[2:]
        block, dtype = call.copies.block, down.plan.dtype
        kept = [kernels.dequantize(data, scale, block, dtype) for data, scale in pairs]
    gate_MF, up_MF = _halves(kept)
    if needs_down:
        y_MF = _swiglu(gate_MF, up_MF, call.rounds_once)
        cast = cast_operand(y_MF, down.plan.x, down.states[0], first=False, scale=y_scale)
        y8_FM = cast[1]
    both: list[Any] = [None] * len(call.first)
    if grad_y is not None and call.rounds_once:
        joined = definition.swiglu_gradients(grad_y, gate_MF, up_MF)
        both = [joined] if len(call.first) == 1 else list(joined.chunk(2, 1))
    elif grad_y is not None:  # as autograd
        of_gate = torch.ops.aten.silu_backward.default(grad_y * up_MF, gate_MF)
        both = [of_gate, grad_y * F.silu(gate_MF)]
        both = [torch.cat(both, 1)] if len(call.first) == 1 else both
    for its, g in zip(call.first, both, strict=True):
        found: Any = (None, None, None)
        if g is not None:
            found = cast_operand(
                g, its.plan.g, its.states[2], its.records_amax, first=first, second=second
            )
        record(its.states[2], found[2])
        gradients.append(found[:2])
    return y8_FM, gradients


def _cast_by_kernel(
    grad_y: Tensor, kept: Sequence[Tensor], y_scale: Tensor, call: FeedForwardCall,
    wanted: Wanted,
) -> BackwardOperands:  # fmt: skip
    (lead, *_), y, joined = call.first, call.down.plan.x.first, len(call.first) == 1
    how, states = lead.plan.g.first, [its.states[2] for its in call.first]
    assert how is not None
    assert y is not None
    gate_MF, up_MF = kept[::2] if call.copies else _halves(kept)
    gate_groups, up_groups = kept[1::2] if call.copies else (None, None)
    scales = [known_scale(how, state, grad_y) for state in states]
    if any([scale is None for scale in scales]):  # a delayed scale without a history
        scales = [None]
    records, (needs_down, _, second) = lead.records_amax and how.is_delayed, wanted
    y_t, data, data_t, scale, amax = op_on("swiglu_gradients", grad_y)(
        grad_y, gate_MF, up_MF, y_scale, scales[0], scales[-1], y.dtype, how.dtype,
        how.scales != ScaleFormat.FLOAT32.value, joined, needs_down, second, records,
        gate_groups, up_groups,
    )  # fmt: skip
    gradients: list[Matrices] = []
    for i, state in enumerate(states):
        parts = (scale, data, data_t) if second else (scale, data)
        own, *codes = parts if joined else [part[i] for part in parts]
        first, *other = [Float8Matrix(each, own, how.block) for each in codes]
        gradients.append((first, other[0] if other else None))
        if records:
            record(state, amax if joined else amax[i])
    return Float8Matrix(y_t, y_scale, y.block), gradients
