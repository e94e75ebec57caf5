"""A step of the library's autograd function on FakeTensors of a CUDA device, without a GPU.

Autograd itself cannot handle CUDA tensors in a CPU build, so forward and backward are called one
after the other, by hand.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import Float8LinearConfig
from float8.experts.grouped_mm import GroupedLinearFunction
from float8.kernels import products
from float8.linear.autograd import NO_FACTORS, STATELESS, Call, Factors
from float8.linear.casts import DelayedState
from float8.linear.layer import function_of
from float8.linear.plan import USED, plan_of

F32 = torch.float32


class Context:
    """What the autograd function needs of its context."""

    saved_tensors: tuple[Tensor | None, ...]

    def __init__(self, *needs_input_grad: bool) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def empty(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def fake_cuda(arch: str, mode: FakeTensorMode | None = None) -> ExitStack:
    """FakeTensors on a GPU of this architecture, whose constants are there already."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(products, "architecture", return_value=arch))
    stack.callback(USED.clear)
    USED.clear()
    stack.enter_context(mode or FakeTensorMode())
    stack.enter_context(torch.no_grad())
    scale = empty(1, 1, dtype=F32)
    stack.enter_context(mock.patch("float8.linear.casts.constant", return_value=scale))
    return stack


class Results(NamedTuple):
    """Of a step; ``saved`` are the tensors that backward read."""

    out: Tensor
    grad_x: Tensor
    grad_w: Tensor
    grad_bias: Tensor | None
    saved: tuple[Tensor | None, ...]


def step(
    config: Float8LinearConfig,
    x: Tensor,
    w: Tensor,
    g: Tensor,
    bias: Tensor | None = None,
    weight: Any = None,
    offs: Tensor | None = None,
    factors: Factors = NO_FACTORS,
) -> Results:
    """Forward and backward, within `fake_cuda`; ``weight`` is w in float8, ``offs`` of groups."""
    states: Any = STATELESS
    if config.uses_delayed_scaling:
        states = tuple(DelayedState(empty(dtype=F32), empty(dtype=F32), True) for _ in range(3))
    plan = plan_of(config, x, grouped=offs is not None)
    ctx = Context(True, True, bias is not None, False, False)
    call = Call(plan, states, offs is None, weight, factors, has_backward=True)
    if offs is None:
        function = function_of(config)
        out = function.forward(ctx, x, w, bias, call)
        return Results(out, *function.backward(ctx, g)[:3], ctx.saved_tensors)
    out = GroupedLinearFunction.forward(ctx, x, w, call, offs)
    grads = GroupedLinearFunction.backward(ctx, g)
    return Results(out, *grads[:2], None, ctx.saved_tensors)
