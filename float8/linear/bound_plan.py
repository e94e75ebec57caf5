"""A config's plan on one device, in one compute dtype: bound once, read at every call.

A `LinearPlan` says which casts and GEMMs a config asks for. Bound to a device, it also says which
kernel casts each operand and which GEMM multiplies each pair, or why none does. `plan_on` caches
the bound plan. A forward looks it up and checks only sizes.

A `BoundPlan` has no methods that compute, so torch.compile treats it as a constant: `plan_on` runs
once, while tracing. A compiled layer guards on the config's key and not on its casts.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, Gemm, LinearPlan
from float8.config.plan import plan_of_key
from float8.kernels.scaled_mm import CPU, EMULATED
from float8.linear.scaling import BoundCast, BoundOperand, Pair, multiply_scale


class BoundGemm:
    """One product on one device.

    Attributes:
        a, b: the casts of its operands; None if it runs in high precision.
        name: the GEMM that multiplies, see `float8.kernels.gemm_for`.
        is_plain: whether plain PyTorch multiplies.
        refusal: the reason why no GEMM multiplies, or None.
        out_dtype: the dtype of the result.
    """

    __slots__ = ("a", "b", "is_plain", "name", "out_dtype", "pad", "refusal", "use_fast_accum")

    def __init__(
        self,
        gemm: Gemm,
        a: BoundCast | None,
        b: BoundCast | None,
        family: str,
        out_dtype: torch.dtype,
        pad: bool,
    ) -> None:
        self.a, self.b, self.out_dtype, self.pad = a, b, out_dtype, pad
        self.use_fast_accum = gemm.use_fast_accum
        self.name, self.refusal = "", None
        if a is not None and b is not None:
            self.name, self.refusal = kernels.gemm_for(family, a.block, b.block, out_dtype)
        self.is_plain = self.name == kernels.PLAIN


class BoundPlan:
    """The three GEMMs of a layer and their casts, on one device.

    Attributes:
        x, w, g: the casts of input, weight and grad_output.
        output, grad_input, grad_weight: the GEMMs.
        dtype: the compute dtype, of the operands before their casts and of the results.
        has_delayed: whether any cast is delayed.
        on_gpu: whether tensor cores multiply.
        has_refusal: whether there is a product that the device runs for no sizes.
        is_aligned: whether sizes must be multiples of 16.
    """

    __slots__ = (
        "dtype",
        "g",
        "grad_input",
        "grad_weight",
        "has_delayed",
        "has_refusal",
        "is_aligned",
        "on_gpu",
        "output",
        "w",
        "x",
    )

    def __init__(
        self,
        plan: LinearPlan,
        device: torch.device,
        dtype: torch.dtype,
        emulate: bool,
        pad: bool,
        compiling: bool,
    ) -> None:
        family = kernels.family_of(device, emulate)

        def bound(gemm: Gemm) -> BoundGemm:
            a, b = (
                None if cast is None else BoundCast(cast, device, emulate, compiling)
                for cast in (gemm.a, gemm.b)
            )
            return BoundGemm(gemm, a, b, family, dtype, pad)

        self.dtype = dtype
        self.output, self.grad_input = bound(plan.output), bound(plan.grad_input)
        self.grad_weight = bound(plan.grad_weight)
        output, grad_input, grad_weight = plan.output, plan.grad_input, plan.grad_weight
        self.x = BoundOperand(
            self.output.a,
            self.grad_weight.b,
            output.a == grad_weight.b,
            plan.reuses_input,
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
        )
        gemms = (self.output, self.grad_input, self.grad_weight)
        casts = [cast for gemm in gemms for cast in (gemm.a, gemm.b)]
        self.has_delayed = any(cast is not None and cast.is_delayed for cast in casts)
        self.on_gpu = family not in (CPU, EMULATED)
        self.has_refusal = any(gemm.refusal is not None for gemm in gemms)
        self.is_aligned = not pad and any(kernels.is_aligned(gemm.name) for gemm in gemms)


def plan_on(config: Float8LinearConfig, device: torch.device, dtype: torch.dtype) -> BoundPlan:
    """The plan of a config, bound to a device and a compute dtype.

    Raises:
        ValueError: the GPU has no float8 conversions.
        ModuleNotFoundError: Triton is not installed.
    """
    return _bound(config.key, device, dtype, torch.compiler.is_compiling())


@functools.lru_cache(maxsize=1024)
def _remembered(key: str, device: torch.device, dtype: torch.dtype, compiling: bool) -> BoundPlan:
    plan, emulate, pad = plan_of_key(key)
    return BoundPlan(plan, device, dtype, emulate, pad, compiling)


def _bound(key: str, device: torch.device, dtype: torch.dtype, compiling: bool) -> BoundPlan:
    return _remembered(key, device, dtype, compiling)


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
_bound._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product(
    gemm: BoundGemm, a: Pair, b: Pair, bias: Tensor | None = None, factor: float | None = None
) -> Tensor:
    """``(a @ b.T) * factor``, and the bias times the factor too.

    Args:
        gemm: the GEMM.
        a, b: the results of its casts; in high precision, the matrix and None.
        bias: in the compute dtype.
        factor: the factor of unit scaling, or None.
    """
    if gemm.a is None or gemm.b is None:
        out = F.linear(a[0], b[0], bias)
        return out if factor is None else out * factor
    a_data, a_scale = a
    if factor is not None:
        a_scale = multiply_scale(a_scale, gemm.a, factor)
        bias = None if bias is None else bias * factor
    return kernels.multiply(
        gemm.name,
        a_data,
        a_scale,
        *b,
        gemm.a.block,
        gemm.b.block,
        bias,
        gemm.out_dtype,
        gemm.use_fast_accum,
        gemm.pad,
    )
