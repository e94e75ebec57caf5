"""A cast says what contradicts itself, and in a few words what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plans import DELAYED, POW2, STATIC

from float8.config import CastConfig, DelayedScalingConfig
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Rowwise

BAD_CASTS = {
    "scaling type": (
        {"scaling_type": "dynamic"},
        TypeError,
        "must be a ScalingType, got 'dynamic'",
    ),
    "granularity": ({"granularity": "row"}, TypeError, "must be a Granularity, got 'row'"),
    "granularity class": ({"granularity": Rowwise}, TypeError, "must be a Granularity"),
    "dtype": ({"target_dtype": torch.float16}, TypeError, "float16 is not a float8 format"),
    "delayed rowwise": (
        {"scaling_type": DELAYED, "granularity": Rowwise()},
        ValueError,
        r"delayed scaling keeps one scale per tensor, got granularity Rowwise\(\); use Tensorwise",
    ),
    "static blockwise": (
        {"scaling_type": STATIC, "granularity": Blockwise(1, 128), "static_scale": 1.0},
        ValueError,
        "static scaling keeps one scale per tensor",
    ),
    "static without": ({"scaling_type": STATIC}, ValueError, "needs a static_scale, such as"),
    "dynamic with": ({"static_scale": 1.0}, ValueError, "set scaling_type=ScalingType.STATIC"),
    "delayed with": (
        {"scaling_type": DELAYED, "static_scale": 1.0},
        ValueError,
        r"static_scale=1\.0 belongs to ScalingType\.STATIC, and this is ScalingType\.DELAYED",
    ),
    "float32 scales of MX blocks": (
        {"granularity": Blockwise(1, 32)},
        ValueError,
        r"blocks of 1x32 have E8M0 scales.*Give Blockwise\(1, 32\) with ScaleFormat\.E8M0",
    ),
    "E8M0 scales of other blocks": (
        {"granularity": Rowwise(), "scale_format": ScaleFormat.E8M0_FLOOR},
        ValueError,
        r"granularity=Rowwise\(\) and scale_format=ScaleFormat\.E8M0_FLOOR do not fit",
    ),
    "a scale format by its name": (
        {"scale_format": "e8m0"},
        TypeError,
        r"scale_format must be a ScaleFormat, got 'e8m0'",
    ),
    "not a power of two": (
        {"scaling_type": STATIC, "static_scale": 3.0, "scale_format": POW2},
        ValueError,
        r"scale_format=ScaleFormat.POWER_OF_TWO, and static_scale=3\.0 is no power of two",
    ),
}


@pytest.mark.parametrize("case", BAD_CASTS)
def test_a_cast_that_contradicts_itself_is_refused(case):
    arguments, error, message = BAD_CASTS[case]
    with pytest.raises(error, match=message):
        CastConfig(**arguments)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
def test_a_static_scale_is_a_positive_float32_with_a_finite_reciprocal(scale):
    with pytest.raises(ValueError, match="static_scale must be a float32 that is finite and > 0"):
        CastConfig(STATIC, static_scale=scale)


@pytest.mark.parametrize("scale", [2.0**-126, 0.5, 1.0, 2.0**100])
def test_a_power_of_two_is_a_static_power_of_two_scale(scale):
    config = CastConfig(STATIC, static_scale=scale, scale_format=POW2)
    assert config.resolve(E4M3).static_scale == repr(scale)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"history_len": 0}, ValueError, "history_len must be an integer >= 1, got 0"),
        ({"history_len": 1.5}, ValueError, "history_len"),
        ({"history_len": True}, ValueError, "history_len must be an integer >= 1, got True"),
        ({"interval": 0}, ValueError, "interval must be an integer >= 1, got 0"),
        ({"remember_nonfinite": 1}, TypeError, "remember_nonfinite must be True or False, got 1"),
        ({"amax_compute_algo": "mean"}, ValueError, "'max' or 'most_recent', got 'mean'"),
        ({"margin": 0.5}, ValueError, "margin is an exponent of two, an integer .*, got 0.5"),
        ({"margin": 33}, ValueError, "within 32 of 0, got 33"),
        ({"margin": -33}, ValueError, "within 32 of 0, got -33"),
    ],
)
def test_a_delayed_config_that_makes_no_sense_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DelayedScalingConfig(**arguments)


def test_replace_behaves_as_written_out():
    row = CastConfig(granularity=Rowwise(), target_dtype=torch.float8_e4m3fn)
    block = replace(row, granularity=Blockwise(1, 128), scale_format=POW2)
    assert block == CastConfig(
        granularity=Blockwise(1, 128), target_dtype=torch.float8_e4m3fn, scale_format=POW2
    )
    assert row.granularity == Rowwise()


def test_replacing_checks_again():
    with pytest.raises(ValueError, match="delayed scaling keeps one scale per tensor"):
        replace(CastConfig(granularity=Rowwise()), scaling_type=DELAYED)
