"""Gradients against float64, with the oracle's float8 copy in the place of what was kept."""

import pytest
import torch
from activations.copies import copy_of
from assertions import assert_error_within_baseline
from shapes import pairs

from float8.activations import measure, saved_activations
from float8.activations.ops import OPTIONAL

MIN_SIZE = 8192  # an input of `measure`, but no weight


def scope(**options):
    return saved_activations(also=OPTIONAL, min_size=MIN_SIZE, **options)


def as_kept(name, inputs, group, power_of_two):
    """float64 leaves: the oracle's copies of those that are kept in float8."""
    is_exact = name in ("relu", "dropout")
    exact = [
        x.detach().double()
        if is_exact or x.numel() < MIN_SIZE or (name == "linear" and i == 1)
        else copy_of(x, group, power_of_two=power_of_two)
        for i, x in enumerate(inputs)
    ]
    return [x.requires_grad_() for x in exact]


def softmax_gradient(x, group, power_of_two):
    y = torch.softmax(x.detach(), -1)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype).double()
    y = copy_of(y, group, power_of_two=power_of_two)
    return y * (g - (g * y).sum(-1, keepdim=True))


@pairs(
    name=tuple(measure.CASES),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    group=(128, 16),
    power_of_two=(True, False),
)
def test_the_gradient_is_torchs_own_at_the_kept_copy(name, dtype, group, power_of_two):
    case, replay = measure.CASES[name], (name, dtype, group, power_of_two)
    inputs = measure.inputs_of(case, dtype=dtype)
    with scope(group=group, power_of_two_scale=power_of_two):
        found = measure.gradients(case, inputs)
    copies = as_kept(name, inputs, group, power_of_two)
    if name == "softmax":
        exact = [softmax_gradient(inputs[0], group, power_of_two)]
    else:
        g_is_rounded = rounded_like(case, dtype)
        exact = measure.gradients(g_is_rounded, copies)
    plain = [x.detach().to(dtype).requires_grad_() for x in copies]
    for i, baseline in enumerate(measure.gradients(case, plain)):
        assert found[i].dtype == dtype
        assert_error_within_baseline(found[i], exact[i], baseline, 2.0, replay, f"gradient {i}")


def rounded_like(case, dtype):
    """The case with a float64 result, whose grad_output is rounded as the narrow one's is."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g.to(dtype).double()

    return case._replace(function=lambda *inputs: Rounded.apply(case.function(*inputs)))


def test_a_norm_over_two_dimensions():
    x = torch.randn(16, 8, 64, requires_grad=True)
    w = torch.randn(8, 64, requires_grad=True)
    b = torch.randn(8, 64, requires_grad=True)
    g = torch.randn(16, 8, 64)
    for function, inputs in (
        (lambda x, w: torch.rms_norm(x, (8, 64), w, 1e-5), [x, w]),
        (lambda x, w, b: torch.layer_norm(x, (8, 64), w, b), [x, w, b]),
        (lambda x, b: torch.nn.functional.layer_norm(x, (8, 64), None, b), [x, b]),
        (lambda x: torch.rms_norm(x, (8, 64)), [x]),
    ):
        with scope():
            found = torch.autograd.grad(function(*inputs), inputs, g)
        copies = [copy_of(x, 64).requires_grad_(), *(t.double() for t in inputs[1:])]
        # Rows of 64 are shorter than a group, so the whole tensor is one row of groups of 128.
        copies[0] = copy_of(x).requires_grad_()
        exact = torch.autograd.grad(function(*copies), copies, g.double())
        for a, e in zip(found, exact, strict=True):
            assert torch.allclose(a.double(), e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu(a) * b", "relu"])
def test_several_gradients_at_once(name):
    # As torch.autograd.functional.jacobian(vectorize=True) asks for them.
    case = measure.CASES[name]
    inputs = measure.inputs_of(case)
    with scope():
        out = case.function(*inputs)
    g = torch.randn(2, *out.shape)
    found = torch.autograd.grad(out, inputs, g, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        one = torch.autograd.grad(out, inputs, g[i], retain_graph=True)
        assert all(torch.allclose(a[i], b, rtol=1e-4) for a, b in zip(found, one, strict=True))


@pytest.mark.parametrize("frozen", [1, 2])
def test_only_the_gradients_that_are_wanted(frozen):
    case = measure.CASES["layer_norm"]
    inputs = measure.inputs_of(case)
    with scope():
        everything = measure.gradients(case, inputs)
    inputs[frozen].requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    g = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with scope():
        found = torch.autograd.grad(case.function(*inputs), wanted, g)
    expected = [e for i, e in enumerate(everything) if i != frozen]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "shapes",
    [((64, 128), (128,)), ((64, 1), (64, 128)), ((2, 64, 128), (64, 128)), ((), (8, 1024))],
)
def test_a_product_that_broadcasts(shapes):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with saved_activations(min_size=1024):
        out = a * b
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, (a, b), g)
    copies = [
        (copy_of(x) if x.numel() >= 1024 else x.detach().double()).requires_grad_() for x in (a, b)
    ]
    exact = torch.autograd.grad(copies[0] * copies[1], copies, g.double())
    for x, e in zip(found, exact, strict=True):
        assert x.shape == e.shape
        assert torch.allclose(x.double(), e, rtol=1e-5, atol=1e-4)


def test_a_product_of_two_dtypes():
    a = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(64, 128, requires_grad=True)
    with saved_activations():
        out = a * b
    assert out.dtype == torch.float32
    grad_a, grad_b = torch.autograd.grad(out, (a, b), torch.ones_like(out))
    assert torch.equal(grad_a, copy_of(b).to(torch.bfloat16))
    assert torch.equal(grad_b, copy_of(a).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_epsilon_rms_norm_uses_torchs(dtype):
    # 2^-23 in every dtype; bfloat16's own is 2^-7.
    x = torch.full((64, 128), 2.0**-12, dtype=dtype, requires_grad=True)
    g = torch.randn(64, 128).to(dtype)
    with saved_activations():
        y = torch.rms_norm(x, (128,))
    exact = torch.rms_norm(x.detach(), (128,))
    assert torch.equal(y, exact)
    (found,) = torch.autograd.grad(y, x, g)
    (plain,) = torch.autograd.grad(torch.rms_norm(x, (128,)), x, g)
    assert torch.allclose(found, plain, rtol=max(1e-4, 4 * torch.finfo(dtype).eps))


def rms_norm_by_hand(x, weight):
    """As most public LLaMA models write it."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * x32.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_spelt_out(dtype):
    # rstd, an element per row, is kept as it is: 2^13 rows, so that it is no smaller than min_size.
    x, w = torch.randn(8192, 128).to(dtype), torch.randn(128).to(dtype)
    g = torch.randn(8192, 128).to(dtype)
    inputs = [t.requires_grad_() for t in (x, w)]
    y = rms_norm_by_hand(*inputs)
    plain = torch.autograd.grad(y, inputs, g)
    with saved_activations():
        kept = rms_norm_by_hand(*inputs)
    assert torch.equal(kept, y)
    found = torch.autograd.grad(kept, inputs, g)
    for a, b, at_least in zip(found, plain, (40.0, 30.0), strict=True):
        assert measure.sqnr(a, b.double()) > at_least
