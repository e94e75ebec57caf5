"""Which layers float8 cannot run, and why: checks that answer with the reason, or None.

What depends on the layer and its config alone (`refuses_layer`) is asked at conversion; what also
depends on the device and the batch (`refuses_call`) at each forward on a GPU, so that the message
can name the layer, its sizes and the way out instead of the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from float8.arguments import described
from float8.config import Float8LinearConfig, Gemm, LinearPlan
from float8.formats import HIGH_PRECISION_DTYPES, format_of
from float8.granularity import WHOLE
from float8.kernels.scaled_mm import (
    ALIGNMENT,
    CPU,
    refuses_device,
    refuses_granularity,
    refuses_sizes,
)
from float8.linear.bound_plan import BoundCast, BoundGemm, BoundPlan
from float8.tensor import Float8Tensor
from float8.tensor.parts import is_e8m0

_IN_HIGH_PRECISION = (
    "run it in `with float8.high_precision(model):`, or on what "
    "float8.convert_from_float8_training(model) returns"
)
REFUSES_SHARDED_BLOCKS = (
    "the weight is a DTensor, as torch's ColwiseParallel and RowwiseParallel leave it, and this "
    "config has scales of blocks, which DTensors do not take; use float8.Float8ColwiseParallel and "
    "float8.Float8RowwiseParallel, or plain tensors (to_local) where nothing is sharded"
)
REFUSES_SMOOTH_EXPERTS = (
    "smooth_input=True is for linear layers, not for experts; convert these with another config"
)
REFUSES_SCRIPT = (
    "torch.jit.script does not work on a float8 layer; script what "
    "float8.convert_from_float8_training(model) returns"
)


def refuses_layer(weight: Tensor, config: Float8LinearConfig) -> str | None:
    """The reason why a layer with this weight cannot run this config on any device, or None."""
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        return f"weight is {weight.dtype}; float8 is cast from {known}. Convert the layer first"
    if config.smooth_input and weight.dim() == 3:
        return REFUSES_SMOOTH_EXPERTS
    if config.emulate:
        return None
    for name, gemm in _gemms(config.plan):
        if gemm.a is not None and gemm.b is not None:
            reason = refuses_granularity(gemm.a.block, gemm.b.block)
            if reason is not None:
                return f"{name}: {reason}"
    return None


def refuses_transform(input: object) -> TypeError | RuntimeError | None:
    """The error for a call under a transform that cannot trace the layer, or None.

    Also the error for an input that is not a tensor.
    """
    if torch._C._are_functorch_transforms_active():
        name = "torch.func (grad, vmap, jvp, jacrev)"
    elif torch._C._get_tracing_state() is not None:
        name = "torch.jit.trace or torch.onnx.export"
    elif isinstance(input, torch.fx.Proxy):
        name = "torch.fx.symbolic_trace"
    elif isinstance(input, Tensor):
        return None
    else:
        return TypeError(f"input must be a torch.Tensor, got {described(input)}")
    return RuntimeError(f"{name} does not work on a float8 layer; {_IN_HIGH_PRECISION}")


def refuses_input(input: Tensor, weight: Tensor, autocasts: bool) -> TypeError | ValueError | None:
    """The error for an input that does not fit this weight (N, K), or None."""
    if input.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        return TypeError(f"input is {input.dtype}; float8 is cast from {known}")
    if input.dtype != weight.dtype and not autocasts:
        return TypeError(
            f"input is {input.dtype} and weight {weight.dtype}; convert one of them or use "
            "torch.autocast"
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return ValueError(
            f"input has shape {tuple(input.shape)}, expected (..., {weight.shape[1]})"
        )
    return None


def refuses_float8_input(
    input: Float8Tensor, plan: BoundPlan, needs_grad_weight: bool
) -> str | None:
    """The reason why an input that is in float8 already does not fit a plan, or None."""
    cast = plan.x.first
    if cast is None:
        return "input is a Float8Tensor, but this config keeps inputs in high precision"
    reason = (_refuses_smooth if plan.smooth_input else _refuses_granularity)(input, cast)
    if reason is not None:
        return reason
    if plan.is_grouped and cast.swizzled and is_e8m0(input.scale):
        return (
            "input is a Float8Tensor, and the grouped GEMM of MX formats reads the scales of each "
            "group in an order of its own; pass input.dequantize()"
        )
    # A block of several tokens may lie in two groups, which share no scale.
    is_shared = plan.x.is_shared and (cast.is_whole or not plan.is_grouped)
    if needs_grad_weight and not is_shared:
        return (
            "input is a Float8Tensor, from which the weight gradient cannot be computed: this "
            "config casts it a second time, along other rows, which takes the high-precision "
            "values. Pass those, freeze the weight, or use a tensorwise recipe"
        )
    return None


def _refuses_granularity(input: Float8Tensor, cast: BoundCast) -> str | None:
    """The reason why a float8 input is not what this cast returns, or None."""
    expected = (1,) * (input.dim() - len(cast.block)) + cast.block
    is_whole = cast.is_whole and all(extent == WHOLE for extent in input.block)
    if input.float8_data.dtype == cast.dtype and (input.block == expected or is_whole):
        return None
    return (
        f"input is a Float8Tensor in {input.format} with block {input.block}; this config "
        f"casts inputs to {format_of(cast.dtype)} with block {expected} (-1: the whole "
        "dimension). Cast it so, or pass input.dequantize()"
    )


def _refuses_smooth(input: Float8Tensor, cast: BoundCast) -> str | None:
    """The reason why a float8 input is no smooth one, or None."""
    expected = (WHOLE,) * (input.dim() - 1) + (1,)
    if cast.is_whole and (input.float8_data.dtype, input.block) == (cast.dtype, expected):
        return None
    return (
        f"input is a Float8Tensor in {input.format} with block {input.block}; this config has "
        f"smooth_input=True, which takes inputs in high precision, or in {format_of(cast.dtype)} "
        "with one scale per channel, as SwiGLUCast of the same tensorwise config returns them"
    )


def _gemms(plan: LinearPlan) -> tuple[tuple[str, Gemm], ...]:
    return (
        ("output", plan.output),
        ("grad_input", plan.grad_input),
        ("grad_weight", plan.grad_weight),
    )


def multiple_of_features(config: Float8LinearConfig, stacked: bool = False) -> int:
    """What in_features and out_features must be multiples of on GPUs; 1 where any sizes run.

    ``stacked`` says whether they are those of experts, with stacked weights.
    """
    gemms = [gemm for _, gemm in _gemms(config.plan) if gemm.a is not None and gemm.b is not None]
    if config.pad_inner_dim or config.emulate or not gemms:
        return 1
    return _multiple_of_experts(gemms) if stacked else ALIGNMENT


def _multiple_of_experts(gemms: Iterable[Gemm | BoundGemm]) -> int:
    casts = [cast for gemm in gemms for cast in (gemm.a, gemm.b)]
    has_mx = any(cast is not None and cast.block[-1] == 32 for cast in casts)
    return 32 if has_mx else ALIGNMENT


def refuses_experts(plan: BoundPlan, grad: bool, *shapes: Sequence[int]) -> str | None:
    """The reason why a GPU does not run one of the grouped GEMMs with experts, or None.

    ``plan`` is bound for groups. ``grad`` says whether a backward may follow. ``shapes`` are those
    of the stacks of matrices, (E, N, K) or (E, K, N).
    """
    gemms = {"output": plan.output, "grad_input": plan.grad_input, "grad_weight": plan.grad_weight}
    for name, gemm in gemms.items():
        if gemm.refusal is not None and (name == "output" or grad):
            return f"{name}: {gemm.refusal}"
    if not plan.on_gpu or plan.output.pad:
        return None
    multiple = _multiple_of_experts(gemms.values())
    for shape in shapes:
        if any(size % multiple for size in shape[1:]):
            return (
                f"experts of {shape[1]} by {shape[2]} features are no multiples of {multiple}, "
                f"which {plan.family} needs: pad them, set pad_inner_dim=True, or leave these "
                "experts out with module_filter_fn"
            )
    return None


def refuses_call(
    config: Float8LinearConfig,
    weight: Tensor,
    tokens: int,
    dtype: torch.dtype,
    family: str,
    grad: bool,
) -> str | None:
    """The reason why a device cannot run one call of a layer, or None: plain PyTorch runs any.

    ``tokens`` are the rows of the input, over all leading dimensions. ``dtype`` is the compute
    dtype, and ``family`` is that of `float8.kernels.family_of`. ``grad`` says whether a backward
    may follow.
    """
    if family == CPU or config.emulate:
        return None
    out_features, in_features = weight.shape
    sizes = {  # GEMM -> (contraction, columns)
        "output": (in_features, out_features),
        "grad_input": (out_features, in_features),
        "grad_weight": (tokens, in_features),
    }
    for name, gemm in _gemms(config.plan):
        if gemm.a is None or gemm.b is None or (name != "output" and not grad):
            continue
        if name == "grad_weight" and not weight.requires_grad:
            continue
        product = (family, gemm.a.block, gemm.b.block, dtype)
        if (reason := refuses_device(*product)) is not None:
            return f"{name}: {reason}"
        reason = refuses_sizes(*product, *sizes[name])
        if reason is not None and not config.pad_inner_dim:
            is_of_the_batch = name == "grad_weight" and tokens % ALIGNMENT != 0
            way_out = (
                f"pad the batch to a multiple of {ALIGNMENT} tokens"
                if is_of_the_batch
                else "filter the layer out with module_filter_fn"
            )
            return (
                f"{name} GEMM of {tokens} tokens, in_features={in_features}, "
                f"out_features={out_features}: {reason}; {way_out} or set pad_inner_dim=True"
            )
    return None
