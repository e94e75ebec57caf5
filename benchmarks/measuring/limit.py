"""The lower bound of a float8 step's time: its three GEMMs, and the least bytes that casts move.

    limit = time(three products, operands already cast) + bytes / bandwidth

Both are measured, in the same rounds as the layers: the products in the recipe's own granularity,
operands contiguous along the contraction as Hopper's tensor cores read them, and the bandwidth by
copying a buffer that no cache holds (a byte read and a byte written are two).

The least bytes of one bfloat16 operand, which two products read:

    writes   1 per element for each use in float8: the two uses contract along different
             dimensions, so that each has its own layout
    reads    2 per element and pass over the operand. One pass is enough where a scale is known
             beforehand (static, delayed) or covers a tile or a row, which a kernel holds on chip.
             A scale of the whole tensor takes a pass before the cast; so do the scales of rows
             and of columns together, as only one of them can be on chip.

`of_limit` of a row is limit / time, at most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.contenders import Operands
from benchmarks.measuring.shapes import Shape
from float8 import Float8LinearConfig, ScalingType, kernels
from float8.config import Gemm, LinearPlan, OperandCast
from float8.granularity import WHOLE
from float8.linear.scaling import quantize

BF16_BYTES, FLOAT8_BYTES = 2, 1
COPY = "copy"
Products = Callable[[], object]


def passes(uses: Sequence[OperandCast]) -> int:
    """How often an operand must be read for its casts."""
    dynamic = [use for use in uses if use.scaling_type is ScalingType.DYNAMIC]
    whole = any(use.block == (WHOLE, WHOLE) for use in dynamic)
    rows = sum(use.block[1] == WHOLE for use in dynamic)
    return 2 if whole or rows > 1 else min(1, len(uses))


def least_bytes(shape: Shape, plan: LinearPlan) -> int:
    """Bytes that the casts of one step read and write at least."""
    sizes_and_uses = (
        (shape.M * shape.K, (plan.output.a, plan.grad_weight.b)),
        (shape.N * shape.K, (plan.output.b, plan.grad_input.b)),
        (shape.M * shape.N, (plan.grad_input.a, plan.grad_weight.a)),
    )
    total = 0
    for size, both in sizes_and_uses:
        uses = [use for use in both if use is not None]
        total += size * (passes(uses) * BF16_BYTES + len(uses) * FLOAT8_BYTES)
    return total


def product(gemm: Gemm, a: Tensor, b: Tensor) -> Products:
    """`a @ b.T` as a GEMM of the plan, its operands cast beforehand."""
    if gemm.a is None or gemm.b is None:
        return lambda: a @ b.t()
    a8, a_scale = quantize(a.contiguous(), gemm.a)
    b8, b_scale = quantize(b.contiguous(), gemm.b)
    run = partial(kernels.scaled_mm, out_dtype=a.dtype, use_fast_accum=gemm.use_fast_accum)
    return partial(run, a8, a_scale, b8, b_scale, gemm.a.block, gemm.b.block)


def products(plan: LinearPlan, operands: Operands) -> Products:
    """The three products of a training step, one after the other."""
    x, w, g = operands.x.detach(), operands.linear.weight.detach(), operands.grad_output
    three = (
        product(plan.output, x, w),
        product(plan.grad_input, g, w.t()),
        product(plan.grad_weight, g.t(), x.t()),
    )

    def run() -> None:
        for each in three:
            each()

    return run


def signature(plan: LinearPlan) -> str:
    """What the time of a plan's products depends on: recipes that share it share the products."""
    gemms = (plan.output, plan.grad_input, plan.grad_weight)
    sides = [
        [None if side is None else (side.format.name, side.block) for side in (gemm.a, gemm.b)]
        for gemm in gemms
    ]
    return f"products {[(*s, gemm.use_fast_accum) for s, gemm in zip(sides, gemms, strict=True)]}"


@dataclass(frozen=True)
class Copy:
    """A copy of a buffer larger than caches."""

    source: Tensor
    target: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Copy:
        size = 2**28 if device.type == "cuda" else 2**26
        source = torch.ones(size, dtype=torch.uint8, device=device)
        return cls(source, torch.empty_like(source))

    def __call__(self) -> None:
        self.target.copy_(self.source)

    @property
    def bytes_moved(self) -> int:
        return 2 * self.source.nbytes


def makers(
    configs: Sequence[Float8LinearConfig], operands: Operands
) -> dict[str, Callable[[], Products]]:
    """What the limits of these recipes need measured."""
    plans = [config.plan for config in configs]
    needed: dict[str, Callable[[], Products]] = {COPY: partial(Copy.on, operands.x.device)}
    return needed | {signature(plan): partial(products, plan, operands) for plan in plans}


def seconds(
    shape: Shape, plan: LinearPlan, samples: Mapping[str, list[float]], copied: int
) -> list[float] | None:
    """The limit in each round, of which one copied so many bytes; None if a product did not run."""
    if signature(plan) not in samples:
        return None
    copies = least_bytes(shape, plan) / copied
    return [p + copies * c for p, c in zip(samples[signature(plan)], samples[COPY], strict=True)]
