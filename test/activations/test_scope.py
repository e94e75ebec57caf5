"""The scope: which ops it changes, which it leaves to torch, and training inside it."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
from meter import saved_bytes
from processes import failures
from recompute import KINDS, Checkpointed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import float8
from benchmarks.models.transformer import Block, Sizes, rotary_table
from float8 import unit_scaling as uu
from float8.activations import saved_activations
from float8.formats import E5M2


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


def test_a_submodule_is_reached_through_the_whole_model():
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), torch.randn(64, 128, requires_grad=True)
    with saved_activations(model[1]):
        y = model(x)
    assert "SavedCopies" in y.grad_fn.name()
    assert "SavedCopies" not in y.grad_fn.next_functions[0][0].name()


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


def test_a_copy_made_inside_is_plain():
    model, x = Net(), torch.randn(256, 64)
    plain = step(model, model, x)
    with saved_activations(model):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (copied, pickled):
            assert same(step(other, other, x), plain)
        assert not same(step(model, model, x), plain)


def test_scopes_are_left_in_any_order():
    model, x = nn.Sequential(nn.Tanh()), torch.randn(64, 128, requires_grad=True)
    first, second = saved_activations(model, fmt=E5M2), saved_activations(model)
    first.__enter__()
    second.__enter__()
    first.__exit__()
    y = model(x)
    assert y.grad_fn.saved_tensors[0].dtype == torch.float8_e4m3fn
    second.__exit__()
    assert "forward" not in model.__dict__


def test_a_forward_that_is_assigned_inside_stays():
    model, x = nn.Sequential(nn.Tanh()), torch.randn(64, 128, requires_grad=True)
    with saved_activations(model):
        inner = model.forward
        model.forward = lambda x: inner(x + 0)
        assert "SavedCopies" in model(x).grad_fn.name()
    assert "forward" in model.__dict__
    assert "SavedCopies" not in model(x).grad_fn.name()


def test_the_signature_of_forward_is_the_models():
    # Trainers select the columns of a data set by it.
    model = Net()
    signature = inspect.signature(model.forward)
    with saved_activations(model):
        assert inspect.signature(model.forward) == signature


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch():
    for layout in (torch.strided, torch.jagged):
        rows = [torch.randn(n, 128) for n in (64, 32)]
        x = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        with saved_activations():
            assert "SavedCopies" not in F.gelu(x).grad_fn.name()


def test_scopes_nest_and_the_inner_one_is_asked_first():
    x = torch.randn(64, 128, requires_grad=True)
    with saved_activations(fmt=E5M2), saved_activations(skip=("tanh",)):
        tanh, silu = torch.tanh(x), F.silu(x)
    assert tanh.grad_fn.saved_tensors[0].dtype == torch.float8_e5m2
    assert silu.grad_fn.saved_tensors[0].dtype == torch.float8_e4m3fn
    model, scope = Net(), saved_activations(None, group=16)
    with scope, scope:
        model(x.view(-1, 64))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"skip": ("swish",)}, ValueError, r"skip: no op is called \['swish'\]; known: \['drop"),
        ({"also": ["cross_entropy"]}, ValueError, "also: no op is called"),
        ({"skip": "silu"}, ValueError, r'give \("silu",\)'),
        ({"group": 0}, ValueError, "group=0 must be a number of elements"),
        ({"group": (1, 128)}, ValueError, r"group=\(1, 128\)"),
        ({"fmt": torch.bfloat16}, TypeError, "not a float8 format"),
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


def test_functorch_computes_as_outside():
    x = torch.randn(64, 128)
    with saved_activations():
        found = torch.func.grad(lambda x: F.silu(x).sum())(x)
        each = torch.vmap(torch.func.grad(lambda row: torch.tanh(row).sum()))(x)
    assert torch.equal(found, torch.func.grad(lambda x: F.silu(x).sum())(x))
    assert each.shape == x.shape


def test_forward_mode_computes_as_outside():
    x = torch.randn(64, 128, requires_grad=True)
    with forward_ad.dual_level(), saved_activations():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(torch.tanh(dual)).tangent
    assert torch.allclose(tangent, 1 - torch.tanh(x) ** 2)


def test_ops_inside_unit_scaled_functions_are_reached():
    x = torch.randn(64, 128, requires_grad=True)
    plain = uu.functional.gelu(x)
    with saved_activations():
        found = uu.functional.gelu(x)
    assert torch.equal(found, plain)
    (a,), (b,) = (torch.autograd.grad(y.sum(), x) for y in (found, plain))
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=0.2)


# --- memory and training


SIZES = Sizes(1, 256, 4, 128, 2, 896)


def block(recipe="tensorwise"):
    torch.manual_seed(0)
    plain = Block(SIZES).bfloat16()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return plain, float8.convert_to_float8_training(copy.deepcopy(plain), config=config)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_a_llama_block_saves_at_most_060_of_the_bytes_of_bfloat16(recipe):
    plain, converted = block(recipe)
    rotary = rotary_table(SIZES.context, SIZES.head_dim)
    x = torch.randn(1, SIZES.context, SIZES.width, dtype=torch.bfloat16, requires_grad=True)
    whole = saved_bytes(lambda: plain(x + 0, rotary), plain)
    with saved_activations(converted):
        ours = saved_bytes(lambda: converted(x + 0, rotary), converted)
    assert ours <= 0.60 * whole
    # On a CPU, RMSNorm keeps float32 tensors. On a GPU h and rstd; in bytes per token and block:
    c, f, g = SIZES.width, SIZES.feed_forward, SIZES.kv_heads * SIZES.head_dim
    on_a_gpu = 2 * (2 * c + c + g + g + c + 2 * c + 3 * f + f)  # h, norm, q, k, v, out; gate to w2
    assert ours <= 0.60 * SIZES.context * on_a_gpu


def test_a_block_saves_the_bytes_of_its_layers_and_of_the_copies():
    # The inputs that Float8Linear saves are not copied again; bytes per element, by hand.
    _, converted = block()
    rotary = rotary_table(SIZES.context, SIZES.head_dim)
    x = torch.randn(1, SIZES.context, SIZES.width, dtype=torch.bfloat16, requires_grad=True)
    with saved_activations(converted):
        found = saved_bytes(lambda: converted(x + 0, rotary), converted)
    t, c, f = SIZES.context, SIZES.width, SIZES.feed_forward
    kv = SIZES.kv_heads * SIZES.head_dim
    layers = c + c + c + f  # inputs of wqkv, wo, w13, w2 in float8
    attention = 2 * (c + 2 * kv + c) + 4 * SIZES.heads  # q, k, v, out; float32 logsumexp
    ours = (c + c + f + f) * (1 + 1 / 128)  # h twice, gate and up
    rest = rotary.numel() * 4 + 64  # the table, and scales
    assert abs(found - t * (layers + attention + ours)) <= rest


def losses(steps=40, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(32, 64), Net(), Net(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(32, (128,))
    scope = saved_activations(model, **options) if options else torch.enable_grad()
    found = []
    with scope:
        for _ in range(steps):
            loss = F.cross_entropy(model(tokens[:-1]), tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_a_model_trains_as_well_as_without():
    plain, other, kept = losses(), losses(seed=1), losses(min_size=1024)
    assert plain[0] == kept[0], "the first forward is the same"
    between_seeds = abs(plain[-1] - other[-1])
    assert abs(kept[-1] - plain[-1]) <= max(between_seeds, 0.01 * plain[-1])
    assert kept[-1] < 0.8 * kept[0]


def test_with_a_gradient_scaler_and_autocast():
    model, x = Net(), torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with saved_activations(model):
            y = model(x)
    assert torch.equal(y, plain)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(y.float().sum()).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_without_bytes(device):
    # So that the memory of a model can be estimated without allocating it.
    with torch.device("meta"):
        model, x = Net(), torch.empty(256, 64, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True) if device == "cpu" else nullcontext():
        if device == "cpu":
            model.to_empty(device="cpu")
            x = torch.empty(256, 64, requires_grad=True)
        with saved_activations(model, also=("linear",)):
            y = model(x)
        y.backward(torch.empty_like(y))
        assert y.grad_fn is not None and x.grad.shape == x.shape


# --- torch.compile


class Small(nn.Module):
    """A norm, and a product with a recomputed factor: little to compile."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 256)

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return F.silu(gate) * up


