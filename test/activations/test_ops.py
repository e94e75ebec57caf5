"""The table: of every op the forward is torch's to the bit, and the bytes are those stated."""

from dataclasses import replace
from unittest import mock

import oracle
import pytest
import torch
from activations.copies import copy_of
from assertions import assert_bitwise, assert_sqnr_at_least
from meter import saved_bytes
from shapes import pairs
from torch import nn
from torch.nn import functional as F

from float8.activations import groups as groups_module
from float8.activations import keeper, measure, saved_activations
from float8.activations.ops import OPS, OPTIONAL

ELEMENTS = measure.ROWS * measure.COLS
KEPT = ELEMENTS + ELEMENTS // 128
BYTES = {
    **dict.fromkeys(("rms_norm", "layer_norm", "silu", "gelu", "gelu (tanh)"), KEPT),
    **dict.fromkeys(("sigmoid", "tanh", "pow", "pow (x^3)", "softmax", "linear"), KEPT),
    **dict.fromkeys(("mul", "silu(a) * b"), 2 * KEPT),
    **dict.fromkeys(("relu", "dropout"), ELEMENTS // 8),
}


def scope(**options):
    return saved_activations(**{"also": OPTIONAL, "min_size": 8192, **options})


@pytest.mark.parametrize("name", measure.CASES)
def test_the_bytes_that_are_kept(name):
    case = measure.CASES[name]
    inputs = measure.inputs_of(case, dtype=torch.bfloat16)
    weights = [x for x in inputs[1:] if name not in ("mul", "silu(a) * b")]
    module = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(x.detach()) for x in weights)
    call = [*inputs[: len(inputs) - len(weights)], *module.weights]
    with scope():
        assert saved_bytes(lambda: case.function(*call), module) == BYTES[name]


@pairs(
    name=tuple(measure.CASES),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    layout=("contiguous", "transposed", "empty", "special"),
    autocast=(False, True),
)
def test_forward_values_are_torchs_to_the_bit(name, dtype, layout, autocast):
    case = measure.CASES[name]
    inputs = measure.inputs_of(case, dtype=dtype)
    if layout == "transposed":
        inputs[0] = inputs[0].detach().t().contiguous().t().requires_grad_()
    elif (layout == "empty" and len(case.shapes) != 2) or name in ("rms_norm", "linear"):
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


@pytest.mark.parametrize("name", OPS)
def test_an_op_that_is_skipped_is_torchs_own(name):
    case = measure.CASES[name]
    plain = measure.gradients(case, measure.inputs_of(case))
    with scope(skip=(name,)):
        skipped = measure.gradients(case, measure.inputs_of(case))
    with scope(skip=[other for other in OPS if other != name]):
        alone = measure.gradients(case, measure.inputs_of(case))
    assert all(torch.equal(a, b) for a, b in zip(skipped, plain, strict=True))
    exact = name in ("relu", "dropout")
    assert all(torch.equal(a, b) for a, b in zip(alone, plain, strict=True)) == exact


def test_two_ops_are_off_unless_asked_for():
    x = torch.randn(64, 128, requires_grad=True)
    with saved_activations():
        for out in (torch.softmax(x, -1), F.linear(x, torch.randn(8, 128))):
            assert "Keeping" not in out.grad_fn.name()


def test_every_op_is_measured_and_says_what_it_is():
    assert OPS.keys() <= measure.CASES.keys()
    assert OPTIONAL == ("softmax", "linear")


def test_what_is_saved_are_the_oracles_codes_of_the_tensor_itself():
    x, y = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    with saved_activations():
        product, norm = F.silu(x) * y, F.rms_norm(x, (128,))
    (data, scale), (of_y, scale_y) = (
        oracle.quantize(t.detach(), (1, 128), torch.float8_e4m3fn, True) for t in (x, y)
    )
    saved = product.grad_fn.saved_tensors  # for x's gradient y, for y's the x of silu
    assert_bitwise(saved[0], of_y)
    assert_bitwise(saved[2], data)
    assert_bitwise(saved[1], scale_y.to(torch.float8_e8m0fnu).view(torch.uint8))
    assert_bitwise(norm.grad_fn.saved_tensors[0], data)
    assert_bitwise(norm.grad_fn.saved_tensors[1], scale.to(torch.float8_e8m0fnu).view(torch.uint8))


class SaysCuda(torch.Tensor):
    """A tensor of the CPU that takes the way of CUDA: one kernel draws, scales and returns bits."""

    is_cuda = True


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_dropout_as_cuda_draws_it(p):
    x, g = torch.randn(64, 128), torch.randn(64, 128)
    leaf = x.as_subclass(SaysCuda).requires_grad_()
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


# --- faults, planted one at a time in what `keeper` and `keeping` call


def transposed(x, groups):
    """The codes of the transpose, in its order."""
    return groups_module.encode(x.t() if x.dim() == 2 else x, groups)


def neighbours_scale(x, groups):
    codes = groups_module.encode(x * torch.exp2(torch.arange(len(x)).float()).unsqueeze(1), groups)
    return codes._replace(scale=codes.scale.roll(1, 0))


def another_format(x, groups):
    data, scale = groups_module.encode(x, groups._replace(dtype=torch.float8_e5m2))
    return groups_module.Codes(data.view(torch.uint8).view(groups.dtype), scale)


def gradient_is_that_of_the_copy():
    x = torch.randn(128, 128, requires_grad=True)
    g = torch.randn(128, 128)
    with saved_activations():
        (found,) = torch.autograd.grad(F.silu(x), x, g)
    copy = copy_of(x).requires_grad_()
    (exact,) = torch.autograd.grad(F.silu(copy), copy, g.double())
    assert_sqnr_at_least(found, exact, 100.0)


def forward_is_torchs():
    x = torch.randn(128, 128, requires_grad=True)
    with saved_activations():
        assert_bitwise(F.silu(x), F.silu(x.detach()))


def from_the_copy(x):
    """A forward that sees what backward will see."""
    return F.silu(copy_of(x).to(x.dtype))


@pytest.mark.parametrize("fault", [transposed, neighbours_scale, another_format])
def test_a_wrong_copy_is_caught(fault):
    gradient_is_that_of_the_copy()
    with mock.patch.object(keeper, "encode", fault), pytest.raises(AssertionError, match="SQNR"):
        gradient_is_that_of_the_copy()


def test_a_forward_value_that_changed_is_caught():
    forward_is_torchs()
    changed = replace(OPS["silu"], forward=from_the_copy)
    with mock.patch.dict(OPS, silu=changed), pytest.raises(AssertionError):
        forward_is_torchs()
