"""Simulated products are products of rounded operands, forward and backward, and nothing else."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline
from torch import nn

import float8.unit_scaling as uu
from float8 import Float8Tensor, Tensorwise
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.transforms import track_scales, unit_scale
from float8.unit_scaling.transforms.simulate import simulate_format, simulate_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x, dtype=E4M3):
    """Through torch's own float8, saturating; of float64, numbers that float32 holds."""
    most = torch.finfo(dtype).max
    return x.float().clamp(-most, most).to(dtype).to(x.dtype)


def numbers(*shape, dtype=torch.float64, scale=1.0):
    """Random numbers that float32 holds."""
    return (torch.randn(*shape) * scale).to(dtype)


class Calls(nn.Module):
    """A module whose forward is one function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# name -> (function, shapes of the operands, shape of what is added or None)
B, N, M, K = 3, 5, 7, 11
PRODUCTS = {
    "F.linear": (F.linear, [(B, M, K), (N, K)], (N,)),
    "F.linear by name": (
        lambda x, w, b: F.linear(input=x, bias=b, weight=w),
        [(M, K), (N, K)],
        (N,),
    ),
    "linear without bias": (F.linear, [(M, K), (N, K)], None),
    "@": (lambda x, y: x @ y, [(B, M, K), (K, N)], None),
    "matmul of a vector": (lambda x, y: x.matmul(y), [(M, K), (K,)], None),
    "torch.matmul by name": (lambda x, y: torch.matmul(other=y, input=x), [(M, K), (K, N)], None),
    "mm": (lambda x, y: x.mm(y), [(M, K), (K, N)], None),
    "torch.mm": (lambda x, y: torch.mm(x, mat2=y), [(M, K), (K, N)], None),
    "bmm": (torch.bmm, [(B, M, K), (B, K, N)], None),
    "addmm": (
        lambda x, y, b: torch.addmm(b, x, y, beta=0.5, alpha=2.0),
        [(M, K), (K, N)],
        (N,),
    ),
    "Tensor.addmm": (lambda x, y, b: b.addmm(x, mat2=y), [(M, K), (K, N)], (M, N)),
    "baddbmm": (lambda x, y, b: torch.baddbmm(b, x, y), [(B, M, K), (B, K, N)], (1, M, 1)),
    "Tensor.addbmm": (
        lambda x, y, b: b.addbmm(x, y),
        [(B, M, K), (B, K, N)],
        (M, N),
    ),
    "addbmm": (lambda x, y, b: torch.addbmm(b, x, y), [(B, M, K), (B, K, N)], (M, N)),
    "einsum": (lambda x, y: torch.einsum("bmk,nk->bnm", x, y), [(B, M, K), (N, K)], None),
    "einsum of a list": (lambda x, y: torch.einsum("mk,nk", [x, y]), [(M, K), (N, K)], None),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), [(B, 4, M), (6, 4, 3)], (6,)),
    "conv1d, unbatched": (F.conv1d, [(4, M), (6, 4, 3)], (6,)),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, bias=b, groups=2, padding="same"),
        [(B, 4, M, N), (6, 2, 3, 3)],
        (6,),
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [(B, 4, M, N), (4, 2, 3, 3)],
        (2,),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(B, 2, M, 8), (B, 2, M, 8), (B, 2, M, 8)],
        None,
    ),
}


def exact(function, operands, addend, grad, backward_dtype=E5M2):
    """Output and gradients: the function of rounded operands, its backward of a rounded gradient.

    The addend's gradient is that of the gradient as it came.
    """
    leaves = [rounded(x).requires_grad_() for x in operands]
    added = [] if addend is None else [addend.clone().requires_grad_()]
    y = function(*leaves, *added)
    q = grad if backward_dtype is None else rounded(grad, backward_dtype)
    grads = list(torch.autograd.grad(y, leaves, q, retain_graph=True))
    return [y, *grads, *(torch.autograd.grad(y, added, grad) if added else [])]


def simulated(function, operands, addend, grad):
    model = simulate_fp8(Calls(function))
    leaves = [x.clone().requires_grad_() for x in operands]
    leaves += [] if addend is None else [addend.clone().requires_grad_()]
    y = model(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


def case(name):
    torch.manual_seed(len(name))
    function, shapes, added = PRODUCTS[name]
    operands = [numbers(*shape) for shape in shapes]
    addend = None if added is None else numbers(*added)
    with torch.no_grad():
        y = function(*operands, *([] if addend is None else [addend]))
    return function, operands, addend, numbers(*y.shape)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_rounded_operands_forward_and_backward(name):
    arguments = case(name)
    for actual, expected in zip(simulated(*arguments), exact(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_check_above_would_notice_a_gradient_that_is_not_rounded(name):
    arguments = case(name)
    right, wrong = simulated(*arguments), exact(*arguments, backward_dtype=None)
    off = [bool(((a - b).abs() > 1e-6).any()) for a, b in zip(right, wrong, strict=True)]
    operands = len(arguments[1])
    assert off == [False] + [True] * operands + [False] * (arguments[2] is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_models_err_no_more_than_their_own_dtype_does(dtype):
    torch.manual_seed(1)
    layer = nn.Linear(K, N).to(dtype)
    x, grad = numbers(B, M, K, dtype=dtype), numbers(B, M, N, dtype=dtype)
    leaf = x.clone().requires_grad_()
    model = simulate_fp8(layer)
    y = model(leaf)
    y.backward(grad)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    baseline = exact(F.linear, [x, weight], bias, grad)
    operands = [x.double(), weight.double()]
    oracle = exact(F.linear, operands, bias.double(), grad.double())
    actual = [y, leaf.grad, model.weight.grad, model.bias.grad]
    for mine, right, plain in zip(actual, oracle, baseline, strict=True):
        assert_error_within_baseline(mine, right, plain, 1.5, dtype)


def test_attention_takes_masks_by_position_and_grouped_heads():
    torch.manual_seed(2)
    mask = torch.rand(M, M) > 0.3
    mask[:, 0] = True

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, enable_gqa=True)

    operands = [numbers(B, 4, M, 8), numbers(B, 2, M, 8), numbers(B, 2, M, 8)]
    arguments = (function, operands, None, numbers(B, 4, M, 8))
    for actual, expected in zip(simulated(*arguments), exact(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_an_added_infinity_masks_and_its_gradient_passes():
    mask = torch.tensor([[0.0, -torch.inf]]).expand(M, 2)
    leaf = mask.clone().requires_grad_()
    model = simulate_fp8(Calls(lambda x, y: torch.addmm(leaf, x, y).softmax(-1)))
    y = model(numbers(M, K, dtype=torch.float32), numbers(K, 2, dtype=torch.float32))
    assert y[:, 1].tolist() == [0.0] * M
    y.backward(torch.randn(M, 2))
    assert not leaf.grad.isnan().any()


class Net(nn.Module):
    """Products of several kinds, and an activation in place."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(K, 16)
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv1d(16, 8, 3, padding=1)
        self.down = nn.Linear(8, N, bias=False)

    def forward(self, x):
        h = self.act(self.up(x))
        h = self.act(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.down(F.scaled_dot_product_attention(h, h, h))


def run(model, x, grad):
    model.zero_grad()
    y = model(x)
    y.backward(grad)
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def test_formats_as_wide_as_the_model_change_no_bit_but_the_order_of_a_bias_sum():
    torch.manual_seed(3)
    net, x, grad = Net(), torch.randn(B, M, K), torch.randn(B, M, N)
    wide = FPFormat(8, 23, "nearest")
    model = simulate_format(net, wide, wide)
    names = ["output", *dict(net.named_parameters())]
    for name, actual, expected in zip(names, run(model, x, grad), run(net, x, grad), strict=True):
        if name == "conv.bias":
            torch.testing.assert_close(actual, expected)
        else:
            assert_bitwise(actual, expected, name)


def test_compiled_copied_and_pickled_models_compute_the_same():
    torch.manual_seed(4)
    x, grad = torch.randn(B, M, K), torch.randn(B, M, N)
    model = simulate_fp8(Net())
    expected = run(model, x, grad)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    others = {
        "compiled": compiled,
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
    }
    for name, other in others.items():
        for mine, right in zip(run(other, x, grad), expected, strict=True):
            torch.testing.assert_close(mine, right, msg=lambda text, name=name: f"{name}: {text}")


def test_four_sequence_lengths_take_at_most_two_graphs():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model = torch.compile(simulate_fp8(Net()), backend=counter, fullgraph=True)
    for length in (5, 6, 9, 30):
        model(torch.randn(2, length, K)).sum().backward()
    assert counter.frame_count <= 2


def test_the_model_that_was_given_stays_as_it_is():
    torch.manual_seed(5)
    net, x, grad = Net(), torch.randn(B, M, K), torch.randn(B, M, N)
    before = run(net, x, grad)
    model = simulate_fp8(net)
    assert not torch.equal(run(model, x, grad)[0], before[0])
    for actual, expected in zip(run(net, x, grad), before, strict=True):
        assert_bitwise(actual, expected)
    assert model.state_dict().keys() == net.state_dict().keys()
    with torch.no_grad():
        model.up.weight.zero_()
    assert net.up.weight.any()


def test_under_autocast_operands_are_rounded_to_its_dtype_first():
    torch.manual_seed(6)
    # Just above a tie of E4M3 in float32, on it in bfloat16: which is rounded first decides.
    x = torch.full((M, K), 1.0625 + 2.0**-12)
    layer = nn.Linear(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        y = simulate_fp8(layer)(x)
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        weight = rounded(layer.weight.bfloat16())
        first = F.linear(rounded(x.bfloat16()), weight, layer.bias.bfloat16())
        late = F.linear(rounded(x).bfloat16(), weight, layer.bias.bfloat16())
    assert_bitwise(y, first)
    assert not torch.equal(first, late)


def test_gradients_under_autocast_reach_the_parameters_in_their_own_dtype():
    layer = simulate_fp8(nn.Linear(K, N))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(M, K))
    y.backward(torch.randn(M, N).bfloat16())
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_unit_scaled_modules_are_simulated_between_their_factors():
    torch.manual_seed(7)
    layer = uu.Linear(K, N, bias=True).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.float())
    model = simulate_fp8(layer)
    x = numbers(M, K).requires_grad_()
    grad = numbers(M, N)
    y = model(x)
    y.backward(grad)
    xq, wq, gq = rounded(x.detach()), rounded(layer.weight.detach()), rounded(grad, E5M2)
    # The default constraint: the input's gradient is scaled as the output is.
    torch.testing.assert_close(y, (xq @ wq.t() + layer.bias) * K**-0.5)
    torch.testing.assert_close(x.grad, gq @ wq * K**-0.5)
    torch.testing.assert_close(model.weight.grad, gq.t() @ xq * M**-0.5)
    torch.testing.assert_close(model.bias.grad, grad.sum(0) * M**-0.5)


