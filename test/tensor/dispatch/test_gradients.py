"""Operations on gradients in float8: against the same operation on the dequantised tensor."""

from __future__ import annotations

import math

import pytest
import torch
from assertions import assert_bitwise
from shapes import Case, pairs
from torch import Tensor

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise

KINDS = [Tensorwise(), Rowwise(), Blockwise(4, 5)]


def example(granularity=None, fmt=E4M3, dtype=torch.float32, seed=1) -> Float8Tensor:
    x = Case((6, 24), dtype, fill="normal", seed=seed).make()
    return Float8Tensor.from_high_precision(x, fmt, granularity)


@pairs(
    factor=[0.3, -2.0, torch.tensor(0.3), torch.tensor(-1.5, dtype=torch.float64)],
    granularity=KINDS,
    fmt=[E4M3, E5M2],
)
def test_a_factor_multiplies_the_scale_and_keeps_the_codes(factor, granularity, fmt):
    x = example(granularity, fmt)
    before, magnitudes = x.dequantize(), x.float8_data.view(torch.uint8) & 127
    assert x.mul_(factor) is x
    wanted = before * factor
    if granularity == Tensorwise():
        assert torch.equal(x.float8_data.view(torch.uint8) & 127, magnitudes)
        torch.testing.assert_close(x.dequantize(), wanted, rtol=2e-7, atol=0)
    else:  # cast once more: half a step of the format
        torch.testing.assert_close(x.dequantize(), wanted, rtol=2**-3, atol=1e-3)


@pytest.mark.parametrize("divisor", [3, -0.3, torch.tensor(3.0)])
@pytest.mark.parametrize("granularity", KINDS, ids=str)
def test_a_gradient_is_divided_by_a_number_of_microbatches(divisor, granularity):
    x = example(granularity)
    wanted, magnitudes = x.dequantize() / divisor, x.float8_data.view(torch.uint8) & 127
    assert x.div_(divisor) is x
    whole = granularity == Tensorwise()
    assert not whole or torch.equal(x.float8_data.view(torch.uint8) & 127, magnitudes)
    rtol, atol = (2e-7, 0) if whole else (2**-3, 1e-3)
    torch.testing.assert_close(x.dequantize(), wanted, rtol=rtol, atol=atol)
    with pytest.raises(TypeError, match=r"div_.* by a Float8Tensor: call \.dequantize"):
        torch.ones(6, 24).div_(example())
    assert example().div_(0).dequantize().isfinite().sum() == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [0.0, 1e-40, math.nan])
def test_what_vanishes_is_zero_and_what_is_nan_stays(fmt, factor):
    x = example(fmt=fmt)
    x.float8_data.view(torch.uint8)[0, 0] = 0x7F
    x.mul_(torch.tensor(factor))
    values = x.dequantize()
    assert values[0, 0].isnan()
    rest = values.flatten()[1:]
    assert bool(rest.isnan().all()) if math.isnan(factor) else not rest.any()
    x.detach().clone()  # the scale is still one that a Float8Tensor may have


def test_an_op_on_a_view_does_not_change_the_rest():
    x = example()
    before = x.dequantize()
    x[:2].mul_(0.5)
    x[4:].zero_()
    assert_bitwise(x.dequantize()[2:4], before[2:4])
    assert not x.dequantize()[4:].any()
    torch.testing.assert_close(x.dequantize()[:2], before[:2] / 2, rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize("granularity", KINDS, ids=str)
@pytest.mark.parametrize("foreach", [None, True])
def test_norms_and_clipping_are_those_of_the_values(granularity, foreach):
    def clipped(grads: list[Tensor], by: str) -> list[Tensor]:
        leaves = [torch.zeros(6, 24, requires_grad=True) for _ in grads]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        if by == "value":
            torch.nn.utils.clip_grad_value_(leaves, 0.3, foreach=foreach)
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(leaves, 0.5, foreach=foreach))
        return [leaf.grad for leaf in leaves]

    norms: list[Tensor] = []
    for by in ("norm", "value"):
        quantised = [example(granularity), example(granularity, seed=2)]
        plain = [*(x.dequantize() for x in quantised), torch.ones(6, 24)]
        found = clipped([*quantised, torch.ones(6, 24)], by)
        for x, wanted in zip(found, clipped(plain, by), strict=True):
            assert type(x) is type(found[0]) or type(x) is Tensor
            values = x.dequantize() if isinstance(x, Float8Tensor) else x
            torch.testing.assert_close(values, wanted, rtol=2**-3, atol=1e-3)
    assert len({f"{norm:.5g}" for norm in norms}) == 1


