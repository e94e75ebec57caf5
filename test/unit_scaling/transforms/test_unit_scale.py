"""`unit_scale` on whole models: scales near 1, the original untouched, eager as compiled."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from decided import steps_of
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms import simulate_fp8, track_scales, unit_scale

WIDTH, HEADS = 64, 4


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


def test_what_it_computed_is_freed():
    outputs = []

    class Gate(nn.Module):
        def forward(self, x):
            y = torch.sigmoid(x)  # saves its own output
            outputs.append(weakref.ref(y))
            return y * x

    unit_scale(nn.Sequential(nn.Linear(16, 16), Gate()))(torch.randn(3, 16)).sum().backward()
    gc.collect()
    assert len(outputs) == 2 and not any(y() is not None for y in outputs)
