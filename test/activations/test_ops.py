"""Every op: forward equal to torch's to the bit, saved bytes, gradients, ways to call it."""

import operator
from unittest import mock

import pytest
import torch
from activations import gradient_error
from activations.copies import copy_of
from assertions import assert_bitwise, assert_error_within_baseline
from meter import saved_bytes
from shapes import pairs
from torch import Tensor, nn
from torch.nn import functional as F

from float8.activations import copies, saved_activations
from float8.activations.copies import cast_copy

ELEMENTS = gradient_error.ROWS * gradient_error.COLS
COPY = ELEMENTS + ELEMENTS // 128
BYTES = {
    **dict.fromkeys(("rms_norm", "layer_norm", "silu", "gelu", "gelu (tanh)"), COPY),
    **dict.fromkeys(("sigmoid", "tanh", "pow", "pow (x^3)"), COPY),
    **dict.fromkeys(("mul", "silu(a) * b"), 2 * COPY),
    **dict.fromkeys(("relu", "dropout"), ELEMENTS // 8),
}


def scope(**options):
    return saved_activations(**{"min_size": 8192, **options})


@pytest.mark.parametrize("name", gradient_error.CASES)
def test_the_bytes_that_are_saved(name):
    case = gradient_error.CASES[name]
    inputs = gradient_error.inputs_of(case, dtype=torch.bfloat16)
    weights = [x for x in inputs[1:] if name not in ("mul", "silu(a) * b")]
    module = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(x.detach()) for x in weights)
    call = [*inputs[: len(inputs) - len(weights)], *module.weights]
    with scope():
        assert saved_bytes(lambda: case.function(*call), module) == BYTES[name]


@pairs(
    name=tuple(gradient_error.CASES),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    layout=("contiguous", "transposed", "empty", "special"),
    autocast=(False, True),
)
def test_forward_values_are_torchs_to_the_bit(name, dtype, layout, autocast):
    case = gradient_error.CASES[name]
    inputs = gradient_error.inputs_of(case, dtype=dtype)
    if layout == "transposed":
        inputs[0] = inputs[0].detach().t().contiguous().t().requires_grad_()
    elif (layout == "empty" and len(case.shapes) != 2) or name == "rms_norm":
        inputs[0] = inputs[0].detach()[:0].requires_grad_()
    elif layout == "special":
        with torch.no_grad():
            inputs[0][0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    found = []
    for entered in (scope(), torch.enable_grad()):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), entered:
            out = case.function(*inputs)
        out.sum().backward()
        assert all(x.grad.dtype == x.dtype for x in inputs)
        found.append(out.detach())
    assert_bitwise(found[0], found[1], (name, dtype, layout, autocast))


class ClaimsCuda(torch.Tensor):
    """A CPU tensor on CUDA's code path: one kernel draws, scales and returns the mask."""

    is_cuda = True


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_dropout_as_cuda_draws_it(p):
    x, g = torch.randn(64, 128), torch.randn(64, 128)
    leaf = x.as_subclass(ClaimsCuda).requires_grad_()
    with mock.patch.object(torch, "native_dropout", wraps=torch.native_dropout) as kernel:
        with scope():
            torch.manual_seed(3)
            y = F.dropout(leaf, p)
        assert kernel.called
    torch.manual_seed(3)
    expected, mask = torch.native_dropout(x, p, True)
    assert_bitwise(y.detach().as_subclass(torch.Tensor), expected)
    y.backward(g)
    torch.testing.assert_close(leaf.grad.as_subclass(torch.Tensor), g * mask / (1 - p))