def test_compiled_results_and_bytes_equal_eagers():
    model, x = Net(), torch.randn(256, 64)
    with saved_activations(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        eager, found = step(model, model, x), step(compiled, model, x)
        x.requires_grad_()
        assert saved_bytes(lambda: compiled(x), model) == saved_bytes(lambda: model(x), model)
    assert same(found, eager)
    assert same(step(compiled, model, x), step(model, model, x)), (
        "the graph is recompiled outside of the scope"
    )


def test_the_scope_of_all_ops_compiles_from_inside_and_outside():
    model, x = Small(), torch.randn(256, 64)

    def inside(x):
        with saved_activations():
            return model(x)

    with saved_activations(), torch.no_grad():
        output = model(x)
    with saved_activations():
        eager = step(model, model, x)
        outside = step(torch.compile(model, backend="aot_eager", fullgraph=True), model, x)
    assert torch.equal(outside[0], output)
    # Outside of the graph silu(gate) gets a copy of its own: 30 dB.
    for a, b in zip(outside, eager, strict=True):
        assert float((a - b).norm()) < 0.1 * float(b.norm())
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, model, x), eager)


def test_inductor():
    a, b = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    g = torch.randn(64, 128)
    with saved_activations():
        eager = torch.autograd.grad(torch.tanh(a) * b, (a, b), g)
        out = torch.compile(lambda a, b: torch.tanh(a) * b, fullgraph=True)(a, b)
        found = torch.autograd.grad(out, (a, b), g)
    for x, y in zip(found, eager, strict=True):
        assert float((x - y).norm()) < 0.1 * float(y.norm())


# --- several processes


def test_fsdp2():
    assert failures("activation_program", {"fsdp2": ("trains_like_one_process",)}) == {}
