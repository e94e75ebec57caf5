"""A tensor is kept once, for as long as somebody needs it."""

import gc

import pytest
import torch
from meter import saved_bytes
from torch import nn
from torch.nn import functional as F

from float8.activations import saved_activations
from float8.activations.groups import Groups
from float8.activations.keeper import Keeper

COPY = 64 * 128 + 64  # bytes of a kept tensor of 64 x 128


def bytes_of(forward, **options):
    with saved_activations(**options):
        return saved_bytes(forward, nn.Module())


def leaf(*shape):
    return torch.randn(shape or (64, 128), requires_grad=True)


def test_two_ops_that_read_one_tensor_share_its_copy():
    x = leaf()
    assert bytes_of(lambda: F.silu(x) + torch.tanh(x) + F.rms_norm(x, (128,)) + x * x) == COPY


def test_so_do_two_views_of_the_same_elements():
    x = leaf()
    assert bytes_of(lambda: F.silu(x.view(8, 8, 128)).sum() + torch.tanh(x).sum()) == COPY


def test_other_elements_and_other_groups_have_copies_of_their_own():
    x, both = leaf(), leaf(64, 256)
    a, b = both.chunk(2, -1)
    assert bytes_of(lambda: F.silu(a) + torch.tanh(b)) == 2 * COPY
    # Rows of 32 are less than a group: groups cross them, and there are as many all the same.
    assert bytes_of(lambda: F.silu(x.view(-1, 32)).sum() + torch.tanh(x.t()).sum()) == 2 * COPY


def test_swiglu_keeps_gate_and_up_and_nothing_between():
    gate, up = leaf(), leaf()
    assert bytes_of(lambda: F.silu(gate) * up) == 2 * COPY
    assert bytes_of(lambda: up * F.gelu(gate, approximate="tanh")) == 2 * COPY
    assert bytes_of(lambda: gate * torch.sigmoid(gate)) == COPY


def test_what_was_computed_again_is_not_computed_upon():
    x, y = leaf(), leaf()
    # tanh(silu(x)) would be two ops again: it is kept itself.
    assert bytes_of(lambda: torch.tanh(F.silu(x)) * y) == 3 * COPY


def test_a_norm_that_is_spelt_out_keeps_x_and_what_its_weight_multiplies():
    h, w = leaf().bfloat16(), nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
    module = nn.Module()
    module.weight = w

    def norm():
        x = h.float()
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()

    rows = 2 * 4 * 64  # rstd in float32, for the product and for its own derivative
    with saved_activations():
        found = saved_bytes(norm, module)
    assert 2 * COPY < found <= 2 * COPY + rows
    assert saved_bytes(norm, module) >= 6 * 64 * 128, "float32 x and bfloat16 of its product"


@pytest.mark.parametrize("number", [1, 16])
def test_a_factor_that_is_much_smaller_than_the_product_stays_exact(number):
    # Of each row of 128 one factor, or 16.
    x, gate = leaf(4096, 128), leaf(4096, number)
    g = torch.randn(4096, 128)
    wide = lambda gate: gate.repeat_interleave(128 // number, 1)  # noqa: E731
    with saved_activations():
        out = x * (gate if number == 1 else wide(gate))
    (found,) = torch.autograd.grad(out, x, g)
    assert torch.equal(found, g * wide(gate.detach())) == (number == 1)


def test_a_view_that_is_read_negated_is_another_tensor():
    z = torch.randn(64, 128, dtype=torch.complex64, requires_grad=True)
    assert z.conj().imag.is_neg() and z.conj().imag._base is z.imag._base
    with saved_activations():
        F.silu(z.imag)
        first = F.silu(z.imag)
        found = F.silu(z.conj().imag)
    expected = torch.autograd.grad(F.silu(z.conj().imag).sum(), z)[0].imag
    found = torch.autograd.grad(found.sum(), z)[0].imag
    assert first is not None
    assert float((found - expected).norm()) < 0.05 * float(expected.norm())


def test_a_write_after_the_op_changes_no_gradient():
    x = leaf()
    h = x + 0
    with saved_activations():
        (expected,) = torch.autograd.grad(torch.tanh(x).sum(), x)
        y = torch.tanh(h)
        h.zero_()
        z = torch.tanh(h)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert (torch.autograd.grad(z.sum(), h)[0] == 1).all(), "tanh'(0), not at the old values"


def test_the_codes_go_with_the_graph_though_the_tensor_lives_on():
    x = leaf()
    scope = saved_activations()
    keeper = scope._mode.keeper
    with scope:
        y = F.silu(x)
        (place,) = keeper._memories[id(x)].values()
        codes = place.parts[0]
        assert codes() is not None
        y.sum().backward()
        assert codes() is None, "freed by backward, though y and its node live on"
        assert keeper._memories[id(x)] == {}
        F.silu(x)
    number = id(x)
    del x, y
    gc.collect()
    assert number not in keeper._memories and number not in keeper._alive


def test_codes_that_are_gone_are_made_again():
    x = leaf()
    with saved_activations():
        first = torch.autograd.grad(F.silu(x).sum(), x)[0]
        second = torch.autograd.grad(F.silu(x).sum(), x)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "x",
    [
        nn.Parameter(torch.randn(64, 128)),
        nn.Parameter(torch.randn(64, 128)).view(128, 64),
        nn.Parameter(torch.randn(64, 128)).t(),
        leaf(1, 128).expand(64, 128),
        leaf(64, 128).double(),
        leaf(64, 63),
        leaf(0, 128),
        torch.randn(64, 128),
        torch.ones(64, 128, dtype=torch.int64),
    ],
    ids=[
        "parameter",
        "view",
        "transpose",
        "broadcast",
        "float64",
        "tiny",
        "empty",
        "constant",
        "integers",
    ],
)
def test_what_float8_would_not_save_is_left_alone(x):
    assert not Keeper(Groups(), 4096).is_worth_it(x)


def test_a_product_with_a_parameter_keeps_the_parameter_itself():
    x, w = leaf(), nn.Parameter(torch.randn(64, 128))
    with saved_activations():
        out = x * w
    assert torch.equal(torch.autograd.grad(out, x, torch.ones_like(out))[0], w)


def test_a_rotation_by_a_table_stays_exact():
    x, angles = leaf(), torch.randn(64, 128)
    g = torch.randn(64, 128)
    with saved_activations():
        out = x * angles.cos()
    assert torch.equal(torch.autograd.grad(out, x, g)[0], g * angles.cos())
