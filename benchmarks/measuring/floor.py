"""The lower bound of emulated float8 on a CPU: nn.Linear's time, the casts and dequantisation.

A CPU multiplies in bfloat16. An emulation multiplies as nn.Linear does, and before that each
operand of each product must be rounded to float8 and converted back to bfloat16. So

    floor = time(nn.Linear's step, and each cast that the recipe asks for, once, and its decoding)

with this library's casts; operands that two products share are cast once. It is timed in turns with
the layers: compare a layer's ratio with that row, not with 1. With AMX a product takes less time
than the casts of its operands, and the floor of an eager step is far above 1.
On processors without bfloat16 instructions (AMX, AVX512-BF16) float32 products are the faster ones,
and an emulation that multiplies in float32 is then faster than this bound, and than nn.Linear.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measuring.step import Step
from float8 import kernels
from float8.config import LinearPlan, OperandCast
from float8.granularity import WHOLE
from float8.linear.scaling import bind_and_cast

FLOOR = "floor "
BY_ROW = ((WHOLE, WHOLE), (1, WHOLE))  # the data can be multiplied without dequantising


def there_and_back(operand: Tensor, cast: OperandCast) -> Tensor:
    data, scale = bind_and_cast(operand, cast)
    if cast.block in BY_ROW:
        return kernels.decode(data)
    return kernels.dequantize(data, scale, cast.block, operand.dtype)


def casts(plan: LinearPlan, step: Step) -> list[tuple[Tensor, OperandCast]]:
    """Every operand that the plan casts, in the orientation of the product that reads it."""
    x, w, g = step.x.detach(), next(step.layer.parameters()).detach(), step.grad_output
    wanted = [
        (x, plan.output.a, False),
        (w, plan.output.b, False),
        (g, plan.grad_input.a, False),
        (w.t(), plan.grad_input.b, plan.reuses_weight),
        (g.t(), plan.grad_weight.a, plan.reuses_grad_output),
        (x.t(), plan.grad_weight.b, plan.reuses_input),
    ]
    return [(o, cast) for o, cast, reused in wanted if cast is not None and not reused]


def floor(plan: LinearPlan, linear: Step, mode: str) -> Callable[[], None]:
    """nn.Linear's step and the casts of a recipe, one after the other."""
    work = casts(plan, linear)

    def cast_all() -> list[Tensor]:
        return [there_and_back(operand, cast) for operand, cast in work]

    run = torch.compile(cast_all, fullgraph=True, dynamic=False) if mode == "compiled" else cast_all

    def step() -> None:
        linear()
        run()

    return step
