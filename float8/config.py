"""What a user says about a float8 linear layer, and the one place where it is resolved.

A linear layer is three GEMMs of two casts each (M tokens, K in, N out features)::

    output_MN      = x_MK @ w_NK.T        contraction K
    grad_input_MK  = g_MN @ w_KN.T        contraction N
    grad_weight_NK = g_NM @ x_KM.T        contraction M

`Float8LinearConfig` speaks of operands (input, weight, grad_output), each of which is used twice.
`Float8LinearConfig.plan` resolves it into three `Gemm`, each with the `OperandCast` of its two
operands, stated in the orientation of that GEMM (last dimension = contraction). A second use with
no config of its own takes the first one's, in its own orientation: rowwise stays one scale per row
of what that GEMM reads. ``None`` in place of an `OperandCast` means high precision.

`RECIPES` is the table of ready-made configs; a new recipe is one row. Everything is frozen:
``dataclasses.replace`` makes a variant, nothing is inherited or changed behind the user's back.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

import torch

from float8.formats import E4M3, E5M2, Format, format_of
from float8.granularity import (
    Block,
    Blockwise,
    Granularity,
    Rowwise,
    Tensorwise,
    transpose_block,
)

MAX_MARGIN = 32  # far more than any format's headroom


class ScalingType(enum.Enum):
    """How the scale of a cast is found."""

    DYNAMIC = "dynamic"  # from the amax of the tensor that is cast
    DELAYED = "delayed"  # from the amaxes of past steps (arXiv 2209.05433 and TransformerEngine)
    STATIC = "static"  # a constant given by the user
    DISABLED = "disabled"  # not cast: the GEMM runs in high precision


@dataclass(frozen=True)
class CastConfig:
    """How one operand becomes float8.

    Args:
        scaling_type: see `ScalingType`. Delayed and static scales are tensorwise.
        granularity: which elements share a scale, in GEMM-operand orientation.
        target_dtype: a float8 dtype; None is E4M3 for input and weight, E5M2 for grad_output.
        power_of_two_scale: round scales up to a power of two, so that scaling is exact and
            nothing saturates.
        static_scale: with ``STATIC`` only: the dequantisation scale, ``value = data * scale``.

    Raises:
        TypeError: ``target_dtype`` is not a float8 dtype.
        ValueError: the fields contradict each other; the message says which and what to set.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    granularity: Granularity = Tensorwise()
    target_dtype: torch.dtype | None = None
    power_of_two_scale: bool = False
    static_scale: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scaling_type, ScalingType):
            raise TypeError(f"scaling_type must be a ScalingType, got {self.scaling_type!r}")
        if not isinstance(self.granularity, Granularity):
            raise TypeError(f"granularity must be a Granularity, got {self.granularity!r}")
        if self.target_dtype is not None:
            format_of(self.target_dtype)
        if self.scaling_type in (ScalingType.DELAYED, ScalingType.STATIC):
            self._check_tensorwise()
        self._check_static_scale()

    def _check_tensorwise(self) -> None:
        if self.granularity != Tensorwise():
            raise ValueError(
                f"{self.scaling_type.value} scaling keeps one scale per tensor, got granularity "
                f"{self.granularity}; use Tensorwise() or ScalingType.DYNAMIC"
            )

    def _check_static_scale(self) -> None:
        is_static = self.scaling_type is ScalingType.STATIC
        if is_static != (self.static_scale is not None):
            raise ValueError(
                f"static_scale={self.static_scale} with {self.scaling_type}: static_scale belongs "
                "to ScalingType.STATIC, and to it alone"
            )
        if self.static_scale is None:
            return
        float32 = torch.finfo(torch.float32)
        if not float32.tiny <= self.static_scale <= float32.max:  # or its reciprocal is infinite
            raise ValueError(
                "static_scale must be a float32 that is finite and > 0 (at least 2^-126), got "
                f"{self.static_scale}"
            )
        if self.power_of_two_scale and math.frexp(self.static_scale)[0] != 0.5:
            raise ValueError(f"power_of_two_scale is set, static_scale={self.static_scale} is not")

    def resolve(self, default_format: Format) -> OperandCast | None:
        """This cast of a matrix, in GEMM-operand orientation; None where it is disabled."""
        if self.scaling_type is ScalingType.DISABLED:
            return None
        return OperandCast(
            scaling_type=self.scaling_type,
            format=format_of(self.target_dtype or default_format),
            block=self.granularity.block_of((0, 0)),
            power_of_two_scale=self.power_of_two_scale,
            static_scale=None if self.static_scale is None else repr(float(self.static_scale)),
        )

    @property
    def short_str(self) -> str:
        """A few characters for ``print(model)``, such as ``dynamic rowwise e4m3 pow2``."""
        if self.scaling_type is ScalingType.DISABLED:
            return "high precision"
        granularity = type(self.granularity).__name__.lower()
        if isinstance(self.granularity, Blockwise):
            granularity = f"{self.granularity.rows}x{self.granularity.cols}"
        dtype = format_of(self.target_dtype).name if self.target_dtype else "default"
        parts = [self.scaling_type.value, granularity, dtype]
        if self.power_of_two_scale:
            parts.append("pow2")
        if self.static_scale is not None:
            parts.append(f"scale={self.static_scale:g}")
        return " ".join(parts)


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM runs.

    Args:
        use_fast_accum: accumulate in the tensor core's reduced-precision accumulator instead of
            promoting partial sums to float32 (a Hopper option). The reference path has no such
            accumulator and ignores it.
    """

    use_fast_accum: bool = False


@dataclass(frozen=True)
class DelayedScalingConfig:
    """How delayed scales follow from the history of amaxes.

    Args:
        history_len: how many steps are remembered.
        amax_compute_algo: ``"max"`` over the history, or its ``"most_recent"`` entry.
        margin: the amax is multiplied by ``2**margin`` before the scale is computed.
    """

    history_len: int = 16
    amax_compute_algo: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.history_len, int) or self.history_len < 1:
            raise ValueError(f"history_len must be an integer >= 1, got {self.history_len!r}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}"
            )
        if not isinstance(self.margin, int) or abs(self.margin) > MAX_MARGIN:
            raise ValueError(
                f"margin is an exponent of two, an integer within {MAX_MARGIN} of 0, "
                f"got {self.margin!r}"
            )


@dataclass(frozen=True)
class OperandCast:
    """One resolved cast: a matrix in GEMM-operand orientation becomes ``(data, scale)``.

    ``static_scale`` is the digits of a float: torch.compile makes an input of every float that it
    meets where shapes are dynamic, which in a backward it cannot (torch 2.13).
    """

    scaling_type: ScalingType
    format: Format
    block: Block
    power_of_two_scale: bool = False
    static_scale: str | None = None

    def transposed(self) -> OperandCast:
        """The same cast, stated for the matrix's transpose."""
        return replace(self, block=transpose_block(self.block))


