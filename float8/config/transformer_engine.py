"""TransformerEngine's recipes in this library's terms; TransformerEngine itself is not imported.

``DelayedScaling`` is a history of amaxes per operand, and its documented update per step is (there
``scale`` quantises, here it dequantises: ``scale = 1 / new_scaling_factor``)::

    amax               = max(history), or its newest entry
    new_scaling_factor = (max(format) / amax) / 2**margin

Where amax is 0 or not finite the factor stays; the first one is 1. Each of its arguments has a
counterpart:

============================= ==================================================================
margin, interval,             the fields of `DelayedScalingConfig`; TransformerEngine deprecated
amax_history_len,             ``interval``, which it never used (its issue 805), so what its
amax_compute_algo             manual said is done: scales are recomputed every ``interval`` steps
fp8_format                    HYBRID: E4M3, and E5M2 for grad_output; E4M3: for all three
override_linear_precision     which of fprop, dgrad, wgrad run in high precision: any of the eight
reduce_amax                   True: ``sync`` takes the maximum over ranks
backward_override             "high_precision": as ``override_linear_precision=(False, True, True)``
fp8_dpa, fp8_mha              False: attention is no linear layer
scaling_factor_compute_algo   None: the formula above
============================= ==================================================================

Two extremes end elsewhere. A factor has no more than 2^126 here, where there it has what float32
has; and one that a large margin makes less than 2^-128 is not used here, where there it is 0, or
nearly so.

Accelerate's configuration files hold the same arguments beside its own (``backend``, ...), with
some names spelt out, in either case and perhaps with ``fp8_`` before them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from float8.config.suggestions import did_you_mean
from float8.config.transformer_engine_recipes import (
    BLOCK_DIMS,
    GEMMS,
    QUANTISERS,
    Fields,
    blockwise,
    current,
    delayed,
)

OF_DELAYED = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "scaling_factor_compute_algo",
    "reduce_amax",
)
OF_ALL = ("fp8_format", "override_linear_precision", "backward_override", "fp8_dpa", "fp8_mha")
OF_ACCELERATE = ("backend", "use_autocast_during_eval", "use_mxfp8_block_scaling")
_DYNAMIC = (*OF_ALL, *QUANTISERS, *GEMMS.values())
_ARGUMENTS = (*OF_DELAYED, *OF_ALL, *OF_ACCELERATE)
# What Accelerate's files and its command line call them -> what TransformerEngine does.
SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}
SPELLINGS |= {f"fp8_{name}": name for name in _ARGUMENTS if not name.startswith("fp8_")} | {
    f"fp8_{name}": own for name, own in SPELLINGS.items()
}
Translate = Callable[[Any, dict[str, Any]], Fields]
# recipe -> the arguments that it has, and what they mean
KINDS: dict[str, tuple[tuple[str, ...], Translate]] = {
    "DelayedScaling": (_ARGUMENTS, delayed),
    "Float8CurrentScaling": (("use_power_2_scales", *_DYNAMIC), current),
    "Float8BlockScaling": (("use_f32_scales", *BLOCK_DIMS, *_DYNAMIC), blockwise),
    "TERecipeKwargs": (_ARGUMENTS, delayed),  # Accelerate's, of the same arguments
}
REFUSED = {
    "MXFP8BlockScaling": "MX formats (a scale per 32 elements, in E8M0) are not supported; the "
    "nearest is Float8BlockScaling, or the recipe 'blockwise'",
    "NVFP4BlockScaling": "4-bit formats are not supported",
    "CustomRecipe": "quantizer factories are not supported; write a Float8LinearConfig",
}


def fields_of_te_recipe(recipe: Any, arguments: Mapping[str, Any]) -> Fields:
    """The fields of a `Float8LinearConfig` that does what a recipe of TransformerEngine does.

    Args:
        recipe: one of its recipe objects, a mapping of arguments, or None.
        arguments: more of them, by name.

    Raises:
        TypeError: an unknown argument, or one of a wrong type.
        ValueError: what has no counterpart here, or contradicts itself.
    """
    is_mapping = recipe is None or isinstance(recipe, Mapping)
    kind = "DelayedScaling" if is_mapping else type(recipe).__name__
    if kind in REFUSED or kind not in KINDS:
        known = f"recipes that are known: {', '.join(KINDS)}, or a mapping of arguments"
        why = REFUSED.get(kind, f"what it means here is not known{did_you_mean(kind, KINDS)}")
        raise ValueError(f"{kind}: {why}; {known}")
    known_names, translate = KINDS[kind]
    given = recipe or {}
    if not is_mapping:  # its own names begin with an underscore
        given = {name: v for name, v in vars(recipe).items() if not name.startswith("_")}
    together = _together(kind, _spelt(given), _spelt(arguments))
    _check_backend(together.get("backend"))  # first: others have arguments of their own
    _check_names(kind, together, known_names)
    _check_common(together)
    return translate(recipe, {name: v for name, v in together.items() if v is not None})


def _spelt(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under TransformerEngine's own names."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in arguments.items():
        name = SPELLINGS.get(str(key).lower(), str(key).lower())
        if name in found:
            raise ValueError(f"{name} is given twice: as {found[name][0]!r} and as {key!r}")
        found[name] = key, value
    return {name: value for name, (_, value) in found.items()}


def _together(kind: str, given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    for name in given.keys() & own.keys():
        if given[name] is not None and own[name] is not None:
            raise ValueError(
                f"{name} is given twice: {given[name]!r} in the {kind} recipe and {own[name]!r} "
                "beside it; give it once"
            )
    return {**given, **{name: value for name, value in own.items() if value is not None}}


def _check_names(kind: str, arguments: dict[str, Any], known: tuple[str, ...]) -> None:
    for name, value in arguments.items():
        if name in known:
            continue
        if name in OF_DELAYED and value is not None:
            raise ValueError(
                f"{name}={value!r} is about an amax history, and {kind} keeps none: its scales are "
                f"dynamic. Leave {name} out, or use DelayedScaling"
            )
        raise TypeError(
            f"unknown argument {name!r} of a TransformerEngine recipe ({kind}); known: "
            f"{', '.join(known)}{did_you_mean(name, (*known, *SPELLINGS))}"
        )


def _check_backend(backend: Any) -> None:
    if backend is None or str(backend).upper() == "TE":
        return
    others = {
        "AO": "its arguments are fields of Float8LinearConfig, and a config of torchao is for "
        "Float8LinearConfig.from_torchao",
        "MSAMP": "use float8.ms_amp",
    }
    instead = others.get(str(backend).upper(), "there is TE, AO and MSAMP")
    raise ValueError(f"backend={backend!r} is not TransformerEngine's: {instead}")


def _check_common(arguments: dict[str, Any]) -> None:
    for name in ("fp8_dpa", "fp8_mha"):
        if arguments.get(name):
            raise ValueError(
                f"{name}={arguments[name]!r}: attention in float8 is no linear layer's"
            )
    if arguments.get("use_mxfp8_block_scaling"):
        raise ValueError(f"use_mxfp8_block_scaling: {REFUSED['MXFP8BlockScaling']}")
    if arguments.get("use_autocast_during_eval") is False:
        warnings.warn(
            "use_autocast_during_eval=False evaluates in high precision, and a config cannot say "
            "that: run evaluation under `with float8.high_precision(model):`, or leave it out",
            stacklevel=4,
        )
