"""The configuration of a layer: six casts and three GEMMs, checked and resolved at construction.

`RECIPES` is the table of ready-made configs; a new recipe is one row.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from float8.arguments import check_bool, check_kind, described, did_you_mean
from float8.config.casts import CastConfig, DelayedScalingConfig, OperandCast, ScalingType
from float8.config.gemms import GemmCasts, GemmConfig, ThreeGemms, check_hardware
from float8.formats import E4M3, E5M2, ScaleFormat
from float8.granularity import WHOLE, Blockwise, Rowwise, Tensorwise

CONFIGS: dict[str, Float8LinearConfig] = {}  # a config of each `Float8LinearConfig.key`
# The cast of an operand -> that of the same operand where another GEMM reads it.
SECOND_USES = {
    "cast_config_input": "cast_config_input_for_grad_weight",
    "cast_config_weight": "cast_config_weight_for_grad_input",
    "cast_config_grad_output": "cast_config_grad_output_for_grad_weight",
}


@dataclass(frozen=True)
class Float8LinearConfig:
    """The configuration of a `Float8Linear`.

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: the casts of the operands.
        cast_config_input_for_grad_weight: the cast of the input where it is read a second time,
            for the weight's gradient; None takes ``cast_config_input``.
        cast_config_weight_for_grad_input: the same of the weight, for the input's gradient.
        cast_config_grad_output_for_grad_weight: the same of the output's gradient, for the
            weight's gradient.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: the GEMMs.
        delayed_scaling: for operands with ``ScalingType.DELAYED``.
        enable_fsdp_float8_all_gather: under FSDP2, gather weights as float8 where both GEMMs read
            one cast of them; the report of the conversion names the others.
        smooth_input: multiply channel k of the input by s_k before its cast, and column k of the
            weight by ``1 / s_k``, so that channels with outliers take no precision from the others
            (Smooth-SwiGLU, arXiv 2409.12517, section 4.4): ``Q(x * s) @ Q(w / s).T``. The gradients
            are ``(g @ Q(w / s)) * s`` and ``(g.T @ Q(x * s)) / s``. s_k is the power of two that
            brings the amax of the channel, in this call, into (0.5, 1]. For layers that read a
            gate, such as ``down_proj``. Input and weight are cast by tensor or row. The weight's
            cast is dynamic, because its columns change with each input. In bfloat16 on a GPU, a
            step moves more bytes per element: 6 of the input, 4 of the input's gradient, 8 of the
            weight and 4 of the weight's gradient.
        dequantize_in_backward: backward multiplies in high precision: grad_output, which is not
            cast, by the input and the weight that the output's GEMM multiplied, dequantised to the
            compute dtype. ``cast_config_grad_output`` is not used. The input is saved in float8.
        mxfp4_weights: round weights to MXFP4 before their casts, so that a checkpoint of packed
            MXFP4 weights has the weights that were trained: 4-bit E2M1 values with one E8M0 scale
            per 32 input features (OCP MX 1.0, sections 5.3.3 and 6.3; see `float8.kernels.mxfp4`).
            The gradient passes straight through to the high-precision weight, which
            ``high_precision(model)`` multiplies as it is. Casts of weights need scales that are
            powers of two. Dynamic ones keep the rounded values exactly if the scales of the MXFP4
            blocks in one block of the cast, blocks of zeros aside, differ by at most 2^14.
            Otherwise small values are rounded again, by at most 2^-18 of the amax.
        pad_inner_dim: pad dimensions that are no multiple of 16 with zeros, on devices whose GEMM
            needs it, instead of refusing. Conversion then takes layers of any sizes.
        emulate: run the reference path, plain PyTorch, on every device: products that no hardware
            runs too. They may be of any two formats, granularities and scale formats, or of one
            operand in float8 and one in high precision.
        enable_amax_init: delayed casts use dynamic scales in the first 16 steps, or ``history_len``
            if that is less: amaxes grow fastest at the start of a training. False starts from a
            scale of 1, as TransformerEngine does.
        enable_pre_and_post_forward: check dtype, shape and device support at each call; False
            leaves bad input to the kernels' own errors, for the least Python overhead.

    Attributes:
        gemms, key: for the library itself: the three GEMMs and their casts, and a string that is
            equal for configs with equal plans.
        uses_delayed_scaling: whether any operand keeps an amax history, so that ``sync`` must be
            called.

    Raises:
        TypeError: a field is of another type, or unknown; the message says what to write.
        ValueError: without ``emulate``, a GEMM that no hardware runs: one operand in float8 and the
            other not, E5M2 for both, or E8M0 scales of other blocks than an MX format's. A delayed
            second use beside another first one; settings of delayed scaling where no cast is
            delayed; ``smooth_input`` beside a cast that does not fit it; ``dequantize_in_backward``
            beside casts of second uses, ``smooth_input``, or an operand of the output in high
            precision; or ``mxfp4_weights`` beside float32 scales of weights, ``smooth_input`` or
            ``enable_fsdp_float8_all_gather``. The message names the fields and what to set.
    """

    cast_config_input: CastConfig = field(default_factory=CastConfig)
    cast_config_weight: CastConfig = field(default_factory=CastConfig)
    cast_config_grad_output: CastConfig = field(default_factory=CastConfig)
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: GemmConfig = field(default=GemmConfig(use_fast_accum=True))
    gemm_config_grad_input: GemmConfig = field(default_factory=GemmConfig)
    gemm_config_grad_weight: GemmConfig = field(default_factory=GemmConfig)
    delayed_scaling: DelayedScalingConfig = field(default_factory=DelayedScalingConfig)
    enable_fsdp_float8_all_gather: bool = False
    smooth_input: bool = False
    dequantize_in_backward: bool = False
    mxfp4_weights: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    enable_amax_init: bool = True
    enable_pre_and_post_forward: bool = True
    # Constructors from other libraries' configs, which `float8.integrations` adds: from_te_recipe
    # of transformer_engine.py, from_torchao of torchao.py.
    from_te_recipe: ClassVar[Callable[..., Float8LinearConfig]]
    from_torchao: ClassVar[Callable[[Any], Float8LinearConfig]]
    # What follows from these fields, computed once.
    gemms: ThreeGemms = field(init=False, repr=False, compare=False)
    uses_delayed_scaling: bool = field(init=False, repr=False, compare=False)
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_second_uses()
        if self.smooth_input:
            self._check_smooth_input()
        if self.mxfp4_weights:
            self._check_mxfp4_weights()
        gemms = self._resolve()
        is_off = gemms.output.a is None or gemms.output.b is None
        if self.dequantize_in_backward and (is_off or self.smooth_input):
            raise ValueError(
                "dequantize_in_backward=True reads the float8 input and weight of the output GEMM, "
                "and this config lacks one, or has smooth_input=True; leave it out"
            )
        delayed = any(c.scaling_type is ScalingType.DELAYED for c in self.operand_casts)
        key = repr((gemms, [getattr(self, flag) for flag in _FLAGS_OF_PLANS]))
        for name, value in (("gemms", gemms), ("uses_delayed_scaling", delayed), ("key", key)):
            object.__setattr__(self, name, value)
        CONFIGS.setdefault(key, self)
        if not delayed and self.delayed_scaling != DelayedScalingConfig():
            raise ValueError(
                f"delayed_scaling={self.delayed_scaling} is for casts with ScalingType.DELAYED, "
                "and none of this config's casts is delayed; give one that scaling_type, or leave "
                "delayed_scaling at its default"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies and pickles: resolves the casts anew."""
        names = {f.name for f in fields(self) if f.init}
        self.__init__(**{k: v for k, v in state.items() if k in names})  # type: ignore[misc]

    @property
    def operand_casts(self) -> tuple[CastConfig, ...]:
        """The configs of the casts of input, weight and grad_output that keep state.

        That of the first use, except where it alone is in high precision and the second is delayed.
        """
        if self.dequantize_in_backward:
            off = CastConfig(ScalingType.DISABLED)
            return self.cast_config_input, self.cast_config_weight, off
        # A delayed second use is the first one's cast too, unless that is disabled.
        casts = ((getattr(self, a), getattr(self, b)) for a, b in SECOND_USES.items())
        return tuple([b if b and b.scaling_type is ScalingType.DELAYED else a for a, b in casts])

    @classmethod
    def from_recipe_name(cls, name: str) -> Float8LinearConfig:
        """A copy of the config of a row of `RECIPES`, down to its casts and GEMMs.

        Args:
            name: such as ``"tensorwise"``.

        Raises:
            ValueError: unknown name; the message suggests the nearest and lists the known ones.
        """
        return deepcopy(check_config(name))

    def _resolve(self) -> ThreeGemms:
        def product(name: str, a: str, b: str) -> GemmCasts:
            names = name, f"cast_config_{a}", f"cast_config_{b}"
            casts = resolved(names[1]), resolved(names[2])
            if not self.emulate:
                check_hardware(names, *casts)
            is_fast = getattr(self, f"gemm_config_{name}").use_fast_accum
            has_blocks = any([cast is not None and cast.block[1] != WHOLE for cast in casts])
            return GemmCasts(*casts, False if has_blocks else is_fast)

        def resolved(name: str) -> OperandCast | None:
            cast: CastConfig = getattr(self, name) or getattr(self, name.partition("_for_")[0])
            return cast.resolve(E5M2 if "grad_output" in name else E4M3)

        output = product("output", "input", "weight")
        if self.dequantize_in_backward:
            return ThreeGemms(output, GemmCasts(None, None), GemmCasts(None, None))
        grad_input = product("grad_input", "grad_output", "weight_for_grad_input")
        second_uses = "grad_output_for_grad_weight", "input_for_grad_weight"
        return ThreeGemms(output, grad_input, product("grad_weight", *second_uses))

    def _check_types(self) -> None:
        for name in ("output", "grad_input", "grad_weight"):
            check_kind(f"gemm_config_{name}", getattr(self, f"gemm_config_{name}"), GemmConfig)
        check_kind("delayed_scaling", self.delayed_scaling, DelayedScalingConfig)
        for name in _FLAGS:
            check_bool(getattr(self, name), name)

    def _check_second_uses(self) -> None:
        # A history belongs to an operand, and an operand has one: that of its first float8 use.
        for first_name, second_name in SECOND_USES.items():
            first, second = getattr(self, first_name), getattr(self, second_name)
            check_kind(first_name, first, CastConfig)
            if second is None:
                continue
            check_kind(second_name, second, CastConfig)
            if self.dequantize_in_backward:
                raise ValueError(
                    f"{second_name}: with dequantize_in_backward=True backward casts nothing, and "
                    "reads what forward multiplied; leave it None"
                )
            is_delayed = second.scaling_type is ScalingType.DELAYED
            if is_delayed and first.scaling_type is not ScalingType.DISABLED and second != first:
                raise ValueError(
                    f"{second_name}: a delayed second use must be the cast of the first use "
                    f"({first_name} is '{first.summary}') unless that is disabled; "
                    "leave it None, or make it dynamic, static or disabled"
                )

    def _check_smooth_input(self) -> None:
        dynamic, delayed, off = ScalingType.DYNAMIC, ScalingType.DELAYED, ScalingType.DISABLED
        for name, known in (
            ("cast_config_input", (dynamic, delayed)),
            ("cast_config_weight", (dynamic,)),
            ("cast_config_input_for_grad_weight", (dynamic, delayed, off)),
            ("cast_config_weight_for_grad_input", (dynamic, off)),
        ):
            cast: CastConfig | None = getattr(self, name)
            if cast is None or (cast.scaling_type is off and off in known):
                continue
            fits = isinstance(cast.granularity, (Tensorwise, Rowwise))
            if fits and cast.scaling_type in known:
                continue
            raise ValueError(
                f"smooth_input=True, and {name} is '{cast.summary}': its factors are for inputs "
                "with dynamic or delayed scales and weights with dynamic ones, by tensor or row; "
                f"operands that no GEMM casts need none. Set {name}=CastConfig(), or leave "
                "smooth_input out"
            )
        if self.enable_fsdp_float8_all_gather:
            raise ValueError(
                "smooth_input=True multiplies factors into the weight before its cast, and "
                "enable_fsdp_float8_all_gather=True gathers a weight that is cast already; leave "
                "one of them out"
            )

    def _check_mxfp4_weights(self) -> None:
        if self.smooth_input or self.enable_fsdp_float8_all_gather:
            raise ValueError(
                "mxfp4_weights=True rounds a weight between its gather and its cast, which "
                "smooth_input=True and enable_fsdp_float8_all_gather=True change; leave them out"
            )
        for name in ("cast_config_weight", "cast_config_weight_for_grad_input"):
            cast: CastConfig | None = getattr(self, name)
            if cast is None or cast.scaling_type is ScalingType.DISABLED:
                continue
            if cast.scale_format is ScaleFormat.FLOAT32:
                raise ValueError(
                    f"mxfp4_weights=True, and {name} is '{cast.summary}': its scales round MXFP4 "
                    "weights again; give it scale_format=ScaleFormat.POWER_OF_TWO"
                )