@dataclass(frozen=True)
class Gemm:
    """One product ``a @ b.T``; a cast of None means that both operands stay in high precision."""

    a: OperandCast | None
    b: OperandCast | None
    use_fast_accum: bool = False


@dataclass(frozen=True)
class LinearPlan:
    """The three GEMMs of a layer, and which second uses share the first use's bytes."""

    output: Gemm  # a = x_MK, b = w_NK
    grad_input: Gemm  # a = g_MN, b = w_KN
    grad_weight: Gemm  # a = g_NM, b = x_KM
    reuses_input: bool  # x_KM of grad_weight is the transpose of the float8 x_MK of output
    reuses_weight: bool  # w_KN of grad_input is the transpose of the float8 w_NK of output
    reuses_grad_output: bool  # g_NM of grad_weight is the transpose of grad_input's g_MN


def _same_bytes(first: OperandCast | None, second: OperandCast | None) -> bool:
    return first is not None and second is not None and first.transposed() == second


@dataclass(frozen=True)
class Float8LinearConfig:
    """The configuration of a `Float8Linear`.

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: the casts of the operands.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input,
            cast_config_grad_output_for_grad_weight: overrides for an operand's second use; None
            takes the operand's own cast.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: the GEMMs.
        delayed_scaling: for operands with ``ScalingType.DELAYED``.
        enable_fsdp_float8_all_gather: see ``float8.distributed.gathered_weights``.
        pad_inner_dim: pad dimensions that are no multiple of 16 with zeros, on devices whose GEMM
            needs it, instead of refusing.
        emulate: run the reference path on every device.
        enable_amax_init: delayed casts use the dynamic scale until the first ``sync``; False
            starts from a scale of 1, as TransformerEngine does.
        enable_pre_and_post_forward: check dtype, shape and device support at each call; False
            leaves bad input to the kernels' own errors, for the least Python overhead.

    Attributes:
        plan: the three GEMMs and their casts.
        uses_delayed_scaling: whether any operand keeps an amax history, so that ``sync`` must be
            called.

    Raises:
        ValueError: a GEMM that no hardware runs: one operand in float8 and the other not, or E5M2
            for both; or a delayed second use that is not the first. The message names the GEMM,
            its two fields, and what to set.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_weight: CastConfig = CastConfig()
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: GemmConfig = GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: GemmConfig = GemmConfig()
    gemm_config_grad_weight: GemmConfig = GemmConfig()
    delayed_scaling: DelayedScalingConfig = DelayedScalingConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    enable_amax_init: bool = True
    enable_pre_and_post_forward: bool = True
    # What all of this means, computed once: the layer reads it at every call.
    plan: LinearPlan = field(init=False, repr=False, compare=False)
    uses_delayed_scaling: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_second_uses()
        object.__setattr__(self, "plan", self._resolve())
        casts = (self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output)
        delayed = any(c.scaling_type is ScalingType.DELAYED for c in casts)
        object.__setattr__(self, "uses_delayed_scaling", delayed)

    @classmethod
    def from_recipe_name(cls, name: str) -> Float8LinearConfig:
        """The config of a row of `RECIPES`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        if name not in RECIPES:
            raise ValueError(f"unknown recipe {name!r}; known recipes: {', '.join(RECIPES)}")
        return RECIPES[name]

    def _resolve(self) -> LinearPlan:
        x, w, g = self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output
        output = _gemm(
            ("output", "cast_config_input", "cast_config_weight"),
            x.resolve(E4M3),
            w.resolve(E4M3),
            self.gemm_config_output,
        )
        grad_input = _gemm(
            ("grad_input", "cast_config_grad_output", "cast_config_weight_for_grad_input"),
            g.resolve(E5M2),
            (self.cast_config_weight_for_grad_input or w).resolve(E4M3),
            self.gemm_config_grad_input,
        )
        grad_weight = _gemm(
            (
                "grad_weight",
                "cast_config_grad_output_for_grad_weight",
                "cast_config_input_for_grad_weight",
            ),
            (self.cast_config_grad_output_for_grad_weight or g).resolve(E5M2),
            (self.cast_config_input_for_grad_weight or x).resolve(E4M3),
            self.gemm_config_grad_weight,
        )
        return LinearPlan(
            output,
            grad_input,
            grad_weight,
            reuses_input=_same_bytes(output.a, grad_weight.b),
            reuses_weight=_same_bytes(output.b, grad_input.b),
            reuses_grad_output=_same_bytes(grad_input.a, grad_weight.a),
        )

    def _check_second_uses(self) -> None:
        # A history belongs to an operand, and an operand has one: that of its first use.
        for operand, second_name in (
            ("input", "cast_config_input_for_grad_weight"),
            ("weight", "cast_config_weight_for_grad_input"),
            ("grad_output", "cast_config_grad_output_for_grad_weight"),
        ):
            first = _checked(f"cast_config_{operand}", getattr(self, f"cast_config_{operand}"))
            if getattr(self, second_name) is None:
                continue
            second = _checked(second_name, getattr(self, second_name))
            if second != first and second.scaling_type is ScalingType.DELAYED:
                raise ValueError(
                    f"{second_name}: a delayed second use must be the cast of the first use "
                    f"(cast_config_{operand} is '{first.short_str}'); leave it None, or make it "
                    "dynamic, static or disabled"
                )


