"""`unit_scale` on whole models: scales near 1, the original untouched, eager as compiled."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from decided import steps_of
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms import float8, simulate_fp8, track_scales, unit_scale

WIDTH, HEADS, VOCABULARY = 64, 4, 50


class Block(nn.Module):
    """A pre-norm transformer block that spells everything another way than nn.Module's do."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        if mask is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(batch, length, WIDTH)))
        h = F.gelu(F.linear(input=self.mlp_norm(x), weight=self.up.weight, bias=self.up.bias))
        h = h @ self.down
        h += x
        return h


class GPT(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, targets=None, mask=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(batch=16, length=32):
    return torch.randint(VOCABULARY, (batch, length))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv1d(4, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1)
        self.norm, self.last = nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + F.silu(self.norm(self.body(x)))
        return self.last(x.transpose(1, 2))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 128), nn.SiLU(),
                         nn.Linear(128, 32))  # fmt: skip


def encoder(**options):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 128, batch_first=True, activation="gelu", **options
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# --- scales

MODELS = {
    "an MLP": (mlp, (256, WIDTH)),
    "a post-norm encoder": (encoder, (16, 32, WIDTH)),
    "a pre-norm encoder": (lambda: encoder(norm_first=True), (16, 32, WIDTH)),
    "a convolutional net": (Convolutions, (32, 4, 40)),
}


@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_of_weights_are_within_a_factor_of_3_of_unit_scale(name):
    """Rules hold for independent inputs; what a model correlates it multiplies: 3 is allowed.
    Of the plain model some tensor lies beyond."""
    make, shape = MODELS[name]
    plain, x = make(), torch.randn(shape)
    for model, is_scaled in ((unit_scale(plain), True), (plain, False)):
        out = model(x)
        out.backward(torch.randn_like(out))
        tensors = {n: p.grad for n, p in model.named_parameters() if p.dim() >= 2}
        tensors["output"] = out.detach()
        scales = {n: float(t.square().mean().sqrt()) for n, t in tensors.items()}
        assert all(1 / 3 < s < 3 for s in scales.values()) == is_scaled, scales


def test_every_weight_of_a_gpt_has_a_gradient_of_unit_scale_from_the_loss():
    model = unit_scale(GPT())
    tokens = ids(32)
    model(tokens, torch.randint(VOCABULARY, tokens.shape)).backward()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "positions" not in name:
            std = parameter.grad.std().item()
            assert 1 / 3 < std < 3, f"{name}: {std}"
    # the readout of u-muP begins at 1/sqrt(width)
    assert 0.8 < model(tokens).std() * WIDTH**0.5 < 1.2


def test_what_follows_the_last_residual_layer_over_cut_edges_is_unconstrained():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 9)
            self.c, self.d = nn.Linear(9, 2), nn.Linear(9, 2)

        def forward(self, x):
            x = x + self.a(x)
            x = self.b(x)
            return self.c(x) * self.d(x)

    model = unit_scale(Model())
    # c and d read one tensor: their gradients add up, and have to agree
    names = ["linear", "add", "linear", "linear", "linear"]
    expected = list(zip(names, [False, False, True, False, False], strict=True))
    assert steps_of(model, torch.randn(3, 4)) == expected
    x = torch.randn(3, 4)
    out = model(x)
    h = U.linear(U.residual_add(U.linear(x, model.a.weight), x, 2**0.5), model.b.weight)
    torch.testing.assert_close(out, U.linear(h, model.c.weight) * U.linear(h, model.d.weight))


# --- the model stays a model


def test_the_original_is_untouched_and_the_copy_has_its_names_and_methods():
    plain = GPT(1)
    before, tokens = copy.deepcopy(plain.state_dict()), ids()
    plain.eval()
    expected = plain(tokens)
    model = unit_scale(plain)
    model(tokens, tokens).backward()
    assert isinstance(model, GPT) and not model.training
    assert torch.equal(plain(tokens), expected)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name]) and not hasattr(tensor, "mup_type"), name
    assert list(model.state_dict()) == list(before)
    assert all(p.grad is None for p in plain.parameters())


