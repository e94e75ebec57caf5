"""A gate with factors of channels: the numbers of the plain gate and of the layer's own factors."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from shapes import pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    RMSNormCast,
    ScalingType,
    SwiGLUCast,
    convert_to_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.fusion import autograd as fusion_autograd
from float8.fusion import producers

DELAYED = CastConfig(scaling_type=ScalingType.DELAYED)
SMOOTH = Float8LinearConfig(smooth_input=True)
CONFIGS = {"dynamic": SMOOTH, "delayed": Float8LinearConfig(DELAYED, smooth_input=True)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
F_, N = 48, 32  # features of the gate, and of the layer


def by_ops():
    """Take the path of a GPU on the CPU: the ops, which run their definitions here."""
    pytest.importorskip("triton")
    fusion_autograd._load()
    return mock.patch.object(producers, "runs_producer", lambda device, emulate: not emulate)


def gate_and_up(dtype=torch.float32, shape=(2, 16, F_)):
    """Their channels differ by factors of up to 2^14, the gate's result by up to 2^20."""
    channels = 2.0 ** torch.linspace(-7, 7, shape[-1]).roll(5)
    return (
        (torch.randn(shape) * 2.0 ** torch.linspace(-6, 6, shape[-1])).to(dtype),
        (torch.randn(shape) * channels).to(dtype),
    )


@pytest.mark.parametrize("ops", [False, True], ids=["plain", "ops"])
@pairs(dtype=DTYPES, config=list(CONFIGS))
def test_the_result_is_the_plain_gates_and_the_layers_own_factors(ops, dtype, config):
    """Codes, output, gradients and histories, to the bit."""
    layer = Float8Linear(F_, N, dtype=dtype, config=CONFIGS[config])
    module, twin = SwiGLUCast(CONFIGS[config]), copy.deepcopy(layer)
    for _ in range(3):  # delayed: dynamic, then by its history
        gate, up = gate_and_up(dtype)
        g = torch.randn(2, 16, N).to(dtype)
        with by_ops() if ops else mock.patch.object(fusion_autograd, "_load"):
            y = module(gate, up).requires_grad_()
            found = layer(y)
        plain = (F.silu(gate.float()) * up.float()).to(dtype).requires_grad_()
        expected = twin(plain)
        assert isinstance(y, Float8Tensor) and y.block == (-1, -1, 1) and y.dtype == dtype
        assert_bitwise(found.detach(), expected.detach(), (dtype, config))
        of_y = torch.autograd.grad(found, (y, layer.weight), g)
        of_plain = torch.autograd.grad(expected, (plain, twin.weight), g)
        for one, other in zip(of_y, of_plain, strict=True):
            assert_bitwise(one, other, (dtype, config))
        for model in (module, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in module.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name.split(".")[-1]), "", name)


def test_values_of_small_channels_survive():
    """Each channel's error is that of E4M3; by one scale for the tensor, some are lost."""
    gate, up = gate_and_up(shape=(64, F_))
    exact = F.silu(gate.double()) * up.double()
    worst = {}
    for config in (SMOOTH, Float8LinearConfig()):
        y = SwiGLUCast(config)(gate, up).dequantize().double()
        worst[config.smooth_input] = ((y - exact).norm(dim=0) / exact.norm(dim=0)).max()
    assert worst[True] < 0.06 and worst[False] > 0.9


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13 = nn.Linear(64, 2 * F_, bias=False)
        self.gate = SwiGLUCast(SMOOTH)
        self.w2 = nn.Linear(F_, 64, bias=False)

    def forward(self, x):
        return x + self.w2(self.gate(self.w13(x)))


def converted():
    model = FeedForward()
    with torch.no_grad():
        model.w13.weight[:3] *= 300  # outliers, in three channels
    convert_to_float8_training(model, config=SMOOTH, module_filter_fn=lambda _, fqn: fqn == "w2")
    return convert_to_float8_training(model, config=RECIPES["tensorwise"])


def test_in_a_model_compiled_and_checkpointed():
    eager = converted()
    compiled, recomputed = copy.deepcopy(eager), copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(2, 32, 64)
    y = eager(x)
    y.backward(g)
    with high_precision(eager):
        exact = eager(x)
    assert (y - exact).norm() < 0.1 * exact.norm()
    for one in (run(x), checkpoint(recomputed, x, use_reentrant=False)):
        one.backward(g)
        assert_bitwise(one.detach(), y.detach())
    for model in (compiled, recomputed):
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert_bitwise(one.grad, other.grad)


@pytest.mark.parametrize("ops", [False, True], ids=["plain", "ops"])
@pytest.mark.parametrize("shape", [(F_,), (2, 3, F_), (0, F_), (2, 0, F_), (1, 1)])
def test_inputs_of_any_rank_and_empty_batches(shape, ops):
    gate = torch.randn(shape, requires_grad=True)
    layer = Float8Linear(shape[-1], N, config=SMOOTH)
    with by_ops() if ops else mock.patch.object(fusion_autograd, "_load"):
        y = SwiGLUCast(SMOOTH)(gate, gate)
    assert y.shape == shape and y.block == (-1,) * (len(shape) - 1) + (1,)
    out = layer(y)
    out.sum().backward()
    assert gate.grad.shape == shape and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad):
    gate, up = gate_and_up()
    up[0, 3, 7] = bad
    y = SwiGLUCast(SMOOTH)(gate, up)
    out = Float8Linear(F_, N, config=SMOOTH)(y)
    plain = Float8Linear(F_, N, config=SMOOTH)(F.silu(gate) * up)
    assert torch.equal(out.isnan(), plain.isnan()) and out.isnan().any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Float8Linear(F_, N)(SwiGLUCast(SMOOTH)(*gate_and_up())), "allxallx1 scales"),
        (lambda: Float8Linear(F_, N, config=SMOOTH)(SwiGLUCast()(*gate_and_up())), "SwiGLUCast"),
        (lambda: SwiGLUCast(replace(RECIPES["rowwise"], smooth_input=True)), "casts once"),
        (lambda: RMSNormCast(64, config=SMOOTH), "no factors of channels"),
    ],
)
def test_a_gate_with_factors_and_its_reader_need_each_other(call, words):
    with pytest.raises(ValueError, match=words):
        call()
