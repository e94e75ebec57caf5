"""What each of TransformerEngine's recipes means: its arguments become fields of a config.

`float8.config.transformer_engine` has said which arguments there are; here are their values.
"""

from __future__ import annotations

import enum
from typing import Any

from float8.config.casts import CastConfig, DelayedScalingConfig, ScalingType
from float8.config.plan import GemmConfig
from float8.config.suggestions import did_you_mean
from float8.formats import E4M3
from float8.granularity import Blockwise, Granularity, Tensorwise

Fields = dict[str, Any]  # of a Float8LinearConfig

# Objects within the dynamic recipes: of the three casts, and of the three GEMMs.
QUANTISERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
GEMMS = {
    "gemm_config_output": "fp8_gemm_fprop",
    "gemm_config_grad_input": "fp8_gemm_dgrad",
    "gemm_config_grad_weight": "fp8_gemm_wgrad",
}
NOT_HERE = ("amax_epsilon", "random_hadamard_transform", "stochastic_rounding")
# How many dimensions a block of 128 has in each operand.
BLOCK_DIMS = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
BLOCKS: dict[int, Granularity] = {1: Blockwise(1, 128), 2: Blockwise(128, 128)}
OFF = CastConfig(ScalingType.DISABLED)


def delayed(recipe: Any, arguments: dict[str, Any]) -> Fields:
    """``DelayedScaling``: histories of amaxes, updated by the documented formula."""
    if (own := arguments.get("scaling_factor_compute_algo")) is not None:
        raise ValueError(
            f"scaling_factor_compute_algo={own!r}: scales follow from the documented formula only; "
            "margin and CastConfig(power_of_two_scale=True) are what can be chosen"
        )
    if not arguments.get("reduce_amax", True):
        raise ValueError(
            "reduce_amax=False: sync_float8_amax_and_scale_history reduces over ranks; for scales "
            "that each rank finds alone leave it out and pass sync a process group of that rank"
        )
    history, cast = _history(arguments), CastConfig(ScalingType.DELAYED)
    fields = _operands((cast, cast, cast), arguments) | {"enable_amax_init": False}
    casts = [value for value in fields.values() if isinstance(value, CastConfig)]
    if any(cast.scaling_type is ScalingType.DELAYED for cast in casts):
        fields["delayed_scaling"] = history
    return fields


def _history(arguments: dict[str, Any]) -> DelayedScalingConfig:
    algo = arguments.get("amax_compute_algo", "max")
    if not isinstance(algo, str) or algo.lower() not in ("max", "most_recent"):
        what = "a function is not supported" if callable(algo) else f"got {algo!r}"
        raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent'; {what}")
    interval = _integer("interval", arguments.get("interval", 1))
    return DelayedScalingConfig(
        history_len=_integer("amax_history_len", arguments.get("amax_history_len", 1024)),
        amax_compute_algo=algo.lower(),
        margin=_integer("margin", arguments.get("margin", 0)),
        interval=1 if interval == -1 else interval,  # that is its spelling of "not set"
        remember_nonfinite=True,
    )


def current(recipe: Any, arguments: dict[str, Any]) -> Fields:
    """``Float8CurrentScaling``: one dynamic scale per tensor."""
    flag = "use_power_2_scales"
    is_pow2 = arguments.get(flag)
    casts = _dynamic(recipe, (Tensorwise(),) * 3, is_pow2, f"{flag}={is_pow2!r}")
    return _operands(casts, arguments) | _gemms(recipe)


def blockwise(recipe: Any, arguments: dict[str, Any]) -> Fields:
    """``Float8BlockScaling``: a scale for each 128 elements, or for 128 x 128 of them."""
    is_float32 = arguments.get("use_f32_scales")
    is_pow2 = None if is_float32 is None else not is_float32
    granularities = [BLOCKS[arguments.get(name, dim)] for name, dim in BLOCK_DIMS.items()]
    casts = _dynamic(recipe, tuple(granularities), is_pow2, f"use_f32_scales={is_float32!r}")
    return _operands(casts, {"fp8_format": "E4M3", **arguments}) | _gemms(recipe)


def _dynamic(
    recipe: Any, granularities: tuple[Granularity, ...], is_pow2: bool | None, flag: str
) -> tuple[CastConfig, ...]:
    casts = []
    for name, granularity in zip(QUANTISERS, granularities, strict=True):
        quantiser = getattr(recipe, name)  # of the instance or of its class
        if any(getattr(quantiser, extra, False) for extra in NOT_HERE):
            raise ValueError(
                f"{name}={quantiser!r}: {', '.join(NOT_HERE)} have no counterpart here"
            )
        pow2 = quantiser.power_2_scale
        if is_pow2 is not None and pow2 != is_pow2:
            raise ValueError(
                f"{flag} and {name}.power_2_scale={pow2!r} contradict each other; "
                "TransformerEngine itself reads the latter"
            )
        casts.append(CastConfig(granularity=granularity, power_of_two_scale=pow2))
    return tuple(casts)


def _gemms(recipe: Any) -> Fields:
    return {
        ours: GemmConfig(use_fast_accum=not getattr(recipe, theirs).use_split_accumulator)
        for ours, theirs in GEMMS.items()
    }


def _operands(casts: tuple[CastConfig, ...], arguments: dict[str, Any]) -> Fields:
    """The six casts: in high precision where a GEMM of theirs is."""
    x, w, g = casts
    if _is_e4m3(arguments.get("fp8_format", "HYBRID")):
        g = CastConfig(g.scaling_type, g.granularity, E4M3.dtype, g.power_of_two_scale)
    fprop, dgrad, wgrad = _high_precision(arguments)
    uses = {
        ("input", "grad_weight"): (x, fprop, wgrad),
        ("weight", "grad_input"): (w, fprop, dgrad),
        ("grad_output", "grad_weight"): (g, dgrad, wgrad),
    }
    fields: Fields = {}
    for (operand, gemm), (cast, first_off, second_off) in uses.items():
        first, second = OFF if first_off else cast, OFF if second_off else cast
        fields[f"cast_config_{operand}"] = first
        fields[f"cast_config_{operand}_for_{gemm}"] = None if second == first else second
    return fields


def _is_e4m3(fp8_format: Any) -> bool:
    name = fp8_format.name if isinstance(fp8_format, enum.Enum) else fp8_format
    formats = ("HYBRID", "E4M3")
    if isinstance(name, str) and name.upper() in formats:
        return name.upper() == "E4M3"
    why = f"got {fp8_format!r}{did_you_mean(name, formats)}"
    if isinstance(name, str) and name.upper() == "E5M2":
        why = "E5M2 has 2 bits of mantissa, and no hardware multiplies E5M2 by E5M2"
    raise ValueError(f"fp8_format must be 'HYBRID' or 'E4M3': {why}")


def _high_precision(arguments: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether fprop, dgrad and wgrad run in high precision."""
    override = arguments.get("override_linear_precision", False)
    backward = arguments.get("backward_override")
    if override is False:
        override = (False, False, False)
    flags = tuple(override) if isinstance(override, (tuple, list)) else ()
    if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(
            "override_linear_precision must be three booleans (fprop, dgrad, wgrad), True for a "
            f"GEMM in high precision, got {override!r}"
        )
    if backward not in (None, "high_precision"):
        raise ValueError(
            f"backward_override={backward!r}: 'high_precision' or None; backward casts operands "
            "from high precision, or multiplies them so"
        )
    fprop, dgrad, wgrad = flags
    is_override = backward is not None
    return fprop, dgrad or is_override, wgrad or is_override


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return value
