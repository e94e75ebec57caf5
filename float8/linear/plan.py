"""`plan_for`: what a layer runs on one device family, in one compute dtype.

A config's `LinearPlan` says which casts and GEMMs it asks for. `bind` adds, once, which kernel
casts each operand and which GEMM multiplies each pair, or why none does. A forward looks the bound
plan up and checks only sizes.

torch.compile treats a plan as a constant: it looks one up while tracing, and a compiled layer
guards on the config's key and not on its casts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, Gemm, LinearPlan, OperandCast
from float8.config.linear import PLANS
from float8.formats import on_family, twin_factor
from float8.kernels.casts import GROUP_KERNELS, KERNELS, import_kernels
from float8.kernels.products import CPU, needs_power_of_two_scales
from float8.tensor import Float8Tensor

TOKENS, EXPERTS = "tokens", "experts"  # the operands of grouped GEMMs
_ORDER_OF_GROUPS = (
    "the grouped GEMM of MX formats reads scales in an order of its own, which backward cannot "
    "dequantise; leave dequantize_in_backward out"
)


def plan_for(
    config: Float8LinearConfig, device: torch.device, dtype: torch.dtype, grouped: bool = False
) -> LinearPlan:
    """The plan of a config on a device, in a compute dtype; for grouped GEMMs if asked.

    Raises ModuleNotFoundError if Triton is not installed, on a GPU that casts with it.
    """
    return _known(config.key, device, dtype, grouped, torch.compiler.is_compiling())


def plan_of(config: Float8LinearConfig, input: Tensor, weight: Tensor) -> LinearPlan:
    """The plan for an input and a weight, either of which may be in float8 already."""
    device, dtype = input.device, input.dtype
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    is_compiling = torch.compiler.is_compiling()  # dynamo would guard on all that it finds
    plan = None if is_compiling else BOUND.get((config.key, device, dtype, False, False))
    plan = plan_for(config, device, dtype) if plan is None else plan
    is_given = isinstance(input, Float8Tensor) or isinstance(weight, Float8Tensor)
    return plan.given if is_given and plan.given is not None else plan


BOUND: dict[tuple[Any, ...], LinearPlan] = {}


def _known(
    key: str, device: torch.device, dtype: torch.dtype, grouped: bool, compiling: bool
) -> LinearPlan:
    what = key, device, dtype, grouped, compiling
    if (plan := BOUND.get(what)) is None:
        plan = bind(PLANS[key], kernels.family_of(device), dtype, grouped, compiling)
        load_kernels(*[cast for gemm in plan.gemms for cast in (gemm.a, gemm.b)])
        BOUND[what] = plan
    return plan


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def bind(
    plan: LinearPlan,
    family: str,
    dtype: torch.dtype,
    grouped: bool = False,
    compiling: bool = False,
    given: bool = False,
) -> LinearPlan:
    """A plan on a device family, in a compute dtype.

    ``compiling`` says whether a compiler may fuse casts with the ops that make their operands.
    ``given``: an operand is in float8 already, with scales that need not be as the config says.
    """
    # Gradients of smooth operands are multiplied by factors that float16 cannot hold.
    is_narrow = plan.smooth_input and dtype == torch.float16
    grad_dtype = torch.float32 if is_narrow else dtype

    def bound(gemm: Gemm, out_dtype: torch.dtype, b_is_weight: bool = True) -> Gemm:
        a, b = [
            cast
            and bind_cast(
                cast,
                family,
                plan.emulate,
                groups=(EXPERTS if is_weight else TOKENS) if grouped else "",
                fuses=compiling and not grouped and not is_weight,
            )
            for cast, is_weight in ((gemm.a, False), (gemm.b, b_is_weight))
        ]
        if a is None or b is None:
            return replace(gemm, a=a, b=b, out_dtype=out_dtype)
        has_power_of_two_scales = gemm.has_power_of_two_scales and not given
        what = family, a.block, b.block, out_dtype, plan.emulate
        if grouped:
            is_e4m3 = a.dtype == b.dtype == torch.float8_e4m3fn
            name, refusal = kernels.grouped_gemm_for(*what, is_e4m3, has_power_of_two_scales)
        else:
            name, refusal = kernels.gemm_for(*what, has_power_of_two_scales)
        align = kernels.group_alignment(name) if grouped else 1
        on_gpu = name not in ("", kernels.PLAIN_PYTORCH)
        if grouped and on_gpu and plan.dequantizes and a.scale_format.is_e8m0:
            name, refusal = "", _ORDER_OF_GROUPS
        swizzled = on_gpu and not plan.dequantizes
        a, b = replace(a, swizzled=swizzled), replace(b, swizzled=swizzled)
        return Gemm(a, b, gemm.use_fast_accum, name, refusal, out_dtype, align, plan.pad)

    found = replace(
        plan,
        output=bound(plan.output, dtype),
        grad_input=bound(plan.grad_input, grad_dtype),
        grad_weight=bound(plan.grad_weight, grad_dtype, b_is_weight=False),
        dtype=dtype,
        is_grouped=grouped,
        on_gpu=family != CPU and not plan.emulate,
    )
    if any([needs_power_of_two_scales(gemm.name) for gemm in found.gemms]):
        found.given = bind(plan, family, dtype, grouped, compiling, given=True)
    return found


def plan_of_call(plan: LinearPlan, x: Tensor, w: Tensor) -> LinearPlan:
    """The plan for these operands, either of which may be in float8 already."""
    is_given = isinstance(x, Float8Tensor) or isinstance(w, Float8Tensor)
    return plan.given if is_given and plan.given is not None else plan


def bind_cast(
    cast: OperandCast, family: str, emulate: bool = False, groups: str = "", fuses: bool = False
) -> OperandCast:
    """A cast on a device family.

    ``groups`` is "" for a matrix; "tokens" or "experts" for an operand of a grouped GEMM. With
    ``fuses``, a compiler may fuse the cast with the op that makes the operand.
    """
    block = (1, *cast.block) if groups == EXPERTS else cast.block
    table = GROUP_KERNELS if groups == TOKENS else KERNELS
    kernel = None if emulate else table.get(family, {}).get(block[-2:])
    if cast.static is not None and fuses and kernels.compiler_may_cast(family):
        # A cast by a constant scale is elementwise: the compiler fuses it into the op that makes
        # x. That op writes 1 byte per element instead of bfloat16, and the transposed copy reads 1
        # and writes 1: 3 bytes per element. The compiler cannot fuse a kernel: x is written (2) and
        # read (2), and both orientations are written (1 + 1): 6 bytes. No op makes a weight.
        kernel = None
    fmt, static = on_family(cast.format, family), cast.static
    digits = None if static is None else repr(static * twin_factor(cast.format, fmt))
    return replace(cast, format=fmt, block=block, kernel=kernel, static_scale=digits)


def load_kernels(*casts: OperandCast | None) -> None:
    """Import the kernels of bound casts, which registers their ops.

    Raises ModuleNotFoundError if Triton is not installed.
    """
    import_kernels(tuple([cast.kernel for cast in casts if cast is not None and cast.kernel]))


load_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a device type; meta tensors have none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off, which would convert the data that plain PyTorch multiplies."""
    if autocasts(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that operands are rounded to before their casts, and that the GEMMs return."""
    device_type = input.device.type
    return torch.get_autocast_dtype(device_type) if autocasts(device_type) else input.dtype
