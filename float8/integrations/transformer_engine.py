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
reduce_amax                   True: ``sync`` takes the maximum over ranks. For a scale per rank call
                              ``after_step(model, group of this rank)``
backward_override             "high_precision": as ``override_linear_precision=(False, True, True)``
                              "dequantized": ``dequantize_in_backward=True``
fp8_dpa, fp8_mha              False: attention is no linear layer
scaling_factor_compute_algo   None: the formula above
enable_2d_quantization        (MXFP8BlockScaling) True: one scale per 32 x 32 elements of weights
backend                       "TE": for MSAMP's see ``float8.ms_amp``, for AO's ``from_torchao``
use_mxfp8_block_scaling       False: take the recipe ``mxfp8``
============================= ==================================================================

Two extremes differ. A factor is at most 2^126 in float8, and at most float32's maximum in
TransformerEngine. If a large margin makes a factor less than 2^-128, float8 keeps the old scale;
TransformerEngine uses a factor of 0 or nearly 0.

``Float8CurrentScaling``, ``Float8BlockScaling`` and ``MXFP8BlockScaling`` have dynamic scales: one
per tensor, per block of 128 elements or 128 x 128, or per 32 elements, in E8M0. Mappings of
Accelerate (``fp8_config``) have two names of their own (`_SPELLINGS`) and three more keys.

``CustomRecipe`` is refused: it calls a function for each tensor. What the function returns is
written as casts of `Float8LinearConfig`, ``IdentityQuantizer`` as ``ScalingType.DISABLED``:

=========== ============================ ==========================================
tensor      rowwise quantizer            columnwise quantizer
=========== ============================ ==========================================
input       ``cast_config_input``        ``cast_config_input_for_grad_weight``
weight      ``cast_config_weight``       ``cast_config_weight_for_grad_input``
grad_output ``cast_config_grad_output``  ``cast_config_grad_output_for_grad_weight``
=========== ============================ ==========================================

``columnwise_source="rowwise_dequantized"`` with ``IdentityQuantizer`` for the columnwise ones and
for ``grad_output`` is ``dequantize_in_backward=True``; it has no other counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

_SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}
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

# recipe -> argument -> the values that have a counterpart, or _ANY
_ANY: Any = None
_OF_ALL = {
    "fp8_format": ("HYBRID", "E4M3"),  # no hardware multiplies E5M2 by E5M2
    "override_linear_precision": _ANY,
    "backward_override": ("high_precision", "dequantized"),
    "fp8_dpa": (False,),
    "fp8_mha": (False,),
    # Only Accelerate has these; how to evaluate is no part of a config.
    "backend": ("TE",),
    "use_mxfp8_block_scaling": (False,),
    "use_autocast_during_eval": _ANY,
}
_OF_DYNAMIC = _OF_ALL | dict.fromkeys((*_QUANTISERS, *_GEMMS.values()), _ANY)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "DelayedScaling": {
        **dict.fromkeys(("margin", "interval", "amax_history_len", "amax_compute_algo"), _ANY),
        "scaling_factor_compute_algo": (),
        "reduce_amax": (True,),
        **_OF_ALL,
    },
    "Float8CurrentScaling": {"use_power_2_scales": _ANY, **_OF_DYNAMIC},
    "Float8BlockScaling": {"use_f32_scales": _ANY, **dict.fromkeys(_BLOCK_DIMS), **_OF_DYNAMIC},
    "MXFP8BlockScaling": {"margin": (0,), "enable_2d_quantization": _ANY, **_OF_ALL},
}


