"""What contradicts itself is refused, by the fields that do."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from plans import DELAYED, OFF, POW2, SECOND_USES, STATIC

from float8.config import RECIPES, CastConfig, GemmConfig
from float8.config import DelayedScalingConfig as Delayed
from float8.config import Float8LinearConfig as Linear
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Rowwise

Cast = CastConfig
OF_DELAYED = {"scaling_type": DELAYED}
E5M2 = CastConfig(target_dtype=torch.float8_e5m2)
FNUZ = CastConfig(target_dtype=torch.float8_e5m2fnuz)
FLOOR = ScaleFormat.E8M0_FLOOR
WEIGHT_ONLY = Linear(OFF, cast_config_grad_output=OFF, emulate=True)
REFUSED = [
    (partial(Cast, scaling_type="dynamic"), TypeError, "ScalingType"),
    (partial(Cast, granularity="row"), TypeError, "Granularity"),
    (partial(Cast, granularity=Rowwise), TypeError, "Granularity"),
    (partial(Cast, target_dtype=torch.float16), TypeError, "float16"),
    (
        partial(Cast, DELAYED, granularity=Rowwise()),
        ValueError,
        "one float32.*Tensorwise",
    ),
    (partial(replace, Cast(granularity=Rowwise()), **OF_DELAYED), ValueError, "one float32 scale"),
    (partial(Cast, STATIC, Rowwise(), static_scale=1.0), ValueError, "one float32 scale"),
    (partial(Cast, STATIC), ValueError, "needs a static_scale"),
    (partial(Cast, static_scale=1.0), ValueError, "this is ScalingType.DYNAMIC"),
    (partial(Cast, DELAYED, static_scale=1.0), ValueError, "this is ScalingType.DELAYED"),
    (partial(Linear, Cast(granularity=Blockwise(1, 32))), ValueError, "output.*ScaleFormat.E8M0"),
    (partial(Linear, E5M2, Cast(scale_format=FLOOR)), ValueError, "E8M0_FLOOR.*weight.*emulate"),
    (partial(Cast, DELAYED, scale_format=FLOOR), ValueError, "float32 scale.*E8M0_FLOOR.*POWER"),
    (partial(Cast, STATIC, static_scale=1.0, scale_format=FLOOR), ValueError, "one float32 scale"),
    (partial(replace, WEIGHT_ONLY, dequantize_in_backward=True), ValueError, "lacks one"),
    (partial(Cast, scale_format="e8m0"), TypeError, "ScaleFormat"),
    (partial(Cast, STATIC, static_scale=3.0, scale_format=POW2), ValueError, "no power of two"),
    *(  # a static scale is a positive float32 with a finite reciprocal
        (partial(Cast, STATIC, static_scale=scale), ValueError, "finite and > 0")
        for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39)
    ),
    *((partial(Delayed, length), ValueError, "history_len") for length in (0, -1)),
    *((partial(Delayed, length), TypeError, "history_len") for length in (1.5, True)),
    (partial(Delayed, amax_compute_algo="mean"), ValueError, "most_recent"),
    *((partial(Delayed, margin=margin), ValueError, "margin") for margin in (33, -33)),
    (partial(Delayed, margin=0.5), TypeError, "margin"),
    *(
        (partial(kind, **{field.name: value}), TypeError, f"{field.name} must be True or False")
        for kind in (Cast, Delayed, Linear, GemmConfig)
        for field in fields(kind)
        if field.init and field.type in ("bool", bool)
        for value in ("false", 0, None)
    ),
    (partial(replace, RECIPES["tensorwise"], delayed_scaling=Delayed(1024)), ValueError, "none of"),
    *(
        (partial(Linear, **{name: Cast(DELAYED)}), ValueError, f"{name}: a delayed")
        for name in SECOND_USES
    ),
    (partial(Linear, OFF, cast_config_input_for_grad_weight=Cast()), ValueError, "output GEMM"),
    (partial(Linear, cast_config_weight_for_grad_input=OFF), ValueError, "grad_input GEMM"),
    (partial(Linear, cast_config_input_for_grad_weight=OFF), ValueError, "grad_weight GEMM"),
    (partial(Linear, E5M2, E5M2), ValueError, "output GEMM.*E5M2 by E5M2"),
    (partial(Linear, cast_config_weight_for_grad_input=E5M2), ValueError, "grad_input.*E5M2 by"),
    (partial(Linear, cast_config_input_for_grad_weight=E5M2), ValueError, "grad_weight.*E5M2 by"),
    (partial(Linear, cast_config_input_for_grad_weight=FNUZ), ValueError, "E5M2 by E5M2"),
    (partial(Linear.from_recipe_name, "rowise"), ValueError, "mxfp8.*did you mean 'rowwise'"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_contradicts_itself_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("scale", [2.0**-126, 0.5, 1.0, 2.0**100])
def test_a_power_of_two_is_a_static_power_of_two_scale(scale):
    config = CastConfig(STATIC, static_scale=scale, scale_format=POW2)
    assert config.resolve(E4M3).static_scale == repr(scale)
