"""`float8.unit_scaling.core.functional`: interpolation, logarithms of sizes, depth, elementwise."""

import math

import pytest
import torch
from scale_assertions import gradients, normal

from float8.unit_scaling.core.functional import (
    logarithmic_interpolation,
    rms,
    scale_elementwise,
    transformer_residual_scaling_rule,
)


@pytest.mark.parametrize("constraint", [None, "gmean"])
def test_a_function_is_scaled_elementwise(constraint):
    scaled = scale_elementwise(torch.pow, 0.25, 4.0, constraint)
    out, grad = gradients(lambda x: scaled(x, exponent=3), normal(9))
    plain_out, plain_grad = gradients(lambda x: x**3, normal(9))
    a, b = (0.25, 4.0) if constraint is None else (1.0, 1.0)
    torch.testing.assert_close((out, grad), (a * plain_out, b * plain_grad))


@pytest.mark.parametrize(("lower", "upper"), [(1e-3, 1e-1), (2.0, 2.0**0.5), (4096, 64.0)])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_interpolation_is_linear_in_logarithms(alpha, lower, upper):
    expected = math.exp(alpha * math.log(upper) + (1 - alpha) * math.log(lower))
    assert logarithmic_interpolation(alpha, lower, upper) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rms_is_the_root_of_the_mean_square(dtype):
    x = (300 * torch.randn(5, 7, 3, dtype=torch.float64)).to(dtype)  # squares beyond float16
    expected = x.double().square().mean((0, 2), keepdim=True).add(0.25).sqrt()
    found = rms(x, (0, 2), keepdim=True, eps=0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert rms(x).shape == ()


def contributions(tau, layers):
    """The variance that the embedding and each branch have in the last residual stream."""
    variances = [1.0]
    for index in range(layers):
        share = 1 / (1 + tau(index, layers) ** 2)
        variances = [v * share for v in variances] + [1 - share]
    return variances


@pytest.mark.parametrize("residual_mult", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("ratio", [1 / 3, 1.0, 2.0])
@pytest.mark.parametrize("layers", [2, 6, 24])
def test_layers_contribute_as_the_rule_promises(residual_mult, ratio, layers):
    tau = transformer_residual_scaling_rule(residual_mult, ratio)
    embedding, *branches = contributions(tau, layers)
    attention, feed_forward = branches[::2], branches[1::2]
    assert attention == pytest.approx([attention[0]] * (layers // 2)), "attention layers, equally"
    assert feed_forward == pytest.approx([feed_forward[0]] * (layers // 2)), "ffn layers, equally"
    assert math.sqrt(sum(attention) / sum(feed_forward)) == pytest.approx(ratio)
    average = (sum(attention) + sum(feed_forward)) / 2
    assert math.sqrt(average / embedding) == pytest.approx(residual_mult)
