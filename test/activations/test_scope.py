"""The scope: which ops it changes, which it leaves to torch, and training inside it."""

import copy

import pytest
import torch
from meter import saved_bytes
from recompute import KINDS, Checkpointed
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from float8 import unit_scaling as uu
from float8.activations import saved_activations


class Net(nn.Module):
    """A norm, SwiGLU and the other ops, small enough to compile."""

    def __init__(self):
        super().__init__()
        self.rms, self.norm = nn.RMSNorm(64, eps=1e-5), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        gate, up = self.up(self.rms(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return torch.relu(F.gelu(self.norm(x)) * torch.tanh(x) * torch.sigmoid(x))


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


def step(call, model, x):
    """Output and all gradients, for a random grad_output."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = call(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_model_is_reached_only_inside_its_forward():
    model, other, x = Net(), nn.SiLU(), torch.randn(256, 64)
    plain = step(model, model, x)
    with saved_activations(model):
        inside = step(model, model, x)
        y = other(x.requires_grad_())
    assert torch.equal(inside[0], plain[0]) and not same(inside, plain)
    assert "SavedCopies" not in y.grad_fn.name()
    with saved_activations():
        everywhere = step(model, model, x)
    assert same(everywhere, inside)
    assert same(step(model, model, x), plain), "the scope is over"
    assert "forward" not in model.__dict__


def test_without_gradients_nothing_happens():
    x = torch.randn(64, 128, requires_grad=True)
    model = nn.Sequential(nn.SiLU())
    with saved_activations(model), saved_activations():
        with torch.no_grad():
            assert model(x).grad_fn is None
        with torch.inference_mode():
            assert torch.equal(model(x), F.silu(x))
        assert F.silu(x.detach()).grad_fn is None
        h = torch.inference_mode()(lambda: x * 1)()
        assert h.is_inference() and F.silu(h).grad_fn is None


def test_tensors_of_4096_elements_are_copied_unless_min_size_differs():
    for elements, options, is_copied in (
        (4096, {}, True),
        (4095, {}, False),
        (4096, {"min_size": 4097}, False),
        (1, {"min_size": 1}, True),
    ):
        x = torch.randn(elements, requires_grad=True)
        with saved_activations(**options):
            y = torch.tanh(x)
        assert ("SavedCopies" in y.grad_fn.name()) is is_copied, (elements, options)


def test_scopes_nest_and_the_inner_one_is_asked_first():
    x = torch.randn(64, 128, requires_grad=True)
    with saved_activations(skip=("silu",)), saved_activations(skip=("tanh",)):
        tanh, silu = torch.tanh(x), F.silu(x)
    for y in (tanh, silu):
        assert y.grad_fn.saved_tensors[0].dtype == torch.float8_e4m3fn
    model, scope = Net(), saved_activations(None)
    with scope, scope:
        model(x.view(-1, 64))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"skip": ("swish",)}, ValueError, r"no op is called \['swish'\]; known: \['drop"),
        ({"skip": "silu"}, ValueError, "no op is called"),
        ({"min_size": -1}, ValueError, "min_size must be an integer >= 0, got -1"),
        ({"min_size": 0.5}, TypeError, "min_size must be an integer"),
        ({"model": [nn.SiLU()]}, TypeError, r"model must be an nn\.Module, got a list"),
    ],
)
def test_bad_arguments_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        saved_activations(**options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward_inside", [True, False])
def test_a_checkpoint_saves_no_copies_and_recomputes_the_same(kind, backward_inside):
    model, x = Net(), torch.randn(256, 64)
    plain = step(model, model, x)
    checkpointed = Checkpointed(model, kind)
    if backward_inside:
        with saved_activations():
            found = step(checkpointed, model, x)
    else:
        with saved_activations(checkpointed):
            found = step(checkpointed, model, x)
    assert torch.equal(found[0], plain[0])
    # Only the reentrant kind recomputes under a scope that is open in backward.
    assert same(found, plain) or (kind == "reentrant" and backward_inside)


def tangent(x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(torch.tanh(dual)).tangent


LEFT_TO_TORCH = {
    "functorch": torch.func.grad(lambda x: F.silu(x).sum()),
    "vmap": torch.vmap(torch.func.grad(lambda row: torch.tanh(row).sum())),
    "forward mode": tangent,
    "nested": lambda x: F.gelu(torch.nested.as_nested_tensor([x, x[:9]])).to_padded_tensor(0.0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_no_plain_backward_is_left_to_torch(name):
    x, run = torch.randn(64, 128, requires_grad=True), LEFT_TO_TORCH[name]
    with saved_activations():
        found = run(x)
    expected = run(x)
    assert torch.equal(found, expected)
    if found.requires_grad:
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
        assert torch.equal(*gradients)


def test_ops_inside_unit_scaled_functions_are_reached():
    x = torch.randn(64, 128, requires_grad=True)
    plain = uu.functional.gelu(x)
    with saved_activations():
        found = uu.functional.gelu(x)
    assert torch.equal(found, plain)
    (a,), (b,) = (torch.autograd.grad(y.sum(), x) for y in (found, plain))
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=0.2)


# --- torch.compile


def test_compiled_results_and_bytes_equal_eagers():
    model, x = nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 64), nn.SiLU()), X

    def inside(x):
        with saved_activations():
            return model(x)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with saved_activations(model):
        eager = step(model, model, x)
        assert same(step(compiled, model, x), eager)
        leaf = x.clone().requires_grad_()
        assert saved_bytes(lambda: compiled(leaf), model) == saved_bytes(lambda: model(leaf), model)
    assert same(step(compiled, model, x), step(model, model, x)), "recompiled outside of the scope"
    assert same(step(torch.compile(inside, backend="aot_eager", fullgraph=True), model, x), eager)


def test_a_compiled_forward_may_unflatten():
    x = torch.randn(64, 256, requires_grad=True)

    def forward(x):
        with saved_activations():
            return F.silu(x.unflatten(-1, (2, 128))).flatten(1)

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), forward(x))


def test_a_compiled_power_saves_a_copy():
    x = torch.randn(64, 256, requires_grad=True)

    def forward(x):
        return (x + 1) ** 3

    with saved_activations():
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(forward(x).sum(), x)
    (exact,) = torch.autograd.grad(forward(x).sum(), x)
    assert not torch.equal(expected, exact)
    assert torch.equal(gradient, expected)


@pytest.mark.slow
def test_inductor():
    a, b = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    g = torch.randn(64, 128)

    def forward(a, b):
        return F.dropout(torch.tanh(a) * b, 0.5)

    def found(call):
        out = call(a, b)
        return out == 0, torch.autograd.grad(out, (a, b), g)

    with saved_activations():
        compiled = torch.compile(forward, fullgraph=True)
        mask, gradients = found(compiled)
        exact = torch.autograd.grad(2 * torch.tanh(a) * b, (a, b), g.masked_fill(mask, 0.0))
    assert 0.4 < mask.float().mean() < 0.6
    for x, y in zip(gradients, exact, strict=True):
        assert float((x - y).norm()) < 0.1 * float(y.norm())


# --- several processes


@pytest.mark.ranks(2)
def test_gradients_under_fsdp2_are_those_of_one_process(rank):
    """Equal data on both ranks average exactly."""
    torch.manual_seed(0)
    whole = nn.Sequential(Net(), Net())
    sharded = copy.deepcopy(whole)
    for layer in [*sharded, sharded]:
        fully_shard(layer)
    for model in (whole, sharded):
        with saved_activations(model):
            y = model(X)
        assert "SavedMask" in y.grad_fn.name(), "ops are reached"
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.full_tensor()), name
