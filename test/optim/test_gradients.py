"""Gradients held in float8: their bits, how they accumulate, and how a NaN shows."""

from __future__ import annotations

import copy
from unittest import mock

import oracle
import pytest
import torch
from assertions import assert_bitwise
from fake_cuda import empty, fake_cuda
from meter import CastMeter
from torch import nn

from float8 import Float8Tensor
from float8.kernels import optimizer_step
from float8.optim import AdamW
from float8.optim.gradients import HeldGradient, hold_gradients_in_float8


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7)).to(dtype)


def backward(model: nn.Module, seed: int = 1, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 24, generator=generator).to(next(model.parameters()).dtype)
    out = model(x)
    out.backward(factor * torch.randn(out.shape, generator=generator).to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_cast_as_soon_as_autograd_has_written_them(dtype):
    plain = model_of(dtype)
    model = copy.deepcopy(plain)
    hold_gradients_in_float8(model.parameters())
    backward(model)
    backward(plain)
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, HeldGradient)
        assert p.grad.dtype == dtype
        block = (-1,) * p.dim()
        codes, scale = oracle.quantize(wanted.grad, block, torch.float8_e4m3fn)
        assert_bitwise(p.grad.float8_data, codes)
        assert_bitwise(p.grad.scale, scale)
        assert p.grad.float8_data.untyped_storage().nbytes() == p.numel()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(), (7,), (0, 16), (96, 160), (33, 17), (4, 32, 48)])
def test_a_gradient_on_cuda_has_the_bits_of_the_cpu(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for damaged in (x, x.masked_fill(x > 1.5, torch.inf).masked_fill(x < -1.5, torch.nan)):
        found, wanted = HeldGradient.of(damaged.cuda()), HeldGradient.of(damaged)
        assert_bitwise(found.float8_data.cpu(), wanted.float8_data)
        assert_bitwise(found.scale.cpu(), wanted.scale)


def test_microbatches_add_in_float32_and_are_cast_once_more():
    plain = model_of()
    model = copy.deepcopy(plain)
    hold_gradients_in_float8(model.parameters())
    backward(model)
    first = [p.grad for p in model.parameters()]
    sums = [p.grad.dequantize() for p in model.parameters()]
    backward(model, seed=2, factor=100.0)  # the old scale would saturate
    backward(plain, seed=2, factor=100.0)
    for p, q, earlier, held in zip(
        model.parameters(), plain.parameters(), sums, first, strict=True
    ):
        codes, scale = oracle.quantize(earlier + q.grad, (-1,) * p.dim(), torch.float8_e4m3fn)
        assert p.grad is held  # in the same memory
        assert_bitwise(p.grad.float8_data, codes)
        assert_bitwise(p.grad.scale, scale)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_element_that_is_not_finite_makes_its_gradient_nan_until_it_is_zeroed(bad):
    gradient = torch.randn(6, 8)
    assert HeldGradient.of(gradient).dequantize().isfinite().all()
    gradient[2, 3] = bad
    held = HeldGradient.of(gradient)
    assert held.dequantize().isnan().all()
    accumulated = HeldGradient.of(torch.ones(6, 8)).add_(gradient)
    for each in (held, accumulated.add_(1.0)):
        assert each.dequantize().isnan().all()
        assert_bitwise(each.zero_().dequantize(), torch.zeros(6, 8))
    half = HeldGradient.of(torch.ones(2)).add_(torch.ones(2, dtype=torch.bfloat16), alpha=-0.5)
    assert_bitwise(half.dequantize(), torch.full((2,), 0.5))


def test_on_cuda_a_gradient_is_read_by_one_cast_and_its_one_byte_by_the_step():
    pytest.importorskip("triton")
    with fake_cuda("sm_90"), mock.patch.object(optimizer_step, "fused_step") as fused_step:
        p = nn.Parameter(empty(256, 512, dtype=torch.float16))
        p.grad_dtype = None
        optimizer = AdamW([p], second_moment="float16")
        with CastMeter() as cast:
            p.grad = HeldGradient.of(empty(256, 512), torch.float32)
        optimizer.step()  # allocates its states
        with CastMeter() as step:
            optimizer.step()
    assert cast.ops == ["float8::cast"]
    assert cast.launches == 2
    assert cast.bytes_by_numel == {p.numel(): 5 * p.numel() + 4}
    assert p.numel() not in step.bytes_by_numel
    assert fused_step.call_args.args[0].g.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_with_clipping_and_zeroing_accumulates_nothing_old(set_to_none):
    model = model_of()
    hold_gradients_in_float8(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for _ in range(2):
        backward(model)
        seen.append(model[0].weight.grad.dequantize())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-4, atol=0)
        optimizer.zero_grad(set_to_none=set_to_none)
    assert_bitwise(*seen)


def test_the_handle_ends_it_and_misuse_is_refused():
    model = model_of()
    handle = hold_gradients_in_float8(model.parameters())
    handle.remove()
    backward(model)
    assert not isinstance(model[0].weight.grad, Float8Tensor)
    with pytest.raises(TypeError, match=r"of shape \(3,\) must be a leaf"):
        hold_gradients_in_float8([torch.ones(3)])
