"""`grouped_mm`: each group of tokens times the weight of its expert, in float8.

Legend: T tokens, E experts, K and N features. The three products, each operand with the contraction
last, are those of a linear layer with the expert of each token in place of one weight::

    output_TN       = x_TK @ w_ENK.T   per group
    grad_input_TK   = g_TN @ w_EKN.T   per group
    grad_weight_ENK = g_NT @ x_KT.T    per group, the contraction being its tokens

No two experts share a scale of their weights, and no two groups a scale along their tokens, so an
expert's result depends on its own tokens and weight. A tensorwise scale of the tokens is the one
exception: it is one for all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.arguments import check_tensors
from float8.config import Float8LinearConfig, check_config
from float8.experts.autograd import GroupedLinearFunction
from float8.linear.autograd import Call
from float8.linear.float8_weight import Float8Weight, fitting, of_experts
from float8.linear.plan import plan_of, without_autocast
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
