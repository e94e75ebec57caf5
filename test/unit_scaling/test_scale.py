"""`float8.unit_scaling.scale`: factors of the value and of the gradient, one rounding each."""

import pytest
import torch
from assertions import assert_bitwise
from scale_assertions import gradients, normal

from float8.unit_scaling.scale import scale_bwd, scale_fwd

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (2, 1, 3)], ids=str)
def test_each_scales_its_own_direction_only(dtype, shape):
    x = normal(*shape, dtype=dtype)
    forward, grad_forward = gradients(lambda x: scale_fwd(x, 0.3), x)
    backward, grad_backward = gradients(lambda x: scale_bwd(x, 0.3), x)
    _, grad = gradients(lambda x: x * 1, x)
    wide = torch.promote_types(dtype, torch.float32)
    assert_bitwise(forward, (x.to(wide) * 0.3).to(dtype))
    assert_bitwise(grad_forward, grad)
    assert_bitwise(backward, x)
    assert_bitwise(grad_backward, (grad.to(wide) * 0.3).to(dtype))


def test_a_factor_is_not_rounded_to_the_tensors_dtype():
    x = torch.ones(257, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.full((257,), 255.0, dtype=torch.bfloat16)
    factor = 1 / 300**0.5  # in bfloat16 it is 0.2 % away, and 255 of it rounds elsewhere
    scale_bwd(x, factor).backward(grad)
    rounded = torch.tensor(factor, dtype=torch.bfloat16) * grad
    assert x.grad is not None
    assert_bitwise(x.grad, (grad.double() * factor).bfloat16())
    assert not torch.equal(x.grad, rounded), "both round to the same number"


def test_gradients_per_sample_agree_with_one_sample_at_a_time():
    def loss(w, x):
        return scale_fwd(scale_bwd(w, 0.5) @ x, 3.0).square().sum()

    w, x = normal(4, 3), normal(6, 3, seed=1)
    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    for sample, grad in zip(x, together, strict=True):
        torch.testing.assert_close(grad, torch.func.grad(loss)(w, sample))