@pytest.mark.cuda
def test_dropout_on_cuda_is_torchs_forward_and_backward():
    x, g = (torch.randn(64, 128, device="cuda") for _ in range(2))
    found = []
    for entered in (scope(), torch.enable_grad()):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with entered:
            y = F.dropout(leaf, 0.3)
        y.backward(g)
        found.append((y.detach(), leaf.grad))
    assert_bitwise(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


# --- gradients


def leaves_of_copies(name, inputs):
    """float64 leaves, with the oracle's copies of the inputs that are copied."""
    is_exact = name in ("relu", "dropout")
    exact = [x.detach().double() if is_exact or x.numel() < 8192 else copy_of(x) for x in inputs]
    return [x.requires_grad_() for x in exact]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(set(gradient_error.CASES) - {"dropout"}))
def test_the_gradient_on_cuda_is_that_of_the_copy(name, dtype):
    case = gradient_error.CASES[name]
    inputs = gradient_error.inputs_of(case, dtype=dtype)
    exact = gradient_error.gradients(case, leaves_of_copies(name, inputs))
    leaves = [x.detach().cuda().requires_grad_() for x in inputs]
    with scope():
        out = case.function(*leaves)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(out, leaves, g.cuda())
    for mine, wanted in zip(found, exact, strict=True):
        error = (mine.cpu().double() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02), (name, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_has_the_same_values_on_cuda(dtype):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[0, 0], x[1, 200], x[2] = torch.inf, torch.nan, 0
    cpu, cuda = (
        copies.restored(cast_copy(x.to(device, dtype)), x.shape, dtype).cpu()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(cuda, cpu, rtol=0, atol=0, equal_nan=True)


@pairs(
    name=tuple(gradient_error.CASES),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
)
def test_the_gradient_is_torchs_own_at_the_copy(name, dtype):
    case, replay = gradient_error.CASES[name], (name, dtype)
    inputs = gradient_error.inputs_of(case, dtype=dtype)
    with scope():
        found = gradient_error.gradients(case, inputs)
    copies = leaves_of_copies(name, inputs)
    exact = gradient_error.gradients(rounded_like(case, dtype), copies)
    plain = [x.detach().to(dtype).requires_grad_() for x in copies]
    for i, baseline in enumerate(gradient_error.gradients(case, plain)):
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


ROWS = (8, 64)
SHAPED = {
    "row": (torch.mul, [(64, 128), (128,)]),
    "column": (torch.mul, [(64, 1), (64, 128)]),
    "batch": (torch.mul, [(2, 64, 128), (64, 128)]),
    "number": (torch.mul, [(), (8, 1024)]),
    "rms_norm": (lambda x, w: torch.rms_norm(x, ROWS, w, 1e-5), [(16, 8, 64), ROWS]),
    "rms_norm alone": (lambda x: torch.rms_norm(x, ROWS), [(16, 8, 64)]),
    "layer_norm": (lambda x, w, b: torch.layer_norm(x, ROWS, w, b), [(16, 8, 64), ROWS, ROWS]),
    "bias alone": (lambda x, b: F.layer_norm(x, ROWS, None, b), [(16, 8, 64), ROWS]),
}


@pytest.mark.parametrize("name", SHAPED)
def test_broadcast_factors_and_norms_over_two_dimensions(name):
    function, shapes = SHAPED[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with scope(min_size=1024):
        out = function(*inputs)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, g)
    at = [copy_of(x) if x.numel() >= 1024 else x.detach().double() for x in inputs]
    at = [x.requires_grad_() for x in at]
    for x, e in zip(found, torch.autograd.grad(function(*at), at, g.double()), strict=True):
        assert x.shape == e.shape
        assert torch.allclose(x.double(), e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [1, 2])
def test_only_the_gradients_that_are_wanted(frozen):
    case = gradient_error.CASES["layer_norm"]
    inputs = gradient_error.inputs_of(case)
    with scope():
        everything = gradient_error.gradients(case, inputs)
    inputs[frozen].requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    g = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with scope():
        found = torch.autograd.grad(case.function(*inputs), wanted, g)
    expected = [e for i, e in enumerate(everything) if i != frozen]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
def test_a_norm_that_is_written_out(dtype):
    # rstd has an element per row; with 2^13 rows it is no smaller than min_size.
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
        assert gradient_error.sqnr(a, b.double()) > at_least


# --- calls

W = torch.randn(128, requires_grad=True)
CALLS = {
    "_SavedCopiesBackward": {
        "x * y": lambda x, y: x * y,
        "operator.mul": operator.mul,
        "x.mul(y)": lambda x, y: x.mul(y),
        "multiply": torch.multiply,
        "x ** 2": lambda x, y: x**2,
        "x.pow": lambda x, y: x.pow(3.0),
        "torch.pow": lambda x, y: torch.pow(x, exponent=2),
        "x.square()": lambda x, y: x.square(),
        "torch.square": lambda x, y: torch.square(x),
        "F.silu": lambda x, y: F.silu(x),
        "nn.SiLU": lambda x, y: nn.SiLU()(x),
        "nn.GELU": lambda x, y: nn.GELU("tanh")(x),
        "nn.Sigmoid": lambda x, y: nn.Sigmoid()(x),
        "x.sigmoid()": lambda x, y: x.sigmoid(),
        "expit": lambda x, y: torch.special.expit(x),
        "F.tanh": lambda x, y: F.tanh(x),
        "nn.Tanh": lambda x, y: nn.Tanh()(x),
        "nn.RMSNorm": lambda x, y: nn.RMSNorm(128)(x),
        "torch.rms_norm": lambda x, y: torch.rms_norm(x, (128,), W, 1e-6),
        "nn.LayerNorm": lambda x, y: nn.LayerNorm(128)(x),
        "torch.layer_norm": lambda x, y: torch.layer_norm(x, (128,), W, W),
    },
    "_SavedMaskBackward": {
        "nn.ReLU": lambda x, y: nn.ReLU()(x),
        "x.relu()": lambda x, y: x.relu(),
        "torch.relu": lambda x, y: torch.relu(x),
        "nn.Dropout": lambda x, y: nn.Dropout()(x),
        "torch.dropout": lambda x, y: torch.dropout(x, 0.5, True),
    },
    "torch's": {
        "x *= y": lambda x, y: operator.imul(x + 0, y),
        "x.mul_(y)": lambda x, y: (x + 0).mul_(y),
        "in place": lambda x, y: F.silu(x + 0, inplace=True),
        "nn.ReLU in place": lambda x, y: nn.ReLU(inplace=True)(x + 0),
        "times a number": lambda x, y: 2 * x * 3.0,
        "a root": lambda x, y: x.exp() ** 0.5,
        "a power of tensors": lambda x, y: x.exp().pow(y),
        "a tensor as power": lambda x, y: 2**x,
        "squared in place": lambda x, y: (x + 0).square_(),
        "complex": lambda x, y: x * torch.complex(x, y),
        "nothing dropped": lambda x, y: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
        "everything dropped": lambda x, y: F.dropout(x, 1.0),
        "float64": lambda x, y: F.silu(x.double()),
        "small": lambda x, y: F.silu(x[:2]),
        "attention": lambda x, y: F.scaled_dot_product_attention(*[x.view(1, 4, 16, 128)] * 3),
        "softmax": lambda x, y: x.softmax(-1),
        "F.linear": F.linear,
        "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    },
}


def nodes_of(y: Tensor) -> set[str]:
    left, names = [y.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [next_node for next_node, _ in node.next_functions]
    return names & {"_SavedCopiesBackward", "_SavedMaskBackward"}


@pytest.mark.parametrize(
    ("node", "spelling"), [(node, name) for node, calls in CALLS.items() for name in calls]
)
def test_every_way_to_call_an_op_is_recognised(node, spelling):
    x, y = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    with saved_activations():
        torch.manual_seed(0)
        out = CALLS[node][spelling](x, y)
    assert nodes_of(out) == ({node} if node != "torch's" else set())
    torch.manual_seed(0)
    if spelling != "nn.GELU":
        assert torch.equal(out, CALLS[node][spelling](x, y))
    assert nodes_of(CALLS[node][spelling](x, y)) == set(), "the scope is over"