def test_copies_and_pickles_run_their_own_weights():
    model, tokens = unit_scale(GPT(1)).eval(), ids()
    first = model(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens), first)
        with torch.no_grad():
            other.tokens.weight.neg_()
        assert not torch.equal(other(tokens), first) and torch.equal(model(tokens), first)
        assert other.lm_head.weight.mup_type == "output"


def test_a_state_dict_goes_to_another_copy():
    plain, tokens = GPT(1), ids()
    model, other = unit_scale(plain).eval(), unit_scale(GPT(1)).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


def test_u_mups_optimizer_takes_the_model_and_lowers_the_loss():
    model, tokens = unit_scale(GPT(1)), ids()
    optimizer = uu.optim.AdamW(model, lr=2**-3)
    losses = []
    for _ in range(8):
        loss = model(tokens, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


# --- torch.compile


def test_compiled_numbers_and_gradients_are_eager_ones_and_four_lengths_take_two_graphs():
    model = unit_scale(GPT(1)).eval()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (8, 12, 31, 64):
        tokens, found = ids(3, length), []
        for run in (model, compiled):
            model.zero_grad()
            loss = run(tokens, tokens)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*found)
    assert counter.frame_count <= 2


def test_masks_by_position_and_switching_to_eval_change_no_scale():
    model, tokens = unit_scale(GPT(1)), ids(2, 8)
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    model(tokens)
    model.eval()
    causal, masked = model(tokens), model(tokens, None, mask)
    torch.testing.assert_close(masked.std(), causal.std(), rtol=0.2, atol=0)
    model(ids(3, 9))


