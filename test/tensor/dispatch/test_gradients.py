"""Operations on gradients in float8: against the same operation on the dequantised tensor."""

from __future__ import annotations

import math

import pytest
import torch
from assertions import assert_bitwise
from meter import CastMeter
from shapes import Case, pairs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise

KINDS = [Tensorwise(), Rowwise(), Blockwise(4, 5)]


def example(granularity=None, fmt=E4M3, dtype=torch.float32, seed=1) -> Float8Tensor:
    x = Case((6, 24), dtype, fill="normal", seed=seed).make()
    return Float8Tensor.from_high_precision(x, fmt, granularity)


@pairs(
    factor=[0.3, -2.0, 3, torch.tensor(0.3), torch.tensor(-1.5, dtype=torch.float64)],
    divides=[False, True],
    granularity=KINDS,
    fmt=[E4M3, E5M2],
)
def test_a_factor_or_divisor_changes_the_scale_and_keeps_the_codes(
    factor, divides, granularity, fmt
):
    x = example(granularity, fmt)
    before, codes = x.dequantize(), x.float8_data.view(torch.uint8).clone()
    assert (x.div_(factor) if divides else x.mul_(factor)) is x
    wanted = before / factor if divides else before * factor
    assert torch.equal(x.float8_data.view(torch.uint8), codes)
    torch.testing.assert_close(x.dequantize(), wanted, rtol=2e-7, atol=0)


def test_factors_may_be_tensors_of_several_elements():
    x, factors = example(), torch.arange(24.0)
    product = example().mul_(factors).dequantize()
    torch.testing.assert_close(product, x.dequantize() * factors, rtol=2**-3, atol=0.1)
    assert x.div_(0).dequantize().isfinite().sum() == 0


DELTA = torch.ones(6, 24)
REFUSED = [
    (lambda x: x.add_(DELTA), r"add_.* is not defined .*x\.copy_\(values\)"),
    (lambda x: DELTA.clone().add_(x), r"call \.dequantize\(\) on it first"),  # reads it only
    (lambda x: DELTA.clone().div_(x), r"div_.* by a Float8Tensor: call \.dequantize"),
]


@pytest.mark.parametrize(("run", "words"), REFUSED)
def test_what_would_lose_updates_in_silence_is_refused(run, words):
    with pytest.raises((NotImplementedError, TypeError), match=words):
        run(example())


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [0.0, math.nan])
def test_what_vanishes_is_zero_and_what_is_nan_stays(fmt, factor):
    x = example(fmt=fmt)
    x.float8_data.view(torch.uint8)[0, 0] = 0x7F
    x.mul_(torch.tensor(factor))
    values = x.dequantize()
    assert values[0, 0].isnan()
    rest = values.flatten()[1:]
    assert bool(rest.isnan().all()) if math.isnan(factor) else not rest.any()


def test_an_op_on_a_view_does_not_change_the_rest():
    x = example()
    before = x.dequantize()
    x[:2].mul_(0.5)
    torch._foreach_zero_([x[4:]])
    assert_bitwise(x.dequantize()[2:4], before[2:4])
    assert not x.dequantize()[4:].any()
    torch.testing.assert_close(x.dequantize()[:2], before[:2] / 2, rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize("granularity", KINDS, ids=str)
def test_norms_and_clipping_are_those_of_the_values(granularity):
    def clipped(grads: list[Tensor], by: str) -> list[Tensor]:
        leaves = [torch.zeros(6, 24, requires_grad=True) for _ in grads]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        if by == "value":
            torch.nn.utils.clip_grad_value_(leaves, 0.3)
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(leaves, 0.5))
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


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", KINDS, ids=str)
@pytest.mark.parametrize("options", [{}, {"dim": 0}, {"dim": (0, 1), "keepdim": True}], ids=str)
@pytest.mark.parametrize("ord", [2, 1, 3.5, math.inf, -math.inf, 0])
def test_norms_are_those_of_float64(fmt, granularity, options, ord):
    x = example(granularity, fmt)
    x.mul_(-0.3)
    wanted = torch.linalg.vector_norm(x.dequantize().double(), ord, **options)
    found = torch.linalg.vector_norm(x, ord, **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    assert torch.linalg.vector_norm(x, dtype=torch.float64).dtype == torch.float64


def test_a_norm_reads_the_data_and_not_four_bytes_of_each():
    with FakeTensorMode(), CastMeter() as meter:
        data = torch.empty(64, 256, device="cuda", dtype=E4M3.dtype)
        x = Float8Tensor(data, torch.ones(1, 1, device="cuda"), (-1, -1), torch.float32)
        torch.linalg.vector_norm(x)
    assert sum(meter.bytes_by_numel.values()) == pytest.approx(5 * data.numel(), rel=0.01)


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
