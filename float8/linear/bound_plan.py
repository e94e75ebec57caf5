"""A config's plan on one device family, in one compute dtype: bound once, read at every call.

A `LinearPlan` says which casts and GEMMs a config asks for. Bound to a device, it also says which
kernel casts each operand and which GEMM multiplies each pair, or why none does. `plan_on` caches
the bound plan. A forward looks it up and checks only sizes.

A `BoundPlan` has no methods that compute, so torch.compile treats it as a constant: `plan_on` runs
once, while tracing. A compiled layer guards on the config's key and not on its casts.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, Gemm, LinearPlan, OperandCast, ScalingType
from float8.config.plan import plan_of_key
from float8.formats import on_family
from float8.granularity import WHOLE, Block
from float8.kernels.scaled_mm import CPU, SUPPORT

TOKENS, EXPERTS = "tokens", "experts"  # the operands of grouped GEMMs


class BoundCast:
    """An `OperandCast` on one device family: everything about it that does not depend on values.

    It has no methods that compute, so torch.compile treats it as a constant, without guards.
    ``cast`` is in the orientation of its GEMM. ``family`` is that of `float8.kernels.family_of`.
    ``emulate`` casts in plain PyTorch on every device. With ``fuses``, a compiler may fuse the cast
    with the op that makes the operand. ``groups`` is "" for a matrix; "tokens" or "experts" for an
    operand of a grouped GEMM. One of experts has three dimensions, its block a 1 for the first.

    Attributes:
        dtype: the float8 dtype that the device multiplies.
        largest: the largest finite value of its format.
        kernel: the Triton kernel, see `float8.kernels.kernel_for`; None for plain PyTorch.
        static: the scale of a static cast.
        is_whole: whether one scale serves the whole operand.
        swizzled: whether tensor cores read the scales, for which E8M0 ones are swizzled.
    """

    __slots__ = (
        "block",
        "dtype",
        "is_delayed",
        "is_dynamic",
        "is_whole",
        "kernel",
        "largest",
        "scale_format",
        "static",
        "swizzled",
    )

    def __init__(
        self,
        cast: OperandCast,
        family: str,
        emulate: bool = False,
        fuses: bool = False,
        groups: str = "",
    ) -> None:
        fmt = on_family(cast.format, family)
        self.dtype, self.largest = fmt.dtype, fmt.max
        self.block: Block = (1, *cast.block) if groups == EXPERTS else cast.block
        self.scale_format = cast.scale_format.value
        self.is_whole = cast.block.count(WHOLE) == len(cast.block)
        self.is_delayed = cast.scaling_type is ScalingType.DELAYED
        self.is_dynamic = cast.scaling_type is ScalingType.DYNAMIC
        self.static = None if cast.static_scale is None else float(cast.static_scale)
        self.swizzled = False
        # A GPU without float8 conversions also has no GEMM, whose refusal names the layer.
        is_known = emulate or family == CPU or family in SUPPORT
        self.kernel = None
        if groups == TOKENS:
            self.kernel = kernels.group_kernel_for(family, self.block, emulate)
            return
        if is_known:
            self.kernel = kernels.kernel_for(family, self.block, emulate)
        if self.static is not None and fuses and kernels.compiler_may_cast(family):
            # A cast by a constant scale is elementwise: the compiler fuses it into the op that
            # makes x. That op writes 1 byte per element instead of bfloat16, and the transposed
            # copy reads 1 and writes 1: 3 bytes per element. The compiler cannot fuse a kernel: x
            # is written (2) and read (2), and both orientations are written (1 + 1): 6 bytes.
            # No op makes a weight.
            self.kernel = None


class BoundOperand:
    """The two casts of one operand on one device.

    Attributes:
        first: for the GEMM that contracts along the operand's rows; None for high precision.
        second: for the GEMM that contracts along its columns, stated for the transpose; or None.
        is_shared: whether the second GEMM reads the transpose of the first GEMM's data.
        is_same: whether both casts have one block, each in its own orientation: one op casts both.
        align: the multiple to which the transposed orientation of tokens pads each group.
    """

    __slots__ = ("align", "first", "is_same", "is_shared", "second")

    def __init__(
        self,
        first: BoundCast | None,
        second: BoundCast | None,
        is_same: bool,
        is_shared: bool,
        align: int = 1,
    ) -> None:
        self.first, self.second, self.is_shared = first, second, is_shared
        self.is_same, self.align = is_same and first is not None, align


class BoundGemm:
    """One product on one device.

    Attributes:
        a, b: the casts of its operands; None if it runs in high precision.
        name: the GEMM that multiplies, see `float8.kernels.gemm_for`.
        refusal: the reason why no GEMM multiplies, or None.
        out_dtype: the dtype of the result.
        align: of a grouped GEMM, the multiple to which it needs groups of tokens padded.
    """

    __slots__ = (
        "a",
        "align",
        "b",
        "name",
        "out_dtype",
        "pad",
        "refusal",
        "use_fast_accum",
    )

    def __init__(
        self,
        gemm: Gemm,
        a: BoundCast | None,
        b: BoundCast | None,
        family: str,
        out_dtype: torch.dtype,
        emulate: bool,
        pad: bool,
        grouped: bool = False,
    ) -> None:
        self.a, self.b, self.out_dtype, self.pad = a, b, out_dtype, pad
        self.use_fast_accum = gemm.use_fast_accum
        self.name, self.refusal, self.align = "", None, 1
        if a is not None and b is not None:
            what = (family, a.block, b.block, out_dtype, emulate)
            if grouped:
                is_e4m3 = a.dtype == b.dtype == torch.float8_e4m3fn
                self.name, self.refusal = kernels.grouped_gemm_for(*what, is_e4m3)
                self.align = kernels.group_alignment(self.name)
            else:
                self.name, self.refusal = kernels.gemm_for(*what)
        for cast in (a, b):
            if cast is not None:
                cast.swizzled = self.name not in ("", kernels.PLAIN)


class BoundPlan:
    """The three GEMMs of a layer and their casts, on one device.

    Attributes:
        x, w, g: the casts of input, weight and grad_output.
        output, grad_input, grad_weight: the GEMMs.
        family: the device family.
        dtype: the compute dtype, of the operands before their casts and of the results.
        has_delayed: whether any cast is delayed.
        on_gpu: whether tensor cores multiply.
        has_refusal: whether there is a product that the device runs for no sizes.
        is_aligned: whether sizes must be multiples of 16.
        is_grouped: whether the GEMMs multiply groups of tokens with experts.
        is_tiled: whether some scale serves a block, neither one element nor a whole dimension.
        smooth_input: whether x and w are multiplied by factors, see `float8.linear.smoothing`.
        to_onnx: whether torch.onnx.export traces the layer.
    """

    __slots__ = (
        "dtype",
        "family",
        "g",
        "grad_input",
        "grad_weight",
        "has_delayed",
        "has_refusal",
        "is_aligned",
        "is_grouped",
        "is_tiled",
        "on_gpu",
        "output",
        "smooth_input",
        "to_onnx",
        "w",
        "x",
    )

    def __init__(
        self,
        plan: LinearPlan,
        family: str,
        dtype: torch.dtype,
        emulate: bool,
        pad: bool,
        compiling: bool,
        grouped: bool = False,
        to_onnx: bool = False,
    ) -> None:
        def bound(gemm: Gemm, out_dtype: torch.dtype, b_groups: str = EXPERTS) -> BoundGemm:
            a, b = (
                None
                if cast is None
                else BoundCast(
                    cast,
                    family,
                    emulate,
                    compiling and groups == TOKENS,
                    groups if grouped else "",
                )
                for cast, groups in ((gemm.a, TOKENS), (gemm.b, b_groups))
            )
            return BoundGemm(gemm, a, b, family, out_dtype, emulate, pad, grouped)

        self.family, self.dtype, self.is_grouped = family, dtype, grouped
        self.to_onnx, self.smooth_input = to_onnx, plan.smooth_input
        # The gradients of smooth operands are multiplied by factors, from beyond float16's range.
        is_narrow = plan.smooth_input and dtype == torch.float16
        grad_dtype = torch.float32 if is_narrow else dtype
        self.output, self.grad_input = bound(plan.output, dtype), bound(plan.grad_input, grad_dtype)
        self.grad_weight = bound(plan.grad_weight, grad_dtype, TOKENS)
        align = self.grad_weight.align  # the only GEMM that reads transposed tokens
        output, grad_input, grad_weight = plan.output, plan.grad_input, plan.grad_weight
        self.x = BoundOperand(
            self.output.a,
            self.grad_weight.b,
            output.a == grad_weight.b,
            plan.reuses_input,
            align,
        )
        self.w = BoundOperand(
            self.output.b,
            self.grad_input.b,
            output.b == grad_input.b,
            plan.reuses_weight,
        )
        self.g = BoundOperand(
            self.grad_input.a,
            self.grad_weight.a,
            grad_input.a == grad_weight.a,
            plan.reuses_grad_output,
            align,
        )
        gemms = (self.output, self.grad_input, self.grad_weight)
        casts = [cast for gemm in gemms for cast in (gemm.a, gemm.b)]
        self.has_delayed = any(cast is not None and cast.is_delayed for cast in casts)
        blocks = [cast.block for cast in casts if cast is not None]
        self.is_tiled = any(extent not in (1, WHOLE) for block in blocks for extent in block)
        self.on_gpu = family != CPU and not emulate
        self.has_refusal = any(gemm.refusal is not None for gemm in gemms)
        self.is_aligned = not pad and any(kernels.is_aligned(gemm.name) for gemm in gemms)


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


def plan_for(config: Float8LinearConfig, input: Tensor, grouped: bool = False) -> BoundPlan:
    """The plan of a config for one call: on the input's device, in the dtype of the call."""
    device = input.device
    dtype = torch.get_autocast_dtype(device.type) if autocasts(device.type) else input.dtype
    return _bound(config.key, device, dtype, torch.compiler.is_compiling(), grouped)