def test_an_attention_module_of_torch_is_decomposed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = unit_scale(Model()), torch.randn(2, 8, WIDTH)
    for parameter in (model.attention.in_proj_weight, model.attention.out_proj.weight):
        torch.testing.assert_close(parameter.std(), torch.tensor(1.0))
    heads = U.linear(x, model.attention.in_proj_weight).view(2, 8, 3, HEADS, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    a = U.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    torch.testing.assert_close(model(x), U.linear(a, model.attention.out_proj.weight))


# --- together with the other transforms


def test_unit_scaling_and_simulation_compose_in_either_order():
    plain, tokens = GPT(1).eval(), ids(2, 8)
    first, second = simulate_fp8(unit_scale(plain)), unit_scale(simulate_fp8(plain))
    assert torch.equal(first(tokens), second(tokens))
    assert not torch.equal(first(tokens), unit_scale(plain)(tokens))


def test_tracking_sees_the_users_calls_and_changes_no_number():
    plain, tokens = GPT(1).eval(), ids(2, 8)
    expected = unit_scale(plain)(tokens)
    for model in (track_scales(unit_scale(plain)), unit_scale(track_scales(plain))):
        assert torch.equal(model(tokens), expected)
        assert len(model.scales_graph().nodes) > 10


def test_hand_written_unit_scaled_layers_are_left_as_they_are():
    layer = uu.Linear(8, 6)
    model, x = unit_scale(nn.Sequential(layer)), torch.randn(3, 8)
    assert torch.equal(model(x), layer(x)) and torch.equal(model[0].weight, layer.weight)


# --- models of models


@pytest.mark.parametrize("inner", [unit_scale, simulate_fp8, track_scales])
@pytest.mark.parametrize("outer", [unit_scale, simulate_fp8, track_scales])
def test_a_transformed_model_may_be_a_part_of_another(inner, outer):
    """Counting is seen by no other transform; unit scaling twice is unit scaling once."""
    part, last, x = Convolutions().eval(), nn.Linear(10, 8), torch.randn(2, 4, 10)
    model = outer(nn.Sequential(inner(part), last))
    found = model(x)
    assert torch.equal(copy.deepcopy(model)(x), found)
    if inner is outer is not track_scales:
        torch.testing.assert_close(found, outer(nn.Sequential(part, last))(x))


def test_a_part_in_float8_is_refused_since_its_products_would_not_be_scaled():
    with pytest.raises(ValueError, match="0 has the transform float8"):
        unit_scale(nn.Sequential(float8(nn.Linear(4, 4)), nn.GELU()))


# --- sizes that depend on values


class Experts(nn.Module):
    """A mixture of experts that gathers each expert's tokens and adds their results back."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mask, out = F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


def test_a_mixture_of_experts_may_route_tokens_by_value():
    plain, x = Experts(), torch.randn(64, WIDTH)
    model = unit_scale(plain)
    found = model(x)
    weights, chosen = U.softmax(U.linear(x, model.gate.weight), -1).topk(2)
    expected = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        for place in range(2):
            is_here = (chosen[:, place] == number)[:, None]
            y = F.linear(x, expert.weight) * WIDTH**-0.5 * weights[:, place, None]
            expected += torch.where(is_here, y, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    found.backward(torch.randn_like(found))
    assert all(0.2 < e.weight.grad.std() < 5 for e in model.experts)


class Named(nn.Module):
    """A residual layer, and an output layer by its usual name."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(x + F.silu(self.a(x)))


def test_an_output_layer_stays_one_where_its_weight_has_lost_its_type():
    model, x = unit_scale(Named()), torch.randn(3, 16)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = torch.func.functional_call(model, weights, (x,))  # counts the layers, too
    assert torch.equal(first, model(x))
    model.load_state_dict(weights, assign=True)
    assert not hasattr(model.head.weight, "mup_type") and torch.equal(first, model(x))


def test_a_forward_may_differentiate_and_hook_what_it_has_computed():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy, self.seen = Named(), []

        def forward(self, x):
            x.requires_grad_()
            hidden = x * 2
            hidden.retain_grad()
            hidden.register_hook(self.seen.append)
            energy = self.energy(hidden).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, force, hidden

    model, x = unit_scale(Force()), torch.randn(3, 16)
    energy, force, hidden = model(x)
    assert len(model.seen) == 1
    (expected,) = torch.autograd.grad(energy, x, retain_graph=True)
    # Up to one factor: what comes over cut-edges is only known when the forward is over.
    torch.testing.assert_close(force / force.norm(), expected / expected.norm())
    energy.backward()
    assert len(model.seen) == 3
    torch.testing.assert_close(hidden.grad, sum(model.seen).detach())


# --- the run that counts residual layers leaves no trace


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), []

    def forward(self, x, box=None):
        self.seen.append(x)
        if isinstance(box, dict):
            box["states"].append(x)
        noise = random.random() + torch.rand(())
        return self.norm(x + self.layer(x) * noise)


def test_model_arguments_and_chance_are_as_after_one_forward():
    plain, x = Draws(), torch.randn(3, 4)
    random.seed(0), torch.manual_seed(0)
    plain(x)
    expected = random.random(), torch.rand(())
    model, box = unit_scale(Draws()), {"states": []}
    random.seed(0), torch.manual_seed(0)
    model(x, box)
    assert (random.random(), torch.rand(())) == expected
    assert len(model.seen) == len(box["states"]) == 1 and box["states"][0] is x
    assert model.norm.num_batches_tracked == 1


def test_an_argument_that_cannot_be_copied_is_refused_the_first_time_only():
    model, x = unit_scale(Draws()), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"counts .* on copies .*generator"):
        model(x, (i for i in range(3)))
    model(x)
    model(x, (i for i in range(3)))


def test_a_tensor_that_needs_its_graph_is_an_argument_like_any_other():
    model, x = unit_scale(Draws()), torch.randn(3, 4, requires_grad=True)
    model(x * 2, {"states": [x.exp()]}).square().sum().backward()
    assert x.grad is not None
