"""The functions behind `float8.fused`, on their own; their numbers are test_fused.py's."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bitwise
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import Float8Tensor
from float8.config import RECIPES
from float8.fusion.autograd import (
    Output,
    _layer_norm_backward,
    _rms_norm_backward,
    layer_norm_cast,
    rms_norm_cast,
    runs_kernel,
    swiglu_cast,
)

K = 48
CAST = RECIPES["tensorwise"].plan.output.a


def output(dtype=torch.float32, by_kernel=False):
    return Output(CAST, None, False, True, dtype, by_kernel)


@pytest.mark.parametrize("weighted", [True, False])
def test_torchs_own_backward_takes_what_it_is_given(weighted):
    """On CUDA tensors without CUDA: the op exists, and returns what autograd expects."""
    with FakeTensorMode():
        x, rstd = torch.empty(6, K, device="cuda"), torch.empty(6, 1, device="cuda")
        weight = torch.empty(K, device="cuda") if weighted else None
        grad_x, grad_w = _rms_norm_backward(x, x, weight, rstd, (True, weighted))
        assert grad_x.shape == x.shape
        assert grad_w is None if weight is None else grad_w.shape == (K,)
        assert _rms_norm_backward(x, x, weight, rstd, (False, weighted))[0] is None


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_torchs_own_backward_of_a_layer_norm_takes_what_it_is_given(affine):
    with FakeTensorMode():
        x, (mean, rstd) = (
            torch.empty(6, K, device="cuda"),
            torch.empty(2, 6, 1, device="cuda"),
        )
        weight = torch.empty(K, device="cuda") if "weight" in affine else None
        bias = torch.empty(K, device="cuda") if "bias" in affine else None
        needs = (True, weight is not None, bias is not None)
        found = _layer_norm_backward(x, x, weight, bias, mean, rstd, needs)
        assert found[0].shape == x.shape
        for grad, parameter in zip(found[1:], (weight, bias), strict=True):
            assert grad is None if parameter is None else grad.shape == (K,)
        needs = (False, *needs[1:])
        assert _layer_norm_backward(x, x, weight, bias, mean, rstd, needs)[0] is None


def test_results_carry_the_gradient_in_the_compute_dtype():
    x = torch.randn(4, 2 * K, requires_grad=True)
    for y in (
        rms_norm_cast(x, None, 1e-6, output(torch.bfloat16)),
        layer_norm_cast(x, None, None, 1e-6, output(torch.bfloat16)),
        swiglu_cast(x, None, output(torch.bfloat16)),
    ):
        assert isinstance(y, Float8Tensor)
        assert (y.dtype, y.requires_grad) == (torch.bfloat16, True)
        (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape, dtype=torch.bfloat16))
        assert (type(grad), grad.dtype, grad.shape) == (torch.Tensor, torch.float32, x.shape)


def test_two_tensors_and_their_concatenation_have_one_gate():
    gate, up = torch.randn(4, K), torch.randn(4, K)
    apart = swiglu_cast(gate, up, output())
    together = swiglu_cast(torch.cat([gate, up], 1), None, output())
    assert_bitwise(apart._data, together._data)


def test_kernels_are_for_cuda():
    assert not runs_kernel(torch.device("cpu"), emulate=False)
    assert not runs_kernel(torch.device("cuda"), emulate=True)
