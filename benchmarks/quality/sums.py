"""The sum of a Hopper tensor core (H100), bit by bit on a CPU.

An instruction adds 32 products of float8 values to an accumulator c. By MMA-Sim (arXiv 2511.10909,
in all its tests equal to the hardware), with ``exponent(a b) = exponent(a) + exponent(b)``::

    top = the largest exponent of c and of the 32 products
    c   = trunc(c + sum of the products), each term first cut to a multiple of 2^(top - bits)

Both cuts are towards zero, and the second leaves ``bits`` of c's mantissa: 13, which DeepSeek-V3
(arXiv 2412.19437, section 3.3.2) calls "around 14 bits" and SageAttention2 (arXiv 2411.10958) FP22.
Fast accumulation (`GemmConfig.use_fast_accum`) keeps c over the whole contraction. Precise products
add c to a float32 number and start again after every 128 terms.

A term below the quantum 2^(top - bits) counts as zero. A sum that grows to 2^bits times its terms
therefore stops growing: what matters is the number of terms by 2^bits, and a sum of few bits shows
what happens in a long one.

All numbers are exact in float32 until they are cut, so the loops may be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from float8 import kernels
from float8.kernels import Float8Matrix

BITS = 13  # of the accumulator's mantissa, beside the leading one
STEP, PROMOTED = 32, 128  # terms of an instruction, and between promotions
LARGE = 1 << 12  # results for which compiling pays
EXPONENT, TINY = 0x7F800000, 2.0**-100  # float32's exponent bits; less than any product


def product(a_MK: Tensor, b_NK: Tensor, bits: int = BITS, every: int | None = None) -> Tensor:
    """``a @ b.T`` of float8 data, in float32 (M, N).

    Args:
        a_MK, b_NK: E4M3 or E5M2, finite.
        bits: of the accumulator.
        every: terms between promotions, a multiple of `STEP`; None is fast accumulation.
    """
    padding = (0, 0, 0, -a_MK.shape[1] % STEP)
    a, b = (F.pad(x.float().t(), padding).contiguous() for x in (a_MK, b_NK))
    powers = _powers(a, a_MK.dtype), _powers(b, b_NK.dtype)
    out = torch.zeros(a.shape[1], b.shape[1])
    add, c = (_add_compiled if out.numel() >= LARGE else _add), torch.zeros_like(out)
    for first in range(0, len(a), STEP):
        terms = slice(first, first + STEP)
        top = _leading(c).clamp_(min=TINY)
        c = add(c, top, a[terms], b[terms], powers[0][terms], powers[1][terms], 2.0**bits)
        c = (c.view(torch.int32) & -(1 << (23 - bits))).view(torch.float32)
        if every and (first + STEP) % every == 0:
            out, c = out + c, torch.zeros_like(c)
    return out + c


def _add(
    c: Tensor, top: Tensor, a_KM: Tensor, b_KN: Tensor, a_powers: Tensor, b_powers: Tensor,
    steps: float,
) -> Tensor:  # fmt: skip
    """c plus `STEP` products, all cut to multiples of ``top / steps``; top is a power of two."""
    for k in range(STEP):
        top = torch.maximum(top, a_powers[k][:, None] * b_powers[k])
    per_quantum = steps / top
    total = (c * per_quantum).trunc()
    for k in range(STEP):
        total = total + (a_KM[k][:, None] * b_KN[k] * per_quantum).trunc()
    return total / per_quantum


_add_compiled = torch.compile(_add, dynamic=True)


def _leading(x: Tensor) -> Tensor:
    """2^exponent of float32 numbers; 0 for 0."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


def _powers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent of float8 numbers; a subnormal has the smallest normal's exponent."""
    found = _leading(x.abs().clamp(min=torch.finfo(dtype).smallest_normal))
    return found.masked_fill_(x == 0, 0.0)


@contextmanager
def fast_gradients(bits: int) -> Iterator[None]:
    """Within it, layers of recipe ``tensorwise`` sum both gradients fast, in so many bits.

    These are the products with an operand in E5M2. The output keeps float32 sums.
    """
    plain = kernels.multiply

    def multiply(a: Float8Matrix, b: Float8Matrix, gemm: Any, bias_N: Tensor | None = None) -> Any:
        if torch.float8_e5m2 not in (a.data.dtype, b.data.dtype):
            return plain(a, b, gemm, bias_N)
        return (product(a.data, b.data, bits) * a.scale * b.scale.t()).to(gemm.out_dtype)

    with patch.object(kernels, "multiply", multiply):
        yield