def _checked(name: str, value: object) -> CastConfig:
    if not isinstance(value, CastConfig):
        raise TypeError(f"{name} must be a CastConfig, got {value!r}")
    return value


def _gemm(
    names: tuple[str, str, str], a: OperandCast | None, b: OperandCast | None, config: GemmConfig
) -> Gemm:
    gemm, name_a, name_b = names
    if (a is None) != (b is None):
        off, on = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(
            f"the {gemm} GEMM has one operand in high precision ({off}) and one in float8 ({on}); "
            f"no hardware multiplies the two. Disable both, or give {off} a float8 cast"
        )
    if a is not None and b is not None and _is_e5m2(a.format) and _is_e5m2(b.format):
        raise ValueError(
            f"the {gemm} GEMM would multiply E5M2 by E5M2 ({name_a}, {name_b}), which no hardware "
            "does; set target_dtype=torch.float8_e4m3fn for one of them"
        )
    return Gemm(a, b, config.use_fast_accum)


def _is_e5m2(fmt: Format) -> bool:
    return fmt.name.startswith(E5M2.name)


def _recipes() -> dict[str, Float8LinearConfig]:
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    delayed = CastConfig(scaling_type=ScalingType.DELAYED)
    row = CastConfig(granularity=Rowwise(), target_dtype=E4M3.dtype, power_of_two_scale=True)
    pow2 = CastConfig(power_of_two_scale=True)
    one = CastConfig(scaling_type=ScalingType.STATIC, static_scale=1.0)
    by_1x128 = replace(row, granularity=Blockwise(1, 128))
    by_128x128 = replace(row, granularity=Blockwise(128, 128))
    return {
        "tensorwise": Float8LinearConfig(),
        "delayed": Float8LinearConfig(delayed, delayed, delayed),
        "rowwise": Float8LinearConfig(row, row, row),
        "rowwise_with_gw_hp": Float8LinearConfig(
            row,
            row,
            row,
            cast_config_weight_for_grad_input=pow2,
            cast_config_input_for_grad_weight=off,
            cast_config_grad_output_for_grad_weight=off,
        ),
        "blockwise": Float8LinearConfig(
            by_1x128,
            by_128x128,
            by_1x128,
            gemm_config_output=GemmConfig(),  # DeepSeek-V3 promotes every partial sum
        ),
        "unit": Float8LinearConfig(one, one, one),  # for unit-scaled models
    }


RECIPES: dict[str, Float8LinearConfig] = _recipes()
