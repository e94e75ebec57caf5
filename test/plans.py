"""Resolved casts written out by hand, for tests of what a config means."""

from __future__ import annotations

from float8.config import CastConfig, OperandCast, ScalingType
from float8.config.gemms import ThreeGemms
from float8.formats import E4M3, ScaleFormat

DYNAMIC, DELAYED = ScalingType.DYNAMIC, ScalingType.DELAYED
STATIC, DISABLED = ScalingType.STATIC, ScalingType.DISABLED
OFF = CastConfig(DISABLED)
TENSOR, ROW, B1, B128, MX = (-1, -1), (1, -1), (1, 128), (128, 128), (1, 32)
FLOAT32, POW2, E8M0 = ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO, ScaleFormat.E8M0


# The override of each operand's second use -> the place in `casts_of` that it changes.
SECOND_USES = {
    "cast_config_weight_for_grad_input": 3,
    "cast_config_grad_output_for_grad_weight": 4,
    "cast_config_input_for_grad_weight": 5,
}


def cast(block, fmt=E4M3, scaling=DYNAMIC, scales=FLOAT32, static=None) -> OperandCast:
    return OperandCast(scaling, fmt, block, scales, static)


def casts_of(gemms: ThreeGemms) -> list[OperandCast | None]:
    return [operand for gemm in gemms.all for operand in (gemm.a, gemm.b)]
