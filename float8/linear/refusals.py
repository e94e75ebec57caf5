"""Which layers float8 cannot run, and why: checks that answer with the reason, or None.

What depends on the layer and its config alone (`reason_against_layer`) is asked at conversion. What
also depends on the input and the device (`error_of_call`) is asked at each forward, so that the
message can name the layer, its sizes and the way out instead of the kernel's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.config import Float8LinearConfig
from float8.config.gemms import GEMM_NAMES
from float8.formats import HIGH_PRECISION_DTYPES, format_of
from float8.granularity import WHOLE, block_name
from float8.kernels import mxfp4
from float8.kernels.products import reason_against_granularity, unaligned
from float8.linear.plan import LinearPlan, autocasts, multiple_of
from float8.tensor import Float8Tensor
from float8.tensor.tensor import is_e8m0

NO_SHARDED_BLOCKS = (
    "the weight is a DTensor, as torch's ColwiseParallel and RowwiseParallel leave it, and this "
    "config has scales of blocks, which DTensors do not take; use float8.Float8ColwiseParallel and "
    "float8.Float8RowwiseParallel, or plain tensors (to_local) where nothing is sharded"
)
NO_SMOOTH_EXPERTS = (
    "smooth_input=True is for linear layers, not for experts; convert these with another config"
)


def reason_against_layer(weight: Tensor, config: Float8LinearConfig) -> str | None:
    """The reason why a layer with this weight cannot run this config on any device, or None."""
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join([str(dtype) for dtype in HIGH_PRECISION_DTYPES])
        return f"weight is {weight.dtype}; float8 is cast from {known}. Convert the layer first"
    if config.smooth_input and weight.dim() == 3:
        return NO_SMOOTH_EXPERTS
    if config.emulate:
        return None
    for name, gemm in zip(GEMM_NAMES, config.gemms.all, strict=True):
        if gemm.a is not None and gemm.b is not None:
            reason = reason_against_granularity(gemm.a.block, gemm.b.block)
            if reason is not None:
                return f"{name}: {reason}"
    return None


def error_of_call(input: Tensor, weight: Tensor, plan: LinearPlan) -> TypeError | ValueError | None:
    """The error for an input (..., K) that does not fit this weight and plan, or None.

    ``weight`` is (N, K), or of experts (E, K, N). Whoever raises it puts the name in front.
    """
    if input.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join([str(dtype) for dtype in HIGH_PRECISION_DTYPES])
        return TypeError(f"input is {input.dtype}; float8 is cast from {known}")
    if input.dtype != weight.dtype and not autocasts(input.device.type):
        return TypeError(
            f"input is {input.dtype} and weight {weight.dtype}; convert one of them or use "
            "torch.autocast"
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return ValueError(
            f"input has shape {tuple(input.shape)}, expected (..., {weight.shape[1]})"
        )
    grad, reason = torch.is_grad_enabled(), None
    needs_w = grad and weight.requires_grad
    if isinstance(input, Float8Tensor):
        reason = reason_against_float8_input(input, plan, needs_w)
    elif plan.is_tiled and hasattr(weight, "device_mesh"):
        reason = NO_SHARDED_BLOCKS
    elif plan.mxfp4_weights and weight.shape[1] % mxfp4.MXFP4_BLOCK:
        reason = f"mxfp4_weights=True needs in_features={weight.shape[1]} to be a multiple of 32"
    if reason is None and plan.on_gpu:
        K, N = weight.shape[1], weight.shape[2 if weight.dim() == 3 else 0]
        reason = reason_against_call(plan, N, K, input.numel() // max(K, 1), grad, needs_w)
    return None if reason is None else ValueError(reason)


def reason_against_float8_input(
    input: Float8Tensor, plan: LinearPlan, needs_grad_weight: bool
) -> str | None:
    """The reason why an input that is in float8 already does not fit a plan, or None."""
    cast, dims = plan.x.first, input.dim()
    if cast is None or plan.smooth_input:
        does = "keeps inputs in high precision" if cast is None else "has smooth_input=True"
        return f"input is a Float8Tensor, but this config {does}; pass input.dequantize()"
    expected, block = (1,) * (dims - len(cast.block)) + cast.block, tuple(input.block)
    is_row = cast.block[0] == 1 or dims == 2  # blocks of rows do not end where a matrix does
    fits = (block == expected and is_row) or (cast.is_whole and set(block) == {WHOLE})
    how = "Cast it so, as a matrix if blocks have several rows, or pass input.dequantize()"
    if not fits or input.float8_data.dtype != cast.dtype:
        return (
            f"input is a Float8Tensor in {input.format} with {block_name(block)} scales; this "
            f"config reads {format_of(cast.dtype)} with {block_name(expected[-2:])} ones. {how}"
        )
    if plan.is_grouped and cast.swizzled and is_e8m0(input.scale):
        return (
            "input is a Float8Tensor, and the grouped GEMM of MX formats reads the scales of each "
            "group in an order of its own; pass input.dequantize()"
        )
    # A block of several tokens may lie in two groups, which share no scale.
    is_split = plan.is_grouped and not cast.is_whole and plan.grad_weight.b is not None
    if needs_grad_weight and (is_split or not plan.x.shares_data):
        return (
            "input is a Float8Tensor, from which the weight gradient cannot be computed: this "
            "config casts it a second time, along other rows, which takes the high-precision "
            "values. Pass those, freeze the weight, or use a tensorwise recipe"
        )
    return None


def multiple_of_features(config: Float8LinearConfig, stacked: bool = False) -> int:
    """What in_features and out_features must be multiples of on GPUs; 1 where any sizes run.

    ``stacked`` says whether they are those of experts, with stacked weights.
    """
    casts = [gemm.a for gemm in config.gemms.all if gemm.a is not None]
    if config.pad_inner_dim or config.emulate or not casts:
        return 1
    return max([multiple_of(cast, stacked) for cast in casts])


def reason_against_call(
    plan: LinearPlan, N: int, K: int, tokens: int, grad: bool, grad_weight: bool
) -> str | None:
    """The reason why a device does not run one of the products of a call, or None.

    ``tokens`` are the rows of the input, over all leading dimensions. ``grad`` says whether a
    backward may follow, and ``grad_weight`` whether the weight needs its gradient.
    """
    if not plan.on_gpu:
        return None
    counted = 0 if plan.is_grouped or not grad_weight else tokens  # groups are padded
    features, batch = plan.multiple, plan.grad_weight.multiple
    if features and not (K % features or N % features or counted % batch):
        return None
    contraction_and_columns = (K, N), (N, K), (counted, K)
    are_run = True, grad, grad_weight
    for name, gemm, sizes, is_run in zip(
        GEMM_NAMES, plan.gemms, contraction_and_columns, are_run, strict=True
    ):
        if gemm.a is None or not is_run:
            continue
        if gemm.refusal is not None:
            return f"{name}: {gemm.refusal}"
        if (reason := unaligned(*sizes, gemm.multiple)) is not None:
            is_of_the_batch = name == "grad_weight" and tokens % gemm.multiple != 0
            pad = f"pad the batch to a multiple of {gemm.multiple} tokens"
            way_out = pad if is_of_the_batch else "filter the layer out with module_filter_fn"
            return (
                f"{name} GEMM of {tokens} tokens, in_features={K}, out_features={N}: {reason}; "
                f"{way_out} or set pad_inner_dim=True"
            )
    return None