# These have no defaults: an argument that is given beside a recipe must not contradict it.
def from_te_recipe(
    cls: type[Float8LinearConfig], recipe: Any = None, **arguments: Any
) -> Float8LinearConfig:
    """The config that does what a recipe of TransformerEngine does.

    Call ``sync_float8_amax_and_scale_history(model)`` once per step, as for ``"delayed"``.

    Args:
        recipe: a ``DelayedScaling``, ``Float8CurrentScaling``, ``Float8BlockScaling`` or
            ``MXFP8BlockScaling``, or a mapping of arguments such as the ``fp8_config`` of an
            Accelerate configuration file, whose ``use_autocast_during_eval`` is about evaluation
            (`float8.high_precision`) and no part of the config.
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
    kind = type(recipe).__name__
    given: Any = recipe or {}
    if kind in (*ARGUMENTS, "TERecipeKwargs"):  # own names of its class begin with an underscore
        given = {name: value for name, value in vars(recipe).items() if name[0] != "_"}
    elif not isinstance(given, Mapping):
        raise ValueError(
            f"{kind} has no counterpart in float8; known: {', '.join(ARGUMENTS)}. The quantizers "
            "of a CustomRecipe are written as the six cast_config_* of Float8LinearConfig"
        )
    kind = kind if kind in ARGUMENTS else "DelayedScaling"
    known = ARGUMENTS[kind]
    default = "E4M3" if kind in ("Float8BlockScaling", "MXFP8BlockScaling") else "HYBRID"
    together: dict[str, Any] = {}
    for key, value in [*given.items(), *arguments.items()]:
        name = _SPELLINGS.get(key, key)
        if name not in known:
            raise TypeError(
                f"unknown argument {name!r} of {kind}; known: {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
        if value is None:
            continue
        if name in together:
            raise ValueError(f"{name} is given twice, beside the {kind} recipe or in two spellings")
        together[name] = value
    fmt = together.get("fp8_format", default)  # a string, or a member of an enum there
    together["fp8_format"] = str(getattr(fmt, "name", fmt)).upper()
    for name, value in together.items():
        if known[name] is not _ANY and value not in known[name]:
            others = " or ".join(map(repr, known[name])) or "None"
            raise ValueError(f"{name}={value!r} of {kind} has no counterpart in float8: {others}")
    fields: dict[str, Any] = _operands(_casts(kind, recipe, together), together)
    if kind != "DelayedScaling":
        for ours, theirs in _GEMMS.items():
            gemm = getattr(recipe, theirs, None)  # MXFP8BlockScaling has none
            fields[ours] = GemmConfig(gemm is not None and not gemm.use_split_accumulator)
        return cls(**fields)
    interval = together.get("interval", 1)
    history = DelayedScalingConfig(
        history_len=together.get("amax_history_len", 1024),
        amax_compute_algo=together.get("amax_compute_algo", "max"),
        margin=together.get("margin", 0),
        interval=1 if interval == -1 else interval,  # -1 stands for "not set" there
        remember_nonfinite=True,
    )
    casts = [cast for cast in fields.values() if isinstance(cast, CastConfig)]
    if any(cast.scaling_type is ScalingType.DELAYED for cast in casts):
        fields["delayed_scaling"] = history
    return cls(**fields, enable_amax_init=False)


def _casts(kind: str, recipe: Any, arguments: Mapping[str, Any]) -> list[CastConfig]:
    """Those of input, weight and grad_output."""
    if kind == "DelayedScaling":
        return [CastConfig(ScalingType.DELAYED)] * 3
    if kind == "MXFP8BlockScaling":
        mx = CastConfig(granularity=Blockwise(1, 32), scale_format=ScaleFormat.E8M0)
        square = replace(mx, granularity=Blockwise(32, 32))
        return [mx, square if arguments.get("enable_2d_quantization") else mx, mx]
    granularities: list[Granularity] = [Tensorwise()] * 3
    is_pow2 = arguments.get("use_power_2_scales")
    if kind == "Float8BlockScaling":
        granularities = [_BLOCKS[arguments.get(name, dim)] for name, dim in _BLOCK_DIMS.items()]
        is_pow2 = not arguments["use_f32_scales"] if "use_f32_scales" in arguments else None
    casts = []
    for name, granularity in zip(_QUANTISERS, granularities, strict=True):
        quantiser = getattr(recipe, name)  # of the instance or of its class
        pow2 = quantiser.power_2_scale
        is_odd = any(getattr(quantiser, extra, False) for extra in _UNSUPPORTED)
        if is_odd or is_pow2 not in (None, pow2):
            raise ValueError(
                f"{name}={quantiser!r} has no counterpart in float8 ({', '.join(_UNSUPPORTED)}), "
                f"or contradicts the recipe's power-of-two scales, {is_pow2}"
            )
        scale_format = ScaleFormat.POWER_OF_TWO if pow2 else ScaleFormat.FLOAT32
        casts.append(CastConfig(granularity=granularity, scale_format=scale_format))
    return casts


def _operands(casts: list[CastConfig], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The six casts; disabled for the GEMMs that run in high precision."""
    x, w, g = casts
    if arguments["fp8_format"] == "E4M3":
        g = CastConfig(g.scaling_type, g.granularity, E4M3.dtype, g.scale_format)
    off = CastConfig(ScalingType.DISABLED)
    fprop, dgrad, wgrad = arguments.get("override_linear_precision") or (False,) * 3
    override = arguments.get("backward_override")
    is_off = override == "high_precision"
    dgrad, wgrad = dgrad or is_off, wgrad or is_off
    uses = {
        ("input", "grad_weight"): (x, fprop, wgrad),
        ("weight", "grad_input"): (w, fprop, dgrad),
        ("grad_output", "grad_weight"): (g, dgrad, wgrad),
    }
    fields: dict[str, Any] = {"dequantize_in_backward": override == "dequantized"}
    for (operand, gemm), (cast, first_off, second_off) in uses.items():
        first, second = off if first_off else cast, off if second_off else cast
        fields[f"cast_config_{operand}"] = first
        fields[f"cast_config_{operand}_for_{gemm}"] = None if second == first else second
    return fields


Float8LinearConfig.from_te_recipe = classmethod(from_te_recipe)  # type: ignore[arg-type, assignment]
