"""What a float8 linear layer computes, in float64, from a table of its own.

`GEMMS` says for each recipe how the two operands of each GEMM are cast, in GEMM-operand orientation
(last dimension = contraction); it is written out by hand and shares nothing with
``float8/config/``. `expected` quantises with the oracle's own casts and multiplies in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, ONE, SQUARE, MX = (-1, -1), (1, -1), (1, 128), (128, 128), (1, 32)
MX_SQUARE = (32, 32)

# (dtype, block, scale format or a fixed scale) of operand a and b; None: high precision.
Operand = tuple[torch.dtype, tuple[int, int], str | float]
_TENSORWISE = {
    "output": ((E4M3, TENSOR, "float32"), (E4M3, TENSOR, "float32")),
    "grad_input": ((E5M2, TENSOR, "float32"), (E4M3, TENSOR, "float32")),
    "grad_weight": ((E5M2, TENSOR, "float32"), (E4M3, TENSOR, "float32")),
}
_MX = ((E4M3, MX, "e8m0"), (E4M3, MX, "e8m0"))
_MX_2D = ((E4M3, MX, "e8m0"), (E4M3, MX_SQUARE, "e8m0"))
_ROWWISE = ((E4M3, ROW, "power_of_two"), (E4M3, ROW, "power_of_two"))
GEMMS: dict[str, dict[str, tuple[Operand | None, Operand | None] | None]] = {
    "tensorwise": _TENSORWISE,
    "delayed": _TENSORWISE,
    "unit": {
        "output": ((E4M3, TENSOR, 1.0), (E4M3, TENSOR, 1.0)),
        "grad_input": ((E5M2, TENSOR, 1.0), (E4M3, TENSOR, 1.0)),
        "grad_weight": ((E5M2, TENSOR, 1.0), (E4M3, TENSOR, 1.0)),
    },
    "rowwise": {"output": _ROWWISE, "grad_input": _ROWWISE, "grad_weight": _ROWWISE},
    "rowwise_with_gw_hp": {
        "output": _ROWWISE,
        "grad_input": ((E4M3, ROW, "power_of_two"), (E4M3, TENSOR, "power_of_two")),
        "grad_weight": None,
    },
    "mxfp8": {"output": _MX, "grad_input": _MX, "grad_weight": _MX},
    "mxfp8_2d": {"output": _MX_2D, "grad_input": _MX_2D, "grad_weight": _MX},
    "blockwise": {
        "output": ((E4M3, ONE, "power_of_two"), (E4M3, SQUARE, "power_of_two")),
        "grad_input": ((E4M3, ONE, "power_of_two"), (E4M3, SQUARE, "power_of_two")),
        "grad_weight": ((E4M3, ONE, "power_of_two"), (E4M3, ONE, "power_of_two")),
    },
}
# What no hardware multiplies. An operand that is None is in high precision.
_E5M2, _X64 = (E5M2, TENSOR, "float32"), (E4M3, (1, 64), "e8m0")
_BYTE, _FLOOR = (E4M3, TENSOR, "e8m0"), (E5M2, ROW, "e8m0_floor")
_WEIGHT, _INPUT = (E4M3, ROW, "float32"), (E4M3, ONE, "float32")
_BLOCK, _SMALL = (E4M3, (1, 32), "float32"), (E4M3, (16, 24), "power_of_two")
_NAMES = ("output", "grad_input", "grad_weight")
EMULATED = {
    "E5M2": dict.fromkeys(_NAMES, (_E5M2, _E5M2)),
    "E8M0 with 1x64": dict.fromkeys(_NAMES, (_X64, _X64)),
    "E8M0 of tensors and rows": dict(
        zip(_NAMES, ((_BYTE, _FLOOR), (_FLOOR, _FLOOR), (_FLOOR, _BYTE)), strict=True)
    ),
    "1x32 in float32": dict(
        zip(_NAMES, ((_BLOCK, _SMALL), (_E5M2, _SMALL), (_E5M2, _BLOCK)), strict=True)
    ),
    "weight only": {"output": (None, _WEIGHT), "grad_input": (None, _WEIGHT), "grad_weight": None},
    "input only": {"output": (_INPUT, None), "grad_input": None, "grad_weight": (None, _INPUT)},
    "gradient only": {
        "output": None,
        "grad_input": (_FLOOR, None),
        "grad_weight": (_FLOOR, None),
    },
}
GEMMS |= EMULATED


@dataclass(frozen=True)
class Product:
    """One result: exact for the quantised operands, and computed plainly in the result's dtype."""

    exact: Tensor
    plain: Tensor


def expected(
    recipe: str, x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor
) -> dict[str, Product]:
    """The four results of forward and backward, for matrices x (M, K), w (N, K), g (M, N)."""
    table = GEMMS[recipe]
    results = {
        "output": product(table["output"], x, w, bias),
        "grad_input": product(table["grad_input"], g, w.t(), None),
        "grad_weight": product(table["grad_weight"], g.t(), x.t(), None),
    }
    exact = g.double().sum(0)
    results["grad_bias"] = Product(exact, g.sum(0))
    return results


def product(
    operands: tuple[Operand | None, Operand | None] | None,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    wholes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Product:
    """``a @ b.T + bias``; ``wholes`` are the tensors of which a and b share a tensorwise scale."""
    if operands is None:
        exact, plain = a.double() @ b.double().t(), a @ b.t()
    else:
        (a_codes, a_scale), (b_codes, b_scale) = map(_cast, (a, b), operands, wholes)
        exact = (a_codes * a_scale) @ (b_codes * b_scale).t()
        by_row = None not in operands and operands[0][1][1] == operands[1][1][1] == -1
        if by_row:  # multiply codes, round, scale, round
            codes = a_codes.float() @ b_codes.float().t()
            if a.dtype == torch.bfloat16:  # float16 would overflow, float32 has nothing to round
                codes = codes.bfloat16().float()
            plain = (codes * a_scale[:, :1].float() * b_scale[:, :1].float().t()).to(a.dtype)
        else:
            dtype = a.dtype if None in operands else torch.float32  # to which it is dequantised
            a32, b32 = ((a_codes * a_scale).to(dtype), (b_codes * b_scale).to(dtype))
            plain = (a32.float() @ b32.float().t()).to(a.dtype)
    if bias is not None:
        exact, plain = exact + bias.double(), plain + bias
    return Product(exact, plain)


def _cast(x: Tensor, operand: Operand | None, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values of the codes, and the scale of every element, in float64."""
    if operand is None:
        return x.double(), torch.ones_like(x, dtype=torch.float64)
    (dtype, block, scaling), x = operand, x.contiguous()
    if isinstance(scaling, str):
        shares_scale = whole is not None and block == TENSOR
        scale = oracle.scales(whole.contiguous() if shares_scale else x, block, dtype, scaling)
    else:
        scale = torch.full((1, 1), scaling)
    values = oracle.table(dtype)[oracle.cast(x, scale, block, dtype).long()]
    return values, oracle.spread(oracle.scale_values(scale), tuple(x.shape), block)
