"""How one operand becomes float8: the config of a cast, and the resolved cast.

A `CastConfig` speaks of an operand. `CastConfig.resolve` states it for a matrix in the orientation
of the GEMM that reads it (last dimension = contraction), with nothing left to a default.
"""

from __future__ import annotations

import enum
import math
import numbers
from dataclasses import dataclass, field, replace

import torch

from float8.arguments import check_bool, check_integer, check_kind
from float8.formats import Format, ScaleFormat, format_of
from float8.granularity import WHOLE, Block, Blockwise, Granularity, Tensorwise, transpose_block

MAX_MARGIN = 32
"""The largest magnitude of `DelayedScalingConfig.margin`, far above any format's headroom."""


class ScalingType(enum.Enum):
    """The source of the scale of a cast.

    Attributes:
        DYNAMIC: the amax of the tensor that is cast.
        DELAYED: the amaxes of past steps (arXiv 2209.05433 and TransformerEngine).
        STATIC: a constant that the user gives.
        DISABLED: none; the operand is not cast, and its GEMM runs in high precision.
    """

    DYNAMIC = "dynamic"
    DELAYED = "delayed"
    STATIC = "static"
    DISABLED = "disabled"


@dataclass(frozen=True)
class CastConfig:
    """How one operand becomes float8.

    Args:
        scaling_type: see `ScalingType`. Delayed and static scales are tensorwise.
        granularity: which elements share a scale, in GEMM-operand orientation.
        target_dtype: a float8 dtype; None is E4M3 for input and weight, E5M2 for grad_output.
        scale_format: which numbers scales may be, see `ScaleFormat`. E8M0 scales are those of
            ``Blockwise(1, 32)`` and ``Blockwise(32, 32)``, which take no others but with
            ``emulate=True``: together they are an MX format.
        static_scale: with ``STATIC`` only: the dequantisation scale, ``value = data * scale``. AMD
            gfx94x, whose formats store half of the value, casts with twice the scale.

    Raises:
        TypeError: a field is of another type, such as torchao's enums.
        ValueError: the fields contradict each other; the message says which and what to set.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    granularity: Granularity = Tensorwise()
    target_dtype: torch.dtype | None = None
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    static_scale: float | None = None

    def __post_init__(self) -> None:
        check_kind("scaling_type", self.scaling_type, ScalingType)
        check_kind("granularity", self.granularity, Granularity)
        check_kind("scale_format", self.scale_format, ScaleFormat)
        if self.target_dtype is not None:
            format_of(self.target_dtype)
        kind = self.scaling_type
        is_static, is_e8m0 = kind is ScalingType.STATIC, self.scale_format.is_e8m0
        is_kept = is_static or kind is ScalingType.DELAYED
        if is_kept and (self.granularity != Tensorwise() or is_e8m0):
            raise ValueError(
                f"{kind.value} scaling keeps one float32 scale per tensor, got granularity "
                f"{self.granularity} and {self.scale_format}; use Tensorwise() and FLOAT32 or "
                "POWER_OF_TWO, or ScalingType.DYNAMIC"
            )
        if is_static != (self.static_scale is not None):
            raise ValueError(
                f"static_scale={self.static_scale}, and this is {kind}: ScalingType.STATIC needs a "
                "static_scale, such as 8 / 448 for values up to 8 in E4M3, and no other has one"
            )
        if self.static_scale is not None:
            self._check_static_scale(self.static_scale)

    def _check_static_scale(self, scale: float) -> None:
        check_kind("static_scale", scale, numbers.Real)
        float32 = torch.finfo(torch.float32)
        if not float32.tiny <= scale <= float32.max:  # or its reciprocal is infinite
            raise ValueError(
                "static_scale must be a float32 that is finite and > 0 (at least 2^-126), got "
                f"{scale}"
            )
        if self.scale_format is not ScaleFormat.FLOAT32 and math.frexp(scale)[0] != 0.5:
            raise ValueError(
                f"scale_format={self.scale_format}, and static_scale={scale} is no power of two"
            )

    def resolve(self, default_format: Format) -> OperandCast | None:
        """This cast of a matrix, in GEMM-operand orientation; None where it is disabled.

        Args:
            default_format: taken where ``target_dtype`` is None.
        """
        if self.scaling_type is ScalingType.DISABLED:
            return None
        return OperandCast(
            scaling_type=self.scaling_type,
            format=format_of(self.target_dtype or default_format),
            block=self.granularity.block_of((0, 0)),
            scale_format=self.scale_format,
            static_scale=None if self.static_scale is None else repr(float(self.static_scale)),
        )

    @property
    def summary(self) -> str:
        """A few characters for ``print(model)``, such as ``dynamic rowwise e4m3 pow2``."""
        if self.scaling_type is ScalingType.DISABLED:
            return "high precision"
        granularity = type(self.granularity).__name__.lower()
        if isinstance(self.granularity, Blockwise):
            granularity = f"{self.granularity.rows}x{self.granularity.cols}"
        dtype = format_of(self.target_dtype).name if self.target_dtype else "default"
        parts = [self.scaling_type.value, granularity, dtype]
        if self.scale_format is not ScaleFormat.FLOAT32:
            parts.append(_SHORT.get(self.scale_format, self.scale_format.value))
        if self.static_scale is not None:
            parts.append(f"scale={self.static_scale:g}")
        return " ".join(parts)


_SHORT = {ScaleFormat.POWER_OF_TWO: "pow2"}


# Not frozen, as the other parts of a plan: torch.compile of torch 2.11 reads all fields of a frozen
# dataclass, and would guard on members of an enum, which it cannot for a constant.
@dataclass(slots=True, unsafe_hash=True)
class OperandCast:
    """One resolved cast: a matrix in GEMM-operand orientation becomes ``(data, scale)``.

    Nothing changes it after its construction.

    `float8.linear.plan.cast_on` completes it for a device: ``kernel`` and ``swizzled``, the
    format's twin on AMD gfx94x with its static scale, and the block of experts.

    Args:
        scaling_type: the source of the scale.
        format: the float8 format.
        block: the extent per dimension that shares a scale; -1 is the whole dimension. Of experts
            (E, N, K), after a 1.
        scale_format: which numbers scales may be.
        static_scale: the digits of a float, or None. torch.compile makes an input of every float
            that it meets where shapes are dynamic, which in a backward it cannot (torch 2.13).
        kernel: the Triton kernel, a file of `float8.kernels.gpu`; None for plain PyTorch.
        swizzled: whether tensor cores read the scales, for which E8M0 ones are swizzled.

    Attributes:
        dtype, largest: of the format, its dtype and largest finite value.
        scales: the value of ``scale_format``. (torch.compile guards on members of an enum.)
        static: the static scale as a float.
        is_whole: whether one scale serves the whole matrix.
        is_delayed: whether its scale follows from past steps.
    """

    scaling_type: ScalingType
    format: Format
    block: Block
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    static_scale: str | None = None
    # Two casts of one operand may differ in these, and write the same bytes.
    kernel: str | None = field(default=None, repr=False, compare=False)
    swizzled: bool = field(default=False, repr=False, compare=False)
    # Read at each call, so computed once.
    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    largest: float = field(init=False, repr=False, compare=False)
    scales: str = field(init=False, repr=False, compare=False)
    static: float | None = field(init=False, repr=False, compare=False)
    is_whole: bool = field(init=False, repr=False, compare=False)
    is_delayed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.dtype, self.largest = self.format.dtype, self.format.max
        self.scales = self.scale_format.value
        self.static = None if self.static_scale is None else float(self.static_scale)
        self.is_whole = self.block[-2:] == (WHOLE, WHOLE)
        self.is_delayed = self.scaling_type is ScalingType.DELAYED

    def transposed(self) -> OperandCast:
        """The same cast, stated for the matrix's transpose."""
        return replace(self, block=(*self.block[:-2], *transpose_block(self.block[-2:])))


@dataclass(frozen=True)
class DelayedScalingConfig:
    """How delayed scales are computed from the history of amaxes.

    Args:
        history_len: how many steps are remembered.
        amax_compute_algo: ``"max"`` over the history, or its ``"most_recent"`` entry.
        margin: the amax is multiplied by ``2**margin`` before the scale is computed.
        remember_nonfinite: an amax that is not finite enters the history, as infinity, and no scale
            changes for as long as it counts: ``history_len`` steps under ``"max"``, one under
            ``"most_recent"``. That is TransformerEngine's rule. False enters 0 in its place, so
            that scales follow the other steps.

    Raises:
        TypeError, ValueError: a value of another type, or out of its range.
    """

    history_len: int = 16
    amax_compute_algo: str = "max"
    margin: int = 0
    remember_nonfinite: bool = False

    def __post_init__(self) -> None:
        check_integer(self.history_len, "history_len", 1)
        check_integer(self.margin, "margin", -MAX_MARGIN)
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}"
            )
        if self.margin > MAX_MARGIN:
            raise ValueError(f"margin must be within {MAX_MARGIN} of 0, got {self.margin}")
        check_bool(self.remember_nonfinite, "remember_nonfinite")