@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_unscales_and_sees_what_is_not_finite(bad):
    leaf, other = torch.zeros(6, 24, requires_grad=True), torch.zeros(3, requires_grad=True)
    leaf.grad, other.grad = example(), torch.ones(3)
    wanted = leaf.grad.dequantize() / 1024
    if bad:
        leaf.grad.float8_data.view(torch.uint8)[2, 3] = 0xFF
    optimizer = torch.optim.SGD([leaf, other], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    if bad:
        assert sum(v.item() for v in scaler._found_inf_per_device(optimizer).values()) == 1
    else:
        assert_bitwise(leaf.grad.dequantize(), wanted)  # a power of two
        assert not any(v.item() for v in scaler._found_inf_per_device(optimizer).values())
    assert_bitwise(other.grad, torch.ones(3) / 1024)


@pytest.mark.parametrize("foreach", [False, True])
def test_zeroing(foreach):
    leaf = torch.zeros(6, 24, requires_grad=True)
    leaf.grad = example()
    torch.optim.SGD([leaf], lr=1.0, foreach=foreach).zero_grad(set_to_none=False)
    assert isinstance(leaf.grad, Float8Tensor)
    assert not leaf.grad.dequantize().any()
    assert leaf.grad.scale.item() == 1


def test_what_would_lose_updates_in_silence_is_refused():
    with pytest.raises(NotImplementedError, match=r"add_.* is not defined for Float8Tensor"):
        example().add_(torch.ones(6, 24))
    with pytest.raises(TypeError, match=r"mul_.* by a Float8Tensor: call \.dequantize"):
        torch.ones(6, 24).mul_(example())
    x = example()
    torch._foreach_mul_([x], 0.5)
    assert_bitwise(x.dequantize(), example().dequantize() / 2)
    product = example().mul_(torch.arange(24.0))
    torch.testing.assert_close(
        product.dequantize(), example().dequantize() * torch.arange(24.0), rtol=2**-3, atol=0.1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", KINDS, ids=str)
def test_a_sum_is_that_of_the_values(granularity, dtype):
    x = Float8Tensor.from_high_precision(torch.randn(6, 24, dtype=dtype), E4M3, granularity)
    exact = x.dequantize(torch.float32).double()
    for dims in ([], [0], [1], [-1, 0]):
        found = x.sum(dims) if dims else x.sum()
        assert type(found) is Tensor and found.dtype == dtype
        expected = exact.sum(dims) if dims else exact.sum()
        torch.testing.assert_close(
            found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4
        )
    assert x.sum(0, keepdim=True).shape == (1, 24)
    assert x.sum(dtype=torch.float64).dtype == torch.float64


def test_a_sum_is_differentiable():
    x = example().requires_grad_()
    x.sum(0).backward(g := torch.randn(24))
    assert_bitwise(x.grad, g.expand(6, 24))


def test_an_op_that_would_write_says_how_to_write():
    delta = torch.ones(6, 24)
    for write in (lambda x: x.add_(delta), lambda x: x.data.add_(delta), lambda x: x.fill_(1.0)):
        with pytest.raises(NotImplementedError) as error:
            write(example())
        assert "x.copy_(values)" in str(error.value)
        assert "convert_from_float8_training(model)" in str(error.value)
    with pytest.raises(NotImplementedError, match=r"call \.dequantize\(\) on it first$"):
        delta.add_(example())  # reads it only
    # What the message says to do works.
    x = example()
    x.copy_(x.dequantize() + delta)
    torch.testing.assert_close(x.dequantize(), example().dequantize() + delta, rtol=2**-4, atol=0.1)
