"""What a grouped product computes forward and backward, in float64, one group after another.

The casts are those of `linear_oracle.GEMMS`. A tensorwise scale of tokens is one for all tokens in
groups; every other scale is of one group or one expert, so its cast is that of a layer.
"""

from __future__ import annotations

import linear_oracle
import oracle
import torch
from linear_oracle import Product
from torch import Tensor


def expected(
    recipe: str, x: Tensor, w_EKN: Tensor, ends: list[int], g: Tensor
) -> dict[str, Product]:
    """Output (T, N), grad_input (T, K) and grad_weight (E, K, N); zero where there is no token."""
    table = linear_oracle.GEMMS[recipe]
    used = slice(0, ends[-1])
    results = {
        "output": _zeros(g.shape, g.dtype),
        "grad_input": _zeros(x.shape, x.dtype),
        "grad_weight": _zeros(w_EKN.shape, w_EKN.dtype),
    }
    begin = 0
    for expert, end in enumerate(ends):
        rows, begin = slice(begin, end), end
        if rows.start == rows.stop:
            continue
        w_KN, x_part, g_part = w_EKN[expert], x[rows], g[rows]
        for name, where, a, b, whole in (
            ("output", rows, x_part, w_KN.t(), (x[used], None)),
            ("grad_input", rows, g_part, w_KN, (g[used], None)),
            ("grad_weight", expert, x_part.t(), g_part.t(), (x[used], g[used])),
        ):
            operands = table[name]
            if name == "grad_weight" and operands is not None:
                operands = operands[::-1]  # here grad_weight is (K, N)
            product = _product(operands, a, b, *whole)
            results[name].exact[where] = product.exact
            results[name].plain[where] = product.plain
    return results


def _zeros(shape, dtype) -> Product:
    return Product(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=dtype))


def _product(operands, a, b, a_whole, b_whole) -> Product:
    if operands is None:
        return Product(a.double() @ b.double().t(), a @ b.t())
    a_codes, a_scale = _cast(a, operands[0], a_whole)
    b_codes, b_scale = _cast(b, operands[1], b_whole)
    exact = (a_codes * a_scale) @ (b_codes * b_scale).t()
    if operands[0][1][1] == -1:
        product = a_codes.float() @ b_codes.float().t()
        if a.dtype == torch.bfloat16:
            product = product.bfloat16().float()
        plain = product * a_scale[:, :1].float() * b_scale[:, :1].float().t()
    else:
        plain = (a_codes * a_scale).float() @ (b_codes * b_scale).float().t()
    return Product(exact, plain.to(a.dtype))


def _cast(x: Tensor, operand, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values of the codes, and the scale of each element; ``whole`` has all tokens, in rows."""
    dtype, block, scaling = operand
    x = x.contiguous()
    if not isinstance(scaling, str):
        scale = torch.full((1, 1), scaling)
    elif block == (-1, -1) and whole is not None:
        scale = oracle.scales(whole.contiguous(), block, dtype, scaling)
    else:
        scale = oracle.scales(x, block, dtype, scaling)
    codes = oracle.cast(x, scale, block, dtype)
    spread = oracle.spread(oracle.scale_values(scale), tuple(x.shape), block)
    return oracle.table(dtype)[codes.long()], spread