def plan_on(
    config: Float8LinearConfig, device: torch.device, dtype: torch.dtype, grouped: bool = False
) -> BoundPlan:
    """The plan of a config, bound to a device and a compute dtype; for grouped GEMMs if asked.

    Raises ValueError if the GPU has no float8 conversions, and ModuleNotFoundError if Triton is not
    installed.
    """
    return _bound(config.key, device, dtype, torch.compiler.is_compiling(), grouped)


@functools.lru_cache(maxsize=1024)
def _bound_once(
    key: str,
    device: torch.device,
    dtype: torch.dtype,
    compiling: bool,
    grouped: bool,
    to_onnx: bool,
) -> BoundPlan:
    plan, emulate, pad = plan_of_key(key)
    family = kernels.family_of(device)
    return BoundPlan(plan, family, dtype, emulate, pad, compiling, grouped, to_onnx)


def _bound(
    key: str, device: torch.device, dtype: torch.dtype, compiling: bool, grouped: bool = False
) -> BoundPlan:
    # Asked here: dynamo takes the function for False.
    to_onnx = compiling and torch.onnx.is_in_onnx_export()
    return _bound_once(key, device, dtype, compiling, grouped, to_onnx)


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
_bound._dynamo_marked_constant = True  # type: ignore[attr-defined]
