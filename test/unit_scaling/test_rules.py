"""`float8.unit_scaling.rules`: interpolation, logarithms of sizes, depth."""

import math

import pytest
import torch
from scale_assertions import graphs_compiled

from float8.unit_scaling.rules import (
    log,
    logarithmic_interpolation,
    rms,
    transformer_residual_scaling_rule,
)
from float8.unit_scaling.scale import scale_fwd


@pytest.mark.parametrize(("lower", "upper"), [(1e-3, 1e-1), (2.0, 2.0**0.5), (4096, 64.0)])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_interpolation_is_linear_in_logarithms(alpha, lower, upper):
    expected = math.exp(alpha * math.log(upper) + (1 - alpha) * math.log(lower))
    assert logarithmic_interpolation(alpha, lower, upper) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("x", [1, 2, 3, 1000, 2**31, 0.1])
def test_log_is_the_natural_logarithm(x):
    assert log(x) == pytest.approx(math.log(x), rel=1e-14)


def test_rules_of_a_size_compile_once_for_all_sizes():
    def scaled(x):
        return scale_fwd(x, logarithmic_interpolation(0.3, log(x.shape[0]), x.shape[0] ** 0.5))

    assert graphs_compiled(scaled, [(torch.ones(n, 3),) for n in (4, 7, 16, 33, 65)]) <= 2


def test_the_natural_logarithm_of_python_would_compile_for_each_size():
    def scaled(x):
        return scale_fwd(x, math.log(x.shape[0]))

    calls = [(torch.ones(n, 3),) for n in (4, 7, 16, 33, 65)]
    assert graphs_compiled(scaled, calls) == 5, "math.log traces: rules.log may become it"


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


def test_a_negative_ratio_is_refused():
    with pytest.raises(ValueError, match=r"residual_attn_ratio is a ratio .* got -1"):
        transformer_residual_scaling_rule(1.0, -1)