_FLAGS_OF_PLANS = (
    *("smooth_input", "dequantize_in_backward", "mxfp4_weights", "pad_inner_dim", "emulate"),
)
_FLAGS = [f.name for f in fields(Float8LinearConfig) if f.init and f.type == "bool"]


def check_config(config: object, caller: str = "") -> Float8LinearConfig:
    """The config that a caller was given, or that of the recipe that it named.

    Args:
        config: a `Float8LinearConfig` or the name of a recipe; a None that stands for a default is
            the caller's to handle.
        caller: the public function, for the message.

    Raises:
        TypeError: it is something else.
        ValueError: no recipe has this name.
    """
    where = f"{caller}: " if caller else ""
    if isinstance(config, Float8LinearConfig):
        return config
    if isinstance(config, str) and config in RECIPES:
        return RECIPES[config]
    known = ", ".join(RECIPES)
    if isinstance(config, str):
        near = did_you_mean(config, RECIPES)
        raise ValueError(f"{where}unknown recipe {config!r}; known recipes: {known}{near}")
    raise TypeError(
        f"{where}config must be a Float8LinearConfig, got {described(config)}; or give the name of "
        f"a recipe, {known}"
    )


def recipe_of(config: Float8LinearConfig) -> str:
    """What to call a config: its recipe and the flags beside it, ``rowwise, emulate=True``."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(config) if f.name in _FLAGS}
    flags = [f"{n}={v}" for n, d in defaults.items() if (v := getattr(config, n)) != d]
    parts = [f.name for f in fields(config) if f.compare and f.name not in _FLAGS]
    own = [getattr(config, part) for part in parts]
    found = (n for n, known in RECIPES.items() if [getattr(known, p) for p in parts] == own)
    return ", ".join([next(found, "own config"), *flags])


def _recipes() -> dict[str, Float8LinearConfig]:
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    delayed = CastConfig(scaling_type=ScalingType.DELAYED)
    row = CastConfig(
        granularity=Rowwise(), target_dtype=E4M3.dtype, scale_format=ScaleFormat.POWER_OF_TWO
    )
    pow2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
    one = CastConfig(scaling_type=ScalingType.STATIC, static_scale=1.0)
    by_1x128 = replace(row, granularity=Blockwise(1, 128))
    by_128x128 = replace(row, granularity=Blockwise(128, 128))
    mx = replace(row, granularity=Blockwise(1, 32), scale_format=ScaleFormat.E8M0)
    mx_32x32 = replace(mx, granularity=Blockwise(32, 32))
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
        "mxfp8": Float8LinearConfig(mx, mx, mx, gemm_config_output=GemmConfig()),
        "mxfp8_2d": Float8LinearConfig(mx, mx_32x32, mx, gemm_config_output=GemmConfig()),
        "unit": Float8LinearConfig(one, one, one),  # for unit-scaled models
    }


RECIPES: dict[str, Float8LinearConfig] = _recipes()
"""The ready-made configs: recipe name -> `Float8LinearConfig`.

Take one with `Float8LinearConfig.from_recipe_name`, which returns a copy. "pow2": scales are
rounded up to powers of two.

- ``"tensorwise"``: one dynamic scale per tensor; gradients in E5M2, all else in E4M3.
- ``"delayed"``: one scale per tensor, from the amaxes of the last 16 steps; dynamic in the first
  16 steps.
- ``"rowwise"``: one dynamic scale per row of each operand, pow2, all in E4M3.
- ``"rowwise_with_gw_hp"``: as rowwise, the weight's gradient in high precision.
- ``"blockwise"``: one dynamic scale per 1 x 128 elements of activations and gradients, and per
  128 x 128 of weights, pow2, all in E4M3 (DeepSeek-V3, arXiv 2412.19437, section 3.3).
- ``"mxfp8"``: one dynamic E8M0 scale per 32 elements along each contraction, all in E4M3 (OCP MX
  1.0). On GPUs from sm_100 (B200) on and on gfx95 (MI350), emulated elsewhere.
- ``"mxfp8_2d"``: as mxfp8, one scale per 32 x 32 elements of weights: output and input gradient
  multiply the same float8 values of them.
- ``"unit"``: every scale is 1; for unit-scaled models.
"""
