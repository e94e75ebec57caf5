"""What a grouped product computes forward and backward, in float64, one group after another.

The casts are those of `linear_oracle.GEMMS`. A tensorwise scale of tokens is one for all tokens in
groups; every other scale is of one group or one expert, so its cast is that of a layer.
"""

from __future__ import annotations

import linear_oracle
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
        name: Product(torch.zeros(like.shape, dtype=torch.float64), torch.zeros_like(like))
        for name, like in (("output", g), ("grad_input", x), ("grad_weight", w_EKN))
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
            found = linear_oracle.product(operands, a, b, wholes=whole)
            results[name].exact[where] = found.exact
            results[name].plain[where] = found.plain
    return results
