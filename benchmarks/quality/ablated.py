"""A linear layer of which each of the six tensorwise casts is on or off.

A layer has three GEMMs of two operands each. Of M tokens, K input and N output features:

    output       out_MN = x_MK @ w_NK.T          casts "input for output", "weight for output"
    grad_input   g_MK = g_MN @ w_KN.T            "grad_output for grad_input", "weight for ..."
    grad_weight  g_NK = g_NM @ x_KM.T            "grad_output for grad_weight", "input for ..."

No hardware multiplies float8 by bfloat16, so `Float8LinearConfig` switches a GEMM on or off, not a
cast. Here a cast rounds its operand as recipe ``tensorwise`` does, to codes and a scale, and the
GEMM multiplies the codes in the compute dtype, which holds them exactly. The scales multiply the
product. With all six casts this is the real layer's arithmetic on a CPU, and with none that of
``nn.Linear``, both to the bit.

A *part* is a cast, an operand (its two casts) or a GEMM (the casts of its operands).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import CastConfig, Float8LinearConfig, Float8Tensor, ScalingType
from float8.formats import E4M3, E5M2

PAIRS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
CASTS = tuple(f"{operand} for {gemm}" for gemm, pair in PAIRS.items() for operand in pair)
GEMMS, OPERANDS = tuple(PAIRS), ("input", "weight", "grad_output")
PARTS = (*GEMMS, *OPERANDS, *CASTS)
ONLY, ALL_BUT = "only ", "all but "
ABLATIONS = tuple(which + part for part in PARTS for which in (ONLY, ALL_BUT))


def casts_of(part: str) -> frozenset[str]:
    """The casts of a part.

    Raises:
        ValueError: for an unknown part.
    """
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; parts are {', '.join(PARTS)}")
    return frozenset(cast for cast in CASTS if part in (cast, *cast.split(" for ")))


def part_of(ablation: str) -> str:
    """The part that a name of `ABLATIONS` speaks of."""
    return ablation.removeprefix(ONLY).removeprefix(ALL_BUT)


def casts_in(ablation: str) -> frozenset[str]:
    """The casts that are on under a name of `ABLATIONS`."""
    casts = casts_of(part_of(ablation))
    return casts if ablation.startswith(ONLY) else frozenset(CASTS) - casts


def config_of(casts: frozenset[str]) -> Float8LinearConfig:
    """Recipe ``tensorwise`` with these casts alone: both casts of each GEMM, or none."""

    def cast(name: str) -> CastConfig:
        return CastConfig() if name in casts else CastConfig(scaling_type=ScalingType.DISABLED)

    return Float8LinearConfig(
        cast("input for output"),
        cast("weight for output"),
        cast("grad_output for grad_input"),
        cast("input for grad_weight"),
        cast("weight for grad_input"),
        cast("grad_output for grad_weight"),
    )


class AblatedLinear(nn.Linear):
    """An ``nn.Linear`` without a bias, with the casts that ``casts`` names."""

    casts: frozenset[str] = frozenset()

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of autocast or of the input."""
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
        x_MK = input.flatten(0, -2).to(dtype)
        out_MN: Tensor = _Product.apply(x_MK, self.weight.to(dtype), self.casts)
        return out_MN.unflatten(0, input.shape[:-1])


def ablate(model: nn.Module, casts: frozenset[str] = frozenset()) -> list[AblatedLinear]:
    """Make the linear layers of a model, but for its head, ablated ones; parameters stay.

    Returns:
        the layers, whose ``casts`` may be set again.
    """
    layers: list[AblatedLinear] = []
    for fqn, module in model.named_modules():
        if type(module) is nn.Linear and fqn != "head":
            assert module._parameters["bias"] is None
            layer: Any = module
            layer.__class__ = AblatedLinear
            layer.casts = casts
            layers.append(layer)
    return layers


class _Product(torch.autograd.Function):
    FORMATS: ClassVar = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, casts: frozenset[str]) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.casts = casts
        return _multiply("output", casts, x_MK, w_NK)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        x_MK, w_NK = ctx.saved_tensors
        grad_x = _multiply("grad_input", ctx.casts, g_MN, w_NK.t())
        return grad_x, _multiply("grad_weight", ctx.casts, g_MN.t(), x_MK.t()), None


def _multiply(gemm: str, casts: frozenset[str], a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of the operands of a GEMM, cast or not."""
    scale = None
    operands = []
    for operand, matrix in zip(PAIRS[gemm], (a, b), strict=True):
        if f"{operand} for {gemm}" in casts:
            cast = Float8Tensor.from_high_precision(matrix, _Product.FORMATS[operand])
            scale = cast.scale if scale is None else scale * cast.scale
            operands.append(cast.float8_data.to(matrix.dtype))
        else:
            operands.append(matrix)
    product = F.linear(*operands)
    return product if scale is None else product * scale.reshape(())
