"""The three GEMMs that a config means, and which casts of them are one.

Every operand is stated in the orientation in which its GEMM reads it. A second use with no config
of its own takes the first one's, in its own orientation: rowwise stays one scale per row of what
that GEMM reads. ``None`` in place of an `OperandCast` means high precision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from float8.arguments import check_bool
from float8.config.casts import OperandCast
from float8.formats import E5M2, Format, ScaleFormat
from float8.granularity import WHOLE


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM runs.

    Args:
        use_fast_accum: accumulate in the tensor core's reduced-precision accumulator instead of
            promoting partial sums to float32 (a Hopper option). Products whose scales change along
            the contraction (blockwise) are promoted at each change, so they have no such option
            and ignore it, as the plan shows. The reference path ignores it too.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        check_bool(self.use_fast_accum, "use_fast_accum")


@dataclass(slots=True, unsafe_hash=True)
class Gemm:
    """One product ``a @ b.T``.

    Args:
        a, b: the casts of the operands; both None where the product is in high precision. With
            ``emulate`` one may be: the other is dequantised to the compute dtype.
        use_fast_accum: see `GemmConfig`.
        name: on a device, the GEMM that multiplies, see `float8.kernels.gemm_for`.
        refusal: the reason why no GEMM of the device multiplies, or None.
        out_dtype: the dtype of the result.
        align: of a grouped GEMM, the multiple to which it needs groups of tokens padded.
        pad: see `LinearPlan`.

    Attributes:
        has_power_of_two_scales: whether the scales of both operands are float32 powers of
            two, by their format. Delayed ones need not be: they may come from a checkpoint.
    """

    a: OperandCast | None
    b: OperandCast | None
    use_fast_accum: bool = False
    name: str = field(default="", repr=False)
    refusal: str | None = field(default=None, repr=False)
    out_dtype: torch.dtype = field(default=torch.float32, repr=False)
    align: int = field(default=1, repr=False)
    pad: bool = field(default=False, repr=False)

    @property
    def has_power_of_two_scales(self) -> bool:
        """See the class."""
        casts = [cast for cast in (self.a, self.b) if cast is not None]
        formats = {None if cast.is_delayed else cast.scale_format for cast in casts}
        return formats == {ScaleFormat.POWER_OF_TWO}


@dataclass(slots=True, unsafe_hash=True)
class Operand:
    """The two casts of an operand, each stated in the orientation of the GEMM that reads it.

    Args:
        first: for the GEMM that sums over each row of the operand; None for high precision.
        second: for the GEMM that sums over each column, stated for the transpose; or None.
        align: the multiple to which the transposed orientation of tokens pads each group.

    Attributes:
        is_same: whether both casts are alike, each in its own orientation: one op makes both.
        is_shared: whether the second GEMM reads the transpose of the first GEMM's data.
    """

    first: OperandCast | None
    second: OperandCast | None
    align: int = 1
    is_same: bool = field(init=False)
    is_shared: bool = field(init=False)

    def __post_init__(self) -> None:
        first, second = self.first, self.second
        is_cast = first is not None and second is not None
        self.is_same = is_cast and first == second
        self.is_shared = is_cast and first.transposed() == second  # type: ignore[union-attr]


_MX = ((1, 32), (32, 32))
GEMM_NAMES = ("output", "grad_input", "grad_weight")


@dataclass(slots=True, unsafe_hash=True)
class LinearPlan:
    """The three GEMMs of a layer and their casts: what a config asks for.

    `float8.linear.plan.plan_for` completes it for a device and a compute dtype: the last three
    arguments, and its casts and GEMMs. For M tokens, K input features and N output features:

    Args:
        output: a = x_MK, b = w_NK.
        grad_input: a = g_MN, b = w_KN.
        grad_weight: a = g_NM, b = x_KM.
        smooth_input: x and w are multiplied by factors, see `float8.linear.smoothing`.
        emulate: plain PyTorch casts and multiplies on every device.
        pad: sizes that are no multiple of 16 are padded where a GEMM needs it.
        mxfp4_weights: w is rounded to MXFP4 before its casts, see `float8.kernels.mxfp4`.
        dequantizes: the other two GEMMs read the dequantised operands of the output's.
        dtype: the compute dtype, of the operands before their casts and of the results.
        is_grouped: whether the GEMMs multiply groups of tokens with experts.
        on_gpu: whether tensor cores multiply.
        given: the plan of a call with an operand that is in float8 already, whose scales may be any
            numbers, where its products are others; else None.

    Attributes:
        gemms: the three GEMMs, in the order of `GEMM_NAMES`.
        x, w, g: the casts of input, weight and grad_output.
        has_delayed: whether any cast is delayed.
        is_tiled: whether some scale serves a block, neither one element nor a whole dimension.
            MXFP4 weights have such scales.
    """

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    smooth_input: bool = False
    emulate: bool = False
    pad: bool = False
    mxfp4_weights: bool = False
    dequantizes: bool = False
    dtype: torch.dtype = field(default=torch.float32, repr=False)
    is_grouped: bool = field(default=False, repr=False)
    on_gpu: bool = field(default=False, repr=False)
    given: LinearPlan | None = field(default=None, repr=False, compare=False)
    gemms: tuple[Gemm, Gemm, Gemm] = field(init=False, repr=False, compare=False)
    x: Operand = field(init=False, repr=False, compare=False)
    w: Operand = field(init=False, repr=False, compare=False)
    g: Operand = field(init=False, repr=False, compare=False)
    has_delayed: bool = field(init=False, repr=False, compare=False)
    is_tiled: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        output, grad_input, grad_weight = self.output, self.grad_input, self.grad_weight
        align = grad_weight.align  # the only GEMM that reads transposed tokens
        self.x = Operand(output.a, grad_weight.b, align)
        self.w = Operand(output.b, grad_input.b)
        self.g = Operand(grad_input.a, grad_weight.a, align)
        self.gemms = output, grad_input, grad_weight
        casts = [c for gemm in self.gemms for c in (gemm.a, gemm.b) if c is not None]
        self.has_delayed = any(cast.is_delayed for cast in casts)
        extents = [extent for cast in casts for extent in cast.block]
        self.is_tiled = self.mxfp4_weights or any(extent not in (1, WHOLE) for extent in extents)


_OR = "or set emulate=True to run them in plain PyTorch"


def gemm(
    names: tuple[str, str, str],
    a: OperandCast | None,
    b: OperandCast | None,
    config: GemmConfig,
    emulate: bool,
) -> Gemm:
    """The product of two resolved casts; ValueError if no hardware multiplies the two.

    ``names`` are the product's and the fields of its two operands, for the message. With
    ``emulate`` any two are multiplied.
    """
    if not emulate:
        _check_hardware(names, a, b)
    has_fast_accum = a is None or b is None or a.block[1] == b.block[1] == WHOLE
    return Gemm(a, b, config.use_fast_accum and has_fast_accum)


def _check_hardware(
    names: tuple[str, str, str], a: OperandCast | None, b: OperandCast | None
) -> None:
    product, name_a, name_b = names
    for name, cast in ((name_a, a), (name_b, b)):
        if cast is not None and (cast.block in _MX) != cast.scale_format.is_e8m0:
            raise ValueError(
                f"the {product} GEMM has blocks {cast.block} with {cast.scale_format} ({name}), "
                "which no hardware multiplies: give Blockwise(1, 32) or (32, 32) with "
                "ScaleFormat.E8M0 (OCP MX), another granularity with FLOAT32 or POWER_OF_TWO, "
                f"{_OR}"
            )
    if (a is None) != (b is None):
        off, on = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(
            f"the {product} GEMM has one operand in high precision ({off}) and one in float8 "
            f"({on}); no hardware multiplies the two. Disable both, give {off} a float8 cast, {_OR}"
        )
    if a is not None and b is not None and _is_e5m2(a.format) and _is_e5m2(b.format):
        raise ValueError(
            f"the {product} GEMM would multiply E5M2 by E5M2 ({name_a}, {name_b}), which no "
            f"hardware does; set target_dtype=torch.float8_e4m3fn for one of them, {_OR}"
        )


def _is_e5m2(fmt: Format) -> bool:
    return fmt.name.startswith(E5M2.name)
