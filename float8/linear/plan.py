"""`plan_for`: what a layer runs on one device family, in one compute dtype.

A plan says which kernel casts each operand and which GEMM multiplies each pair, or why none does.
It is always of a device family, complete, and never changed. A forward looks its plan up
(`plan_of`) and checks only sizes.

torch.compile treats a plan as a constant: it looks one up while tracing, and a compiled layer
guards on the config's key and not on its casts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, GemmCasts, OperandCast
from float8.config.linear import CONFIGS
from float8.formats import ScaleFormat, on_family, twin_factor
from float8.granularity import WHOLE
from float8.kernels import mxfp4
from float8.kernels.casts import GROUP_KERNELS, KERNELS
from float8.kernels.cublas import ALIGNMENT
from float8.kernels.products import CPU, needs_power_of_two_scales
from float8.kernels.registration import load_kernels
from float8.tensor import Float8Tensor

TOKENS, EXPERTS = "tokens", "experts"  # the operands of grouped GEMMs
_NO_DEQUANTIZED_MX_GROUPS = (
    "the grouped GEMM of MX formats reads scales in an order of its own, which backward cannot "
    "dequantise; leave dequantize_in_backward out"
)


@dataclass(slots=True, unsafe_hash=True)
class Gemm:
    """One product ``a @ b.T`` on a device; `float8.kernels.multiply` takes it.

    Args:
        a, b: the casts of the operands; both None where the product is in high precision. With
            ``emulate`` one may be: the other is dequantised to the compute dtype.
        out_dtype: the dtype of the result.
        use_fast_accum: see `GemmConfig`; None for experts alone.
        name: the GEMM that multiplies, see `float8.kernels.gemm_for`.
        refusal: the reason why no GEMM of the device multiplies, or None.
        align: of a grouped GEMM, the multiple to which it needs groups of tokens padded.
        pad: whether sizes that are no multiple of 16 are padded where the GEMM needs it.
        multiple: of what number the contraction and the columns of the result must be multiples.
    """

    a: OperandCast | None
    b: OperandCast | None
    out_dtype: torch.dtype
    use_fast_accum: bool | None = False
    name: str = ""
    refusal: str | None = None
    align: int = 1
    pad: bool = False
    multiple: int = 1


# How the second orientation of an operand comes to be:
VIEW = "a view of the first, with the same scales"
PAIR = "a second output of the first's cast"
OWN = "a cast of its own, or none"


@dataclass(slots=True, unsafe_hash=True)
class Operand:
    """The two casts of an operand, each stated in the orientation of the GEMM that reads it.

    Args:
        first: for the GEMM that sums over each row of the operand; None for high precision.
        second: for the GEMM that sums over each column, stated for the transpose; or None.
        align: the multiple to which the transposed orientation of tokens pads each group.
        may_view: whether the second GEMM reads a transposed view of data that it shares: where no
            kernel writes a transposed copy, or where it dequantises its operands.

    Attributes:
        second_is: `VIEW`, `PAIR` or `OWN`.
        shares_data: whether both GEMMs read the same data and scales.
    """

    first: OperandCast | None
    second: OperandCast | None
    align: int = 1
    may_view: bool = True
    second_is: str = field(init=False)
    shares_data: bool = field(init=False)

    def __post_init__(self) -> None:
        first, second = self.first, self.second
        both = first is not None and second is not None
        self.shares_data = both and first.transposed() == second  # type: ignore[union-attr]
        if self.shares_data and (self.may_view or first != second):
            self.second_is = VIEW
        else:
            self.second_is = PAIR if both and first == second else OWN


@dataclass(slots=True, unsafe_hash=True)
class LinearPlan:
    """The casts and GEMMs of a layer on a device. For M tokens, K and N input and output features:

    Args:
        output: a = x_MK, b = w_NK.
        grad_input: a = g_MN, b = w_KN.
        grad_weight: a = g_NM, b = x_KM.
        x, w, g: the casts of input, weight and grad_output. With ``dequantize_in_backward`` the
            second ones are views, which the GEMMs of backward dequantise.
        dtype: the compute dtype, of the operands before their casts and of the results.
        smooth_input: x and w are multiplied by factors, see `float8.linear.smoothing`.
        mxfp4_weights: w is rounded to MXFP4 before its casts, see `float8.kernels.mxfp4`.
        is_grouped: whether the GEMMs multiply groups of tokens with experts.
        on_gpu: whether tensor cores multiply.
        of_float8_operands: the plan of calls with an operand that is in float8 already, whose
            scales may be any numbers, where its products are others; else None.

    Attributes:
        gemms: the three GEMMs, in the order of `GEMM_NAMES`.
        has_delayed: whether any cast is delayed.
        multiple: of what number in_features and out_features must be multiples; 0 if a GEMM refuses
            all sizes.
        is_tiled: whether some scale serves a block, neither one element nor a whole dimension.
            MXFP4 weights have such scales.
    """

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    x: Operand
    w: Operand
    g: Operand
    dtype: torch.dtype
    smooth_input: bool = False
    mxfp4_weights: bool = False
    is_grouped: bool = False
    on_gpu: bool = False
    of_float8_operands: LinearPlan | None = field(default=None, repr=False, compare=False)
    gemms: tuple[Gemm, Gemm, Gemm] = field(init=False, repr=False, compare=False)
    has_delayed: bool = field(init=False, repr=False, compare=False)
    multiple: int = field(init=False, repr=False, compare=False)
    is_tiled: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.gemms = self.output, self.grad_input, self.grad_weight
        casts = [cast for gemm in self.gemms for cast in (gemm.a, gemm.b) if cast is not None]
        self.has_delayed = any([cast.is_delayed for cast in casts])
        is_refused = any([gemm.refusal is not None for gemm in self.gemms])
        self.multiple = 0 if is_refused else max([gemm.multiple for gemm in self.gemms])
        extents = [extent for cast in casts for extent in cast.block]
        self.is_tiled = self.mxfp4_weights or any([extent not in (1, WHOLE) for extent in extents])


# (config.key, device, compute dtype, grouped, compiling) -> the plan of calls that have run.
USED: dict[tuple[str, torch.device, torch.dtype, bool, bool], LinearPlan] = {}


def plan_of(
    config: Float8LinearConfig,
    input: Tensor,
    weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
    grouped: bool = False,
) -> LinearPlan:
    """The plan of a call with an input and a weight, either of which may be in float8 already.

    ``dtype`` is the compute dtype, by default that of `compute_dtype`. Raises ModuleNotFoundError
    if Triton is not installed, on a GPU that casts with it.
    """
    device = input.device
    if dtype is None:  # `compute_dtype`, without a call
        is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_cast else input.dtype
    is_compiling = torch.compiler.is_compiling()  # dynamo would guard on all that it finds
    plan = None if is_compiling else USED.get((config.key, device, dtype, grouped, False))
    if plan is None:
        plan = _first_use(config.key, device, dtype, grouped, is_compiling)
    is_float8 = isinstance(input, Float8Tensor) or isinstance(weight, Float8Tensor)
    return plan.of_float8_operands if is_float8 and plan.of_float8_operands else plan


def _first_use(
    key: str, device: torch.device, dtype: torch.dtype, grouped: bool, compiling: bool
) -> LinearPlan:
    """Make a plan, and import the kernels that it names."""
    family = kernels.family_of(device)
    plan = plan_for(CONFIGS[key], family, dtype, grouped, compiling)
    casts = [cast for gemm in plan.gemms for cast in (gemm.a, gemm.b)]
    load_kernels(*[cast.kernel for cast in casts if cast is not None and cast.kernel])
    USED[key, device, dtype, grouped, compiling] = plan
    return plan


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
_first_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


def plan_for(
    config: Float8LinearConfig,
    family: str,
    dtype: torch.dtype,
    grouped: bool = False,
    compiling: bool = False,
    of_float8_operands: bool = False,
) -> LinearPlan:
    """The plan of a config on a device family, in a compute dtype.

    Args:
        config: of the layer.
        family: that of `float8.kernels.family_of`; no device of it need be here.
        dtype: of the operands before their casts.
        grouped: for the grouped GEMMs of experts.
        compiling: for code in which a compiler may fuse casts with the ops that make their
            operands.
        of_float8_operands: for calls with an operand that is in float8 already.
    """
    gemms, emulate, dequantizes = config.gemms, config.emulate, config.dequantize_in_backward
    # Gradients of smooth operands are multiplied by factors that float16 cannot hold.
    is_narrow = config.smooth_input and dtype == torch.float16
    grad_dtype = torch.float32 if is_narrow else dtype

    def gemm(asked: GemmCasts, out_dtype: torch.dtype, b_is_weight: bool = True) -> Gemm:
        a, b = [
            cast
            and cast_on(
                cast,
                family,
                emulate,
                groups=(EXPERTS if is_weight else TOKENS) if grouped else "",
                fuses=compiling and not grouped and not is_weight,
            )
            for cast, is_weight in ((asked.a, False), (asked.b, b_is_weight))
        ]
        is_fast = asked.use_fast_accum if grouped else bool(asked.use_fast_accum)
        if a is None or b is None:
            return Gemm(a, b, out_dtype, is_fast)
        are_powers = not of_float8_operands and _scales_are_powers_of_two(a, b)
        what = family, a.block, b.block, out_dtype, emulate
        if grouped:
            is_e4m3 = a.dtype == b.dtype == torch.float8_e4m3fn
            name, refusal = kernels.grouped_gemm_for(*what, is_e4m3, are_powers)
        else:
            name, refusal = kernels.gemm_for(*what, are_powers)
        align = kernels.group_alignment(name) if grouped else 1
        on_gpu = name not in ("", kernels.PLAIN_PYTORCH)
        if grouped and on_gpu and dequantizes and a.scale_format.is_e8m0:
            name, refusal = "", _NO_DEQUANTIZED_MX_GROUPS
        is_swizzled = on_gpu and not dequantizes
        a, b = replace(a, swizzled=is_swizzled), replace(b, swizzled=is_swizzled)
        pad, multiple = config.pad_inner_dim, 1
        if on_gpu and not pad and (grouped or kernels.is_aligned(name)):
            multiple = multiple_of(a, grouped)
        return Gemm(a, b, out_dtype, is_fast, name, refusal, align, pad, multiple)

    output = gemm(gemms.output, dtype)
    grad_input = gemm(gemms.grad_input, grad_dtype)
    grad_weight = gemm(gemms.grad_weight, grad_dtype, b_is_weight=False)

    def operand(
        first: OperandCast | None, second: OperandCast | None, is_weight: bool = False
    ) -> Operand:
        if dequantizes and first is not None:
            return Operand(first, first.transposed())
        if is_weight or not grouped:
            return Operand(first, second, may_view=first is None or first.kernel is None)
        align = grad_weight.align  # the only GEMM that reads transposed tokens
        return Operand(first, second, align, may_view=align == 1)

    plan = LinearPlan(
        *(output, grad_input, grad_weight),
        x=operand(output.a, grad_weight.b),
        w=operand(output.b, grad_input.b, is_weight=True),
        g=operand(grad_input.a, grad_weight.a),
        dtype=dtype,
        smooth_input=config.smooth_input,
        mxfp4_weights=config.mxfp4_weights,
        is_grouped=grouped,
        on_gpu=family != CPU and not emulate,
    )
    if any([needs_power_of_two_scales(gemm.name) for gemm in plan.gemms]):
        plan.of_float8_operands = plan_for(config, family, dtype, grouped, compiling, True)
    return plan


def multiple_of(cast: OperandCast, grouped: bool) -> int:
    """Of what number the contraction of a GEMM and the columns of its result are multiples."""
    return 32 if grouped and cast.block[-1] == 32 else ALIGNMENT


def _scales_are_powers_of_two(*casts: OperandCast) -> bool:
    """Whether all scales are, in float32, by their formats.

    Delayed ones need not be: they may come from a checkpoint.
    """
    formats = {None if cast.is_delayed else cast.scale_format for cast in casts}
    return formats == {ScaleFormat.POWER_OF_TWO}


def rounded(w: Tensor, plan: LinearPlan) -> Tensor:
    """A weight as it is cast, in the compute dtype; a smooth one has been rounded before."""
    if plan.smooth_input:
        return w
    w = w.to(plan.dtype)
    return mxfp4.project(w) if plan.mxfp4_weights else w


def cast_on(
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
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else input.dtype
