"""What holds for every transform: its model is a model of its own, and their order is free."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, sqnr
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8.unit_scaling.transforms import compile, float8, simulate_fp8, track_scales, unit_scale

TRANSFORMS = (unit_scale, simulate_fp8, track_scales, float8)
EVERY = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)


class Net(nn.Module):
    """A residual network with a product that is no module, and an activation in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.mix = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.act(F.linear(input=x, weight=self.mix)))


def results(model, rows=16, called=None):
    generator = torch.Generator().manual_seed(rows)
    x, g = (torch.randn(rows, n, generator=generator) for n in (32, 16))
    torch._dynamo.maybe_mark_dynamic(x, 0)
    model.zero_grad()
    out = (model if called is None else called)(x)
    out.backward(g)
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert_bitwise(mine, theirs)


@EVERY
def test_the_original_stays_and_the_copy_has_its_class_mode_and_names(transform):
    plain = Net().eval()
    before, expected = copy.deepcopy(plain.state_dict()), results(plain)
    model = transform(plain)
    results(model)
    assert isinstance(model, Net) and not model.training
    assert list(model.state_dict()) == list(before)
    assert_same(results(plain), expected)
    assert not any(hasattr(p, "mup_type") for p in plain.parameters())


@EVERY
def test_copies_pickles_and_loaded_models_run_their_own_weights(transform):
    model, loaded = transform(Net()), transform(Net())
    loaded.load_state_dict(model.state_dict())
    expected = results(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(other) is type(model)
        assert_same(results(other), expected)
        with torch.no_grad():
            other.head.weight.neg_()
        assert not torch.equal(results(other)[0], expected[0])
    assert_same(results(model), expected)


@pytest.mark.parametrize("low", [simulate_fp8, float8])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_transforms_compose_in_any_order(low, order):
    net = Net()
    model, transforms = net, (unit_scale, low, track_scales)
    for index in order:
        model = transforms[index](model)
    expected = results(low(unit_scale(net)))
    assert_same(results(model), expected)
    assert not torch.equal(expected[0], results(unit_scale(net))[0])
    calls = [n.name for n in model.scales_graph().nodes if n.op == "call_function"]
    assert calls[:2] == ["linear", "gelu"]


COMPILED = {
    "float8 and unit scaling": lambda: float8(unit_scale(Net())),
    "simulation": lambda: simulate_fp8(nn.Sequential(nn.Linear(32, 16), nn.ReLU())),
}


@pytest.mark.parametrize(
    "name", ["simulation", pytest.param("float8 and unit scaling", marks=pytest.mark.slow)]
)
def test_one_compiled_graph_serves_other_sizes_with_eagers_results(name):
    model, counter = COMPILED[name](), CompileCounterWithBackend("aot_eager")
    compiled = compile(model, backend=counter, fullgraph=True)
    for rows in (40, 24):
        found = results(model, rows, compiled)
        for mine, theirs in zip(found, results(model, rows), strict=True):
            assert sqnr(mine, theirs) > 25
    assert counter.frame_count == 1
