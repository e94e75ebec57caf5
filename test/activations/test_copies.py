"""Float8 copies equal the oracle's to the bit; ops that read one tensor share one copy."""

import gc

import oracle
import pytest
import torch
from activations.copies import copy_of, rows
from assertions import assert_bitwise
from meter import CastMeter, saved_bytes
from shapes import Case, pairs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from float8.activations import copies, saved_activations
from float8.activations.copies import CopyCache, cast_copy, restored

SHAPES = ((3, 256), (2, 3, 130), (5, 123), (40, 8), (7,), (), (0, 64), (4, 0))


@pairs(
    shape=SHAPES,
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    fill=("normal", "wide", "zeros"),
    layout=("contiguous", "transposed", "sliced"),
)
def test_data_and_scales_are_the_oracles(shape, dtype, fill, layout):
    case = Case(shape, dtype, fill=fill, layout=layout if len(shape) > 1 else "contiguous")
    x = case.make()
    copy = cast_copy(x)
    data, scale = oracle.quantize(rows(x), (1, 128), torch.float8_e4m3fn, "power_of_two")
    assert_bitwise(copy.data, data, case)
    assert_bitwise(copy.scale, scale.to(torch.float8_e8m0fnu).view(torch.uint8), case)
    found = restored(copy, tuple(x.shape), dtype)
    assert torch.equal(found.double(), copy_of(x)), "data times a power of two is exact"


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_makes_its_own_group_nan(special):
    x = torch.randn(2, 256)
    x[0, 3] = special
    found = restored(cast_copy(x), (2, 256), x.dtype)
    assert found[0, :128].isnan().all()
    assert found[0, 128:].isfinite().all() and found[1].isfinite().all()


# --- one copy per tensor

COPY = 64 * 128 + 64  # bytes of the copy of a tensor of 64 x 128


def bytes_of(forward, **options):
    with saved_activations(**options):
        return saved_bytes(forward, nn.Module())


def leaf(*shape):
    return torch.randn(shape or (64, 128), requires_grad=True)


def test_two_ops_that_read_one_tensor_share_its_copy():
    x = leaf()
    assert bytes_of(lambda: F.silu(x) + torch.tanh(x) + F.rms_norm(x, (128,)) + x * x) == COPY
    assert bytes_of(lambda: F.silu(x).sum() + torch.tanh(x.view(8, 8, 128)).sum()) == COPY


def test_other_elements_and_other_groups_have_copies_of_their_own():
    x, both = leaf(), leaf(64, 256)
    a, b = both.chunk(2, -1)
    assert bytes_of(lambda: F.silu(a) + torch.tanh(b)) == 2 * COPY
    # Rows of 32 are shorter than a group: groups span rows, and their number is the same.
    assert bytes_of(lambda: F.silu(x.view(-1, 32)).sum() + torch.tanh(x.t()).sum()) == 2 * COPY


def test_swiglu_saves_gate_and_up_only():
    gate, up = leaf(), leaf()
    assert bytes_of(lambda: F.silu(gate) * up) == 2 * COPY
    assert bytes_of(lambda: up * F.gelu(gate, approximate="tanh")) == 2 * COPY
    assert bytes_of(lambda: gate * torch.sigmoid(gate)) == COPY


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tanh(x).sum() + F.silu(x.view(8, 8, 128)).sum(),  # one copy of two shapes
        lambda x: (F.silu(F.gelu(x)) * x.flip(0)).sum(),  # the product has a copy of silu's result
    ],
)
def test_a_shared_copy_has_the_gradient_of_its_tensor(function):
    x = leaf()
    with saved_activations():
        out = function(x)
    (found,) = torch.autograd.grad(out, x)
    (exact,) = torch.autograd.grad(function(x), x)
    assert float((found - exact).norm()) < 0.05 * float(exact.norm())


def test_a_negated_view_is_another_tensor():
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


def test_the_copy_is_freed_with_the_graph_though_the_tensor_lives_on():
    x = leaf()
    with saved_activations():
        y = F.silu(x)
        (entry,) = copies._ENTRIES[x].values()
        data = entry.parts[0]
        assert data() is not None
        y.sum().backward()
        assert data() is None, "freed by backward, though y and its node live on"
        F.silu(x)
    gc.collect()
    count = len(copies._ENTRIES)
    del x, y
    assert len(copies._ENTRIES) == count - 2  # those of x and y


SAVED_THEMSELVES = {
    "parameter": nn.Parameter(torch.randn(64, 128)),
    "view": nn.Parameter(torch.randn(64, 128)).view(128, 64),
    "transpose": nn.Parameter(torch.randn(64, 128)).t(),
    "broadcast": leaf(1, 128).expand(64, 128),
    "float64": leaf(64, 128).double(),
    "tiny": leaf(64, 63),
    "empty": leaf(0, 128),
    "constant": torch.randn(64, 128),
    "integers": torch.ones(64, 128, dtype=torch.int64),
}


@pytest.mark.parametrize("x", SAVED_THEMSELVES.values(), ids=SAVED_THEMSELVES)
def test_a_tensor_whose_copy_saves_no_memory_is_saved_itself(x):
    assert not CopyCache(4096).is_worthwhile(x)


def test_on_cuda_a_copy_has_the_same_shapes():
    pytest.importorskip("triton")
    with FakeTensorMode():
        copy = cast_copy(torch.empty(64, 256, device="cuda"))
        with CastMeter() as meter:
            x = restored(copy, (8, 8, 256), torch.bfloat16)
    assert (copy.data.shape, copy.scale.shape) == ((64, 256), (64, 2))
    assert (x.shape, x.dtype) == ((8, 8, 256), torch.bfloat16)
    assert meter.ops == ["float8::dequantize_groups"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [256, 200])
def test_compiled_code_for_cuda_restores_the_same_values(dtype, width, monkeypatch):
    x = torch.randn(6, width).to(dtype)
    x[1, 5] = torch.inf
    copy = cast_copy(x)
    expected = restored(copy, x.shape, dtype)
    monkeypatch.setattr(copies, "_kernel_for", lambda family: "cast")
    compiled = torch.compile(restored, backend="aot_eager", fullgraph=True)
    assert_bitwise(compiled(copy, x.shape, dtype), expected)


def test_compiled_code_for_cuda_saves_the_copy_and_not_its_source(monkeypatch):
    w, v = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(64, 256, dtype=torch.bfloat16).requires_grad_()

    def forward(x):
        with saved_activations():
            return F.gelu(x @ w) @ v

    monkeypatch.setattr(copies, "_kernel_for", lambda family: "cast")
    compiled = torch.compile(forward, backend="aot_eager_decomp_partition", fullgraph=True)
    kept = saved_bytes(lambda: compiled(x), nn.Module())
    matrices = 2 * w.nbytes
    assert kept == matrices + 64 * 256 + 64 * 2
    monkeypatch.setattr(copies, "restored", with_views_that_fuse)  # the planted fault
    torch.compiler.reset()
    assert saved_bytes(lambda: compiled(x), nn.Module()) == matrices + 2 * 64 * 256


def with_views_that_fuse(copy, shape, dtype):
    data, scale = copy
    scale = (scale.to(torch.int32) << 23).view(torch.float32).to(dtype)
    return (data.to(dtype).unflatten(1, (-1, 128)) * scale.unsqueeze(2)).reshape(shape)
