"""What names of torchao.float8 and float8_experimental are called here.

The public names of this library are mostly those of torchao. Where they differ, a script that was
written for torchao meets an unknown field or an unknown name; the error then says what to write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from float8.config.suggestions import did_you_mean

T = TypeVar("T", bound=type)

# field of a config elsewhere -> what to write here
FIELDS = {
    "scaling_granularity": "it is called granularity here: Tensorwise() for TENSORWISE, Rowwise() "
    "for AXISWISE",
    "round_scales_to_power_of_2": "it belongs to each cast here: "
    "CastConfig(power_of_two_scale=True)",
    "force_recompute_fp8_weight_in_bwd": "leave it out: backward always casts the weight again, "
    "unless float8.cached_weights keeps it",
    "delayed_scaling_config": "it is called delayed_scaling here: "
    "delayed_scaling=DelayedScalingConfig(...)",
    "scale_fn_name": "it is called amax_compute_algo here",
}

_MATMUL = "a Float8LinearConfig says how products run: its gemm_config_* and emulate"
_SWAP = "use convert_to_float8_training(model, config=..., module_filter_fn=...)"
_CAST = "use Float8Tensor.from_high_precision(x, dtype, granularity, scale)"
# public name elsewhere -> what to write here
NAMES = {
    # torchao 0.18
    "Float8GemmConfig": "it is called GemmConfig here",
    "Float8LinearRecipeName": "recipes are named by strings here: "
    'Float8LinearConfig.from_recipe_name("rowwise")',
    "ScalingGranularity": "use Tensorwise() for TENSORWISE, Rowwise() for AXISWISE, or Blockwise",
    "FP8Granularity": "use Tensorwise(), Rowwise() or Blockwise(rows, cols)",
    "_auto_filter_for_recipe": "use faster_layers(recipe, tokens=..., device=...), or "
    "float8.filters",
    "Float8TrainingTensor": "it is called Float8Tensor here",
    "GemmInputRole": _MATMUL,
    "LinearMMConfig": _MATMUL,
    "ScaledMMConfig": _MATMUL,
    "Float8MMConfig": _MATMUL,
    # float8_experimental and torchao 0.4 to 0.8
    "linear_requires_sync": "use config.uses_delayed_scaling; a sync of a model without delayed "
    "casts is harmless",
    "swap_linear_with_float8_linear": _SWAP,
    "swap_linear_layers": _SWAP,
    "TensorScalingType": "it is called ScalingType here",
    "Float8TensorCastConfig": "it is called CastConfig here",
    "Float8DynamicLinear": "use Float8Linear, whose default config casts dynamically",
    "get_float8_layers": "use [m for m in model.modules() if isinstance(m, Float8Linear)]",
    "hp_tensor_to_float8_dynamic": _CAST,
    "hp_tensor_and_scale_to_float8": _CAST,
    "hp_tensor_to_float8_delayed": _CAST,
    "to_fp8_no_autograd": _CAST,
}


def called_here(name: str) -> str:
    """For the message of an unknown name: ``"; a script for torchao ..."``, or nothing."""
    if name not in NAMES:
        return ""
    return f"; a script for torchao or float8_experimental imports it: {NAMES[name]}"


def explains_unknown_fields(cls: T) -> T:
    """A class decorator for dataclasses: an unknown field's error names the known one."""
    made: Any = cls
    set_up: Callable[..., None] = made.__init__
    known = [f.name for f in fields(made) if f.init]

    @functools.wraps(set_up)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{made.__name__} has no field {name!r}"
                    + (f"; {FIELDS[name]}" if name in FIELDS else did_you_mean(name, known))
                )
        set_up(self, *args, **kwargs)

    made.__init__ = __init__
    return cls
