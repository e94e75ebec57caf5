"""`grouped_mm`: each group of tokens times the weight of its expert, in float8.

Legend: T tokens, E experts, K and N features; ``offs`` has the end of each expert's group. The
three products, each operand with the contraction last, are those of a linear layer
(`float8.linear.autograd`) with the expert of each token in place of one weight::

    output_TN       = x_TK @ w_ENK.T      each token by the weight of its expert
    grad_input_TK   = g_TN @ w_EKN.T      the same
    grad_weight_ENK = g_NT @ x_KT.T       each expert contracts the tokens of its group

No two experts share a scale of their weights, and no two groups a scale along their tokens, so an
expert's result depends on its own tokens and weight. A tensorwise scale of the tokens is the one
exception: it is one for all tokens. The transposed orientation of tokens pads each group to the
multiple that the GEMM needs (`float8.kernels.groups`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.arguments import check_tensors
from float8.config import Float8LinearConfig, OperandCast, check_config
from float8.granularity import WHOLE
from float8.kernels import Float8Matrix
from float8.linear.autograd import (
    Call,
    as_arguments,
    dequantized,
    read_float8_input,
    refuse_double_backward,
    save,
    saved_by,
    weight_of_forward,
)
from float8.linear.casts import Operands, constant
from float8.linear.float8_weight import Float8Weight, fitting, of_experts
from float8.linear.plan import OWN, VIEW, Gemm, Operand, plan_of, without_autocast
from float8.linear.refusals import NO_SMOOTH_EXPERTS, error_of_call
from float8.tensor import Float8Tensor


def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor, config: Float8LinearConfig | str | None = None
) -> Tensor:
    """``x[begin:end] @ w[e]`` for the tokens of each expert e, in float8.

    The semantics are those of ``torch.nn.functional.grouped_mm(x, w, offs=offs)``.

    Args:
        x: (T, K), the tokens sorted by expert: float32, bfloat16 or float16, or a `Float8Tensor`
            in the config's format and granularity. If the weight needs its gradient, a
            `Float8Tensor` must be tensorwise.
        w: (E, K, N) of the same dtype, any strides; usually ``weight.mT`` of an (E, N, K) weight.
            FSDP2 may have gathered it in float8; it is not cast then.
        offs: (E,) int32, the end of each expert's tokens among the T rows, ascending. A group may
            be empty. Rows at or beyond ``offs[-1]`` are in no group and never read. The values are
            checked on a CPU only, because the check would wait for a GPU.
        config: a config or the name of a recipe; dynamic tensorwise by default. A delayed config is
            refused.

    Returns:
        (T, N). Rows of no group are zero on a CPU and, as in torch, not written on a GPU, in the
        result and in the gradient of x: mask them before arithmetic, because 0 times NaN is NaN.
        The gradient of the weight of an expert without tokens is zero.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes, devices or offsets do not fit; the config is delayed; x is in float8
            and does not fit the config; or the device does not run one of its products.
    """
    config = check_config("tensorwise" if config is None else config, "grouped_mm")
    return product_of_groups(x, w, offs, config)


def product_of_groups(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    config: Float8LinearConfig,
    cached: Float8Weight | None = None,
) -> Tensor:
    """`grouped_mm`, perhaps with a cast of w that was made before this call."""
    check_tensors("grouped_mm", x=x, w=w, offs=offs)
    error = _error_of_arguments(x, w, offs, config)
    plan, grad = plan_of(config, x, w, grouped=True), torch.is_grad_enabled()
    if (error := error or error_of_call(x, w, plan)) is not None:
        raise type(error)(f"grouped_mm: {error}")
    w_ENK = w.mT
    weight = None if cached is None else fitting(cached, cached.source, plan)
    if isinstance(w_ENK, Float8Tensor):
        weight = of_experts(w_ENK, plan)
    call = Call(plan, weight=weight, has_backward=grad)
    with without_autocast(x):
        out: Tensor = GroupedLinearFunction.apply(x, w_ENK, call, offs)
    return out


def _error_of_arguments(
    x: Tensor, w: Tensor, offs: Tensor, config: Float8LinearConfig
) -> TypeError | ValueError | None:
    """The error for arguments that do not fit each other; the casts check the values of offs."""
    if config.uses_delayed_scaling:
        return ValueError(
            "a delayed config keeps a history of amaxes per operand, and experts have none; take "
            'a dynamic recipe, such as from_recipe_name("tensorwise") or "rowwise"'
        )
    if config.smooth_input:
        return ValueError(NO_SMOOTH_EXPERTS)
    fits = x.dim() == 2 and w.dim() == 3 and offs.shape == w.shape[:1]
    if not fits or x.shape[1] != w.shape[1] or not x.device == w.device == offs.device:
        given = ", ".join([f"{tuple(each.shape)} on {each.device}" for each in (x, w, offs)])
        return ValueError(
            f"x must be (T, K), w (E, K, N) and offs (E,), on one device, got {given}; for a "
            "weight (E, N, K) pass weight.mT"
        )
    if offs.dtype != torch.int32:
        return TypeError(f"offs is {offs.dtype}: pass offs.to(torch.int32)")
    return None


# --- forward and backward


class GroupedLinearFunction(torch.autograd.Function):
    """Forward and backward of `float8.grouped_mm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ENK: Tensor, call: Call, offs: Tensor) -> Tensor:
        """(T, K), (E, N, K), (E,) -> (T, N), in the compute dtype."""
        needs_w = call.has_backward and ctx.needs_input_grad[1]
        x8_TK, x8_KT = _operands_of_input(x, call, offs, needs_w)
        w8_ENK, w_saved, _ = weight_of_forward(w_ENK, call)
        out_TN = grouped_product(call.plan.output, x8_TK, w8_ENK, offs)
        save(ctx, call, (x, w_ENK, None), x8_KT, w_saved, offs)
        return out_TN

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """grad_input and grad_weight, each None if it is not needed."""
        refuse_double_backward("grouped_mm")
        with without_autocast(g):
            x, x_scale, w, w_scale, offs = saved_by(ctx)
            call, plan = ctx.call, ctx.call.plan
            needs_x, needs_w = ctx.needs_input_grad[:2]
            grad_x = grad_w = w8_EKN = None
            g_scaled = g
            if needs_x:
                w8_EKN, scale = call.read_weight((w, w_scale), call)
                g_scaled = g if scale is None else g * _of_tokens(scale, offs, g.shape[0])
            if needs_x or needs_w:
                g8_TN, g8_NT, _ = cast_groups_of(g_scaled, plan.g, offs, needs_x, needs_w)
            if needs_x:
                grad_x = grouped_product(plan.grad_input, g8_TN, w8_EKN, offs)
            if needs_w:
                second = plan.x.second
                x8_KT = x if x_scale is None else Float8Matrix(x, x_scale, second.block)
                grad_w = grouped_product(plan.grad_weight, g8_NT, x8_KT, offs)
            return (*as_arguments(ctx, grad_x, grad_w, None)[:2], None, None)


def _of_tokens(scale_E1N: Tensor, offs: Tensor, tokens: int) -> Tensor:
    """The scale of each token's expert, (T, N); tokens of no group get the last one's."""
    numbers = torch.arange(tokens, dtype=offs.dtype, device=offs.device)
    return scale_E1N[torch.searchsorted(offs[:-1], numbers, right=True), 0]


def grouped_product(gemm: Gemm, a: Any, b: Any, offs: Tensor) -> Tensor:
    """``a @ b.T`` group by group: of `Float8Matrix`, or of matrices in high precision.

    Beside an operand in high precision the other one is dequantised.
    """
    if gemm.a is not None and gemm.b is not None:
        return kernels.multiply_groups(a, b, gemm, offs)
    dtype = a.dtype if isinstance(a, Tensor) else b.dtype
    if gemm.a is gemm.b:
        return kernels.multiply_groups_plainly(dequantized(a, dtype), dequantized(b, dtype), offs)
    whole = (WHOLE, WHOLE)
    a, b = [(x, None, whole) if isinstance(x, Tensor) else x for x in (a, b)]
    blocks, how = (a[2], b[2]), (dtype, gemm.align)
    out: Tensor = torch.ops.float8.grouped_mm.default(*a[:2], *b[:2], offs, *blocks, *how)
    return out


# --- operands


def _operands_of_input(x: Tensor, call: Call, offs: Tensor, needs_w: bool) -> tuple[Any, Any]:
    """x_TK for the output, and x_KT for grad_weight if that is needed, else None."""
    operand, dtype = call.plan.x, call.plan.dtype
    if not isinstance(x, Float8Tensor):
        x = x if x.dtype == dtype else x.to(dtype)
        x8_TK, x8_KT, _ = cast_groups_of(x, operand, offs, True, needs_w)
        return x8_TK, x8_KT if needs_w else None
    x8_TK, x8_KT, _ = read_float8_input(x, call, needs_w)
    if needs_w and operand.align > 1:  # through bfloat16, which is exact: the bits stay
        values = x.float8_data.to(torch.bfloat16)
        padded = _cast(values, operand.first, operand.align, offs, False, True, 1.0)[1]
        x8_KT = x8_KT._replace(data=padded.data)
    return x8_TK, x8_KT


def cast_groups_of(
    x: Tensor, operand: Operand, offs: Tensor, first: bool, second: bool
) -> Operands:
    """`float8.linear.casts.cast_operand` of tokens in groups, whose ends are ``offs``."""
    how, align = operand.first, operand.align
    if operand.second_is == VIEW:
        row_major = _cast(x, how, align, offs, True, False)[0]
        return row_major, row_major.t(), None
    if operand.second_is != OWN:
        return _cast(x, how, align, offs, first, second)
    one = _cast(x, how, align, offs, first, False)[0]
    return one, _cast(x, operand.second, align, offs, False, second)[1], None


def _cast(
    x: Tensor,
    how: OperandCast | None,
    align: int,
    offs: Tensor,
    first: bool,
    second: bool,
    scale: float | None = None,
) -> Operands:
    """Cast tokens in groups, and their transpose with padded groups; ``scale`` is one of all."""
    if how is None or not (first or second):
        return x, x.t(), None
    scale = how.static if scale is None else scale
    known = None if scale is None else constant(scale, x)
    return kernels.cast_grouped(x, how, offs, align, known, first, second)
