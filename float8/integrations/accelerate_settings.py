"""Hugging Face Accelerate's FP8 settings: its objects, the ``fp8_config`` of its files, its flags.

Accelerate describes a recipe of TransformerEngine (``TERecipeKwargs``, or a mapping from a file) or
of torchao (``AORecipeKwargs``). This file reads them without importing Accelerate: by the names of
types and fields. `te_arguments` renames TransformerEngine's arguments; `transformer_engine.py` and
`torchao.py` translate them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from float8.convert.filters import ModuleFilter, all_of, divisible_by

# Keys that only Accelerate has, and Accelerate's names of TransformerEngine's arguments.
_OWN = ("backend", "use_autocast_during_eval", "use_mxfp8_block_scaling")
_SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}
_UNCHANGED = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
)
# Flags of the command line have this prefix, in either case.
_NAMES = _SPELLINGS | {f"fp8_{name}": name for name in (*_OWN, *_UNCHANGED)}
_NAMES |= {f"fp8_{name}": te_name for name, te_name in _SPELLINGS.items()}


def is_te_recipe(config: Any) -> bool:
    """Whether it is a ``TERecipeKwargs``."""
    return type(config).__name__ == "TERecipeKwargs"


def is_torchao_recipe(config: Any) -> bool:
    """Whether it is an ``AORecipeKwargs``."""
    return type(config).__name__ == "AORecipeKwargs"


def te_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a TransformerEngine recipe, under its names, without Accelerate's own keys.

    Raises ValueError if an argument is given under two names, or the settings are for another
    backend.
    """
    arguments: dict[str, Any] = {}
    for key, value in settings.items():
        name = _NAMES.get(str(key).lower(), str(key).lower())
        if name in arguments:
            raise ValueError(f"{name} is given twice, as {key!r} and in another spelling")
        arguments[name] = value
    own = {name: arguments.pop(name, None) for name in _OWN}
    if str(own["backend"] or "TE").upper() != "TE" or own["use_mxfp8_block_scaling"]:
        raise ValueError(
            "these settings are not of TransformerEngine's delayed scaling: use float8.ms_amp for "
            "MSAMP's, Float8LinearConfig.from_torchao for AO's, and the recipe 'mxfp8' in place of "
            "use_mxfp8_block_scaling"
        )
    if own["use_autocast_during_eval"] is False:
        warnings.warn(
            "use_autocast_during_eval=False evaluates in high precision, and a config cannot say "
            "that: run evaluation under `with float8.high_precision(model):`, or leave it out",
            stacklevel=3,
        )
    return arguments


def evaluates_in_float8(config: Any) -> bool:
    """Whether settings ask for float8 in evaluation (``use_autocast_during_eval``)."""
    settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return any(bool(value) for key, value in settings.items() if _is_about_evaluation(key))


def without_evaluation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without ``use_autocast_during_eval``, which `evaluates_in_float8` reads."""
    return {key: value for key, value in settings.items() if not _is_about_evaluation(key)}


def _is_about_evaluation(key: object) -> bool:
    return _NAMES.get(str(key).lower(), str(key).lower()) == "use_autocast_during_eval"


def filter_of(config: Any, model: nn.Module) -> ModuleFilter | None:
    """The filter of ``AORecipeKwargs``, or its documented default; None for other settings.

    The default excludes the first and the last linear layer, and layers with a dimension that is
    not a multiple of 16.
    """
    if not is_torchao_recipe(config):
        return None
    if config.module_filter_func is not None:
        return config.module_filter_func
    names = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    return all_of(lambda module, fqn: fqn not in (names[0], names[-1]), divisible_by(16))


def refuses_fp8(mixed_precision: str, backend: str) -> str | None:
    """The reason why Accelerate's own FP8 settings exclude this library, or None.

    ``mixed_precision`` is "no", "fp16", "bf16" or "fp8". ``backend`` is "TE", "AO", "MSAMP", or
    "NO" if none is chosen.
    """
    if mixed_precision != "fp8" and backend.upper() == "NO":
        return None
    return (
        f"mixed_precision={mixed_precision!r} and the FP8 backend {backend} have Accelerate "
        "convert the model by itself, by another package. In the file of accelerate config, or of "
        "accelerate launch --config_file, write `mixed_precision: bf16` and no `fp8_config` "
        "(elsewhere leave out --mixed_precision fp8, --fp8_backend and ACCELERATE_FP8_BACKEND)"
    )