def test_stochastic_rounding_follows_torchs_seed():
    net, x = simulate_fp8(Net(), rounding="stochastic"), torch.randn(B, M, K)
    torch.manual_seed(8)
    first = net(x)
    assert not torch.equal(net(x), first)
    torch.manual_seed(8)
    assert_bitwise(net(x), first)


def test_what_is_no_wide_product_is_left_alone():
    def function(x, i):
        return torch.einsum("ij->ji", x), x.transpose(0, 1).contiguous(), i @ i, x + 1.01

    x, i = torch.randn(4, 4), torch.arange(16).reshape(4, 4)
    for actual, expected in zip(simulate_fp8(Calls(function))(x, i), function(x, i), strict=True):
        assert torch.equal(actual, expected)


def test_tensors_that_are_float8_already_stay_so():
    x, w = (
        Float8Tensor.from_high_precision(torch.randn(16, 16), E4M3, Tensorwise()) for _ in range(2)
    )
    expected = x @ w.t()
    # Simulated as E2M1, plain operands would lose most of their bits.
    few = FPFormat(2, 1, "nearest")
    assert_bitwise(simulate_format(Calls(lambda x, w: x @ w.t()), few, few)(x, w), expected)


def test_attention_modules_are_simulated_too():
    torch.manual_seed(10)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = numbers(B, M, 8)
    with torch.no_grad():
        for p in attention.parameters():
            p.copy_(p.float())
        y, _ = simulate_fp8(attention)(x, x, x, need_weights=False)
        qkv = F.linear(rounded(x), rounded(attention.in_proj_weight), attention.in_proj_bias)
        q, k, v = qkv.view(B, M, 3, 2, 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(rounded(q), rounded(k), rounded(v))
        merged = rounded(heads.transpose(1, 2).reshape(B, M, 8))
        out = attention.out_proj
        torch.testing.assert_close(y, F.linear(merged, rounded(out.weight), out.bias))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_transforms_compose_in_any_order(order):
    transforms = [unit_scale, simulate_fp8, track_scales]
    torch.manual_seed(11)
    net, x, grad = Net(), torch.randn(B, M, K), torch.randn(B, M, N)
    model = net
    for index in order:
        model = transforms[index](model)
    expected = simulate_fp8(unit_scale(net))
    for mine, right in zip(run(model, x, grad), run(expected, x, grad), strict=True):
        assert_bitwise(mine, right, order)
    calls = [n.name for n in model.scales_graph().nodes if n.op == "call_function"]
    assert calls[:2] == ["linear", "relu"]


def test_gradients_of_gradients_pass_straight_through():
    """d/dw of |d(w x)/dx|^2, where both are values of the formats: 2 w."""
    layer = simulate_fp8(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 1.125]]))
    x = torch.ones(1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert torch.equal(layer.weight.grad, 2 * layer.weight)


def test_gradients_of_gradients_know_the_product_behind():
    model = simulate_fp8(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    plain = copy.deepcopy(model)
    plain.transforms = ()
    found = []
    for net in (model, plain):
        x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), net[0].weight)[0])
    assert (found[0] - found[1]).norm() < 0.2 * found[1].norm()
