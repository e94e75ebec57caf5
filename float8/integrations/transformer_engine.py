"""TransformerEngine's recipes in this library's terms; TransformerEngine itself is not imported.

``DelayedScaling`` is a history of amaxes per operand, and its documented update per step is (there
``scale`` quantises, in float8 it dequantises: ``scale = 1 / new_scaling_factor``)::

    amax               = max(history), or its newest entry
    new_scaling_factor = (max(format) / amax) / 2**margin

Where amax is 0 or not finite the factor stays; the first one is 1. Each of its arguments has a
counterpart:

============================= ==================================================================
margin, interval,             the fields of `DelayedScalingConfig`. TransformerEngine deprecated
amax_history_len,             ``interval`` and never used it (its issue 805). Here it does what the
amax_compute_algo             manual said: scales are recomputed every ``interval`` steps
fp8_format                    HYBRID: E4M3, and E5M2 for grad_output; E4M3: for all three
override_linear_precision     which of fprop, dgrad, wgrad run in high precision: any of the eight
reduce_amax                   True: ``sync`` takes the maximum over ranks
backward_override             "high_precision": as ``override_linear_precision=(False, True, True)``
fp8_dpa, fp8_mha              False: attention is no linear layer
scaling_factor_compute_algo   None: the formula above
enable_2d_quantization        False (MXFP8BlockScaling): one scale per 32 elements of a row
============================= ==================================================================

Two extremes differ. A factor is at most 2^126 in float8, and at most float32's maximum in
TransformerEngine. If a large margin makes a factor less than 2^-128, float8 keeps the old scale;
TransformerEngine uses a factor of 0 or nearly 0.

``Float8CurrentScaling``, ``Float8BlockScaling`` and ``MXFP8BlockScaling`` have dynamic scales: one
per tensor, per block of 128 elements or 128 x 128, or per 32 elements, in E8M0. Mappings in the
spelling of Accelerate's files are understood too (`float8.integrations.accelerate_settings`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from float8.arguments import did_you_mean
from float8.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    GemmConfig,
    ScalingType,
)
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Granularity, Tensorwise
from float8.integrations.accelerate_settings import is_te_recipe, te_arguments

Fields = dict[str, Any]  # of a Float8LinearConfig
Arguments = dict[str, Any]  # of a recipe


# These have no defaults: an argument that is given beside a recipe must not contradict it.
def from_te_recipe(
    cls: type[Float8LinearConfig], recipe: Any = None, **arguments: Any
) -> Float8LinearConfig:
    """The config that does what a recipe of TransformerEngine does.

    Call ``sync_float8_amax_and_scale_history(model)`` once per step, as for ``"delayed"``.

    Args:
        recipe: a ``DelayedScaling``, ``Float8CurrentScaling``, ``Float8BlockScaling`` or
            ``MXFP8BlockScaling``, or a mapping of arguments such as the ``fp8_config`` of an
            Accelerate configuration file, whose spellings are understood.
        arguments: those of ``DelayedScaling`` by name: ``margin=0``, ``interval=1``,
            ``fp8_format="HYBRID"`` or ``"E4M3"``, ``amax_history_len=1024``,
            ``amax_compute_algo="max"`` or ``"most_recent"``,
            ``override_linear_precision=(fprop, dgrad, wgrad)``, True for a GEMM in high precision.
            What each does is in ``float8.integrations.transformer_engine``.

    Raises:
        TypeError: an unknown argument (the nearest is suggested), or one of a wrong type.
        ValueError: a value has no counterpart, is given twice, or is about an amax history where
            the recipe keeps none.
    """
    given: Any = vars(recipe) if is_te_recipe(recipe) else {} if recipe is None else recipe
    kind, settings = "DelayedScaling", given
    if not isinstance(given, Mapping):
        kind = type(recipe).__name__
        if kind not in KINDS:
            raise ValueError(
                f"{kind} has no counterpart in float8; known: {', '.join(KINDS)}, or a mapping of "
                f"arguments{did_you_mean(kind, KINDS)}"
            )
        # Its own names begin with an underscore.
        settings = {name: value for name, value in vars(recipe).items() if name[0] != "_"}
    own = {name: v for name, v in te_arguments(arguments).items() if v is not None}
    together = {name: v for name, v in te_arguments(settings).items() if v is not None}
    if twice := own.keys() & together.keys():
        raise ValueError(f"{min(twice)} is given twice: in the {kind} recipe and beside it")
    together |= own
    known, fields_of = KINDS[kind]
    if unknown := sorted(together.keys() - set(known)):
        raise TypeError(
            f"unknown argument {unknown[0]!r} of {kind}; known: {', '.join(known)}"
            f"{did_you_mean(unknown[0], known)}"
        )
    for name, (supported, instead) in _ONLY.items():
        if (value := together.get(name, supported)) != supported:
            raise ValueError(f"{name}={value!r} has no counterpart in float8: {instead}")
    return cls(**fields_of(recipe, together))


# Arguments of which one value has a counterpart, and what to do about others.
_ONLY = {
    "fp8_dpa": (False, "attention stays in high precision"),
    "fp8_mha": (False, "attention stays in high precision"),
    "scaling_factor_compute_algo": (None, "scales follow from the documented formula only"),
    "reduce_amax": (True, "for a scale per rank call after_step(model, group of this rank)"),
    "enable_2d_quantization": (False, "MX blocks are 1x32; Float8BlockScaling has square ones"),
}


# --- what each recipe means


def _delayed(recipe: Any, arguments: Arguments) -> Fields:
    history, cast = _history(arguments), CastConfig(ScalingType.DELAYED)
    fields = _operands((cast, cast, cast), arguments) | {"enable_amax_init": False}
    casts = [value for value in fields.values() if isinstance(value, CastConfig)]
    if any(cast.scaling_type is ScalingType.DELAYED for cast in casts):
        fields["delayed_scaling"] = history
    return fields


def _history(arguments: Arguments) -> DelayedScalingConfig:
    algo = arguments.get("amax_compute_algo", "max")
    interval = arguments.get("interval", 1)
    return DelayedScalingConfig(
        history_len=arguments.get("amax_history_len", 1024),
        amax_compute_algo=algo.lower() if isinstance(algo, str) else algo,
        margin=arguments.get("margin", 0),
        interval=1 if interval == -1 else interval,  # -1 stands for "not set" there
        remember_nonfinite=True,
    )


# Objects within the dynamic recipes: of the three casts, and of the three GEMMs.
_QUANTISERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_GEMMS = {
    "gemm_config_output": "fp8_gemm_fprop",
    "gemm_config_grad_input": "fp8_gemm_dgrad",
    "gemm_config_grad_weight": "fp8_gemm_wgrad",
}
_UNSUPPORTED = (
    "amax_epsilon",
    "random_hadamard_transform",
    "stochastic_rounding",
    "fp4_2d_quantization",
)
# How many dimensions a block of 128 has in each operand.
_BLOCK_DIMS = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
_BLOCKS: dict[int, Granularity] = {1: Blockwise(1, 128), 2: Blockwise(128, 128)}


def _current(recipe: Any, arguments: Arguments) -> Fields:
    is_pow2 = arguments.get("use_power_2_scales")
    casts = _dynamic(recipe, (Tensorwise(),) * 3, is_pow2, f"use_power_2_scales={is_pow2!r}")
    return _operands(casts, arguments) | _gemms(recipe)


def _blockwise(recipe: Any, arguments: Arguments) -> Fields:
    is_float32 = arguments.get("use_f32_scales")
    is_pow2 = None if is_float32 is None else not is_float32
    granularities = [_BLOCKS[arguments.get(name, dim)] for name, dim in _BLOCK_DIMS.items()]
    casts = _dynamic(recipe, tuple(granularities), is_pow2, f"use_f32_scales={is_float32!r}")
    return _operands(casts, {"fp8_format": "E4M3", **arguments}) | _gemms(recipe)


def _mx(recipe: Any, arguments: Arguments) -> Fields:
    if arguments.get("margin"):
        raise ValueError(f"margin={arguments['margin']!r}: MXFP8BlockScaling has none; leave it 0")
    cast = CastConfig(granularity=Blockwise(1, 32), scale_format=ScaleFormat.E8M0)
    fields = _operands((cast,) * 3, {"fp8_format": "E4M3", **arguments})
    return {**fields, "gemm_config_output": GemmConfig()}


def _dynamic(
    recipe: Any, granularities: tuple[Granularity, ...], is_pow2: bool | None, flag: str
) -> tuple[CastConfig, ...]:
    casts = []
    for name, granularity in zip(_QUANTISERS, granularities, strict=True):
        quantiser = getattr(recipe, name)  # of the instance or of its class
        if any(getattr(quantiser, extra, False) for extra in _UNSUPPORTED):
            raise ValueError(
                f"{name}={quantiser!r}: {', '.join(_UNSUPPORTED)} have no counterpart in float8"
            )
        pow2 = quantiser.power_2_scale
        if is_pow2 is not None and pow2 != is_pow2:
            raise ValueError(f"{flag} and {name}.power_2_scale={pow2!r} contradict each other")
        scale_format = ScaleFormat.POWER_OF_TWO if pow2 else ScaleFormat.FLOAT32
        casts.append(CastConfig(granularity=granularity, scale_format=scale_format))
    return tuple(casts)


def _gemms(recipe: Any) -> Fields:
    return {
        ours: GemmConfig(use_fast_accum=not getattr(recipe, theirs).use_split_accumulator)
        for ours, theirs in _GEMMS.items()
    }


def _operands(casts: tuple[CastConfig, ...], arguments: Arguments) -> Fields:
    """The six casts; disabled for the GEMMs that run in high precision."""
    x, w, g = casts
    if _is_e4m3(arguments.get("fp8_format", "HYBRID")):
        g = CastConfig(g.scaling_type, g.granularity, E4M3.dtype, g.scale_format)
    off = CastConfig(ScalingType.DISABLED)
    fprop, dgrad, wgrad = _high_precision(arguments)
    uses = {
        ("input", "grad_weight"): (x, fprop, wgrad),
        ("weight", "grad_input"): (w, fprop, dgrad),
        ("grad_output", "grad_weight"): (g, dgrad, wgrad),
    }
    fields: Fields = {}
    for (operand, gemm), (cast, first_off, second_off) in uses.items():
        first, second = off if first_off else cast, off if second_off else cast
        fields[f"cast_config_{operand}"] = first
        fields[f"cast_config_{operand}_for_{gemm}"] = None if second == first else second
    return fields


def _is_e4m3(fp8_format: Any) -> bool:
    name = str(fp8_format.name if isinstance(fp8_format, enum.Enum) else fp8_format).upper()
    if name not in ("HYBRID", "E4M3"):  # no hardware multiplies E5M2 by E5M2
        raise ValueError(f"fp8_format must be 'HYBRID' or 'E4M3', got {fp8_format!r}")
    return name == "E4M3"


def _high_precision(arguments: Arguments) -> tuple[bool, bool, bool]:
    """Whether fprop, dgrad and wgrad run in high precision."""
    override = arguments.get("override_linear_precision") or (False, False, False)
    flags = tuple(override) if isinstance(override, (tuple, list)) else ()
    if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(
            "override_linear_precision must be three booleans (fprop, dgrad, wgrad), True for a "
            f"GEMM in high precision, got {override!r}"
        )
    backward = arguments.get("backward_override")
    if backward not in (None, "high_precision"):
        raise ValueError(f"backward_override must be 'high_precision' or None, got {backward!r}")
    fprop, dgrad, wgrad = flags
    return fprop, dgrad or backward is not None, wgrad or backward is not None


OF_DELAYED = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "scaling_factor_compute_algo",
    "reduce_amax",
)
_OF_ALL = ("fp8_format", "override_linear_precision", "backward_override", "fp8_dpa", "fp8_mha")
_OF_DYNAMIC = (*_OF_ALL, *_QUANTISERS, *_GEMMS.values())
# recipe -> the arguments that it has, and what they mean
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any, Arguments], Fields]]] = {
    "DelayedScaling": ((*OF_DELAYED, *_OF_ALL), _delayed),
    "Float8CurrentScaling": (("use_power_2_scales", *_OF_DYNAMIC), _current),
    "Float8BlockScaling": (("use_f32_scales", *_BLOCK_DIMS, *_OF_DYNAMIC), _blockwise),
    "MXFP8BlockScaling": (("margin", "enable_2d_quantization", *_OF_ALL), _mx),
}

Float8LinearConfig.from_te_recipe = classmethod(from_te_recipe)  # type: ignore[arg-type, assignment]
