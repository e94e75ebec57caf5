"""A tracked model computes what the model does; its graph has the calls and their scales."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn

from float8 import E4M3, Float8Tensor, Tensorwise
from float8.unit_scaling.transforms import (
    Metrics,
    prune_non_float_tensors,
    track_scales,
)


class Net(nn.Module):
    """Attention and an MLP, with views, an in-place activation and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Linear(8, 16, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, offset=None):
        x = self.embed(tokens)
        if offset is not None:
            x = x + offset
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.drop(self.act(self.up(x)))
        return self.head(h[..., :8] + h[..., 8:])


def run(model, grad, *args):
    model.zero_grad()
    torch.manual_seed(0)
    y = model(*args)
    y.backward(grad)
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
GRAD = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(2))


def nodes(model):
    return {node.name: node for node in model.scales_graph().nodes}


def test_results_gradients_and_random_numbers_are_those_of_the_model():
    net = Net()
    expected = run(net, GRAD, TOKENS)
    state = torch.get_rng_state()
    for actual, right in zip(run(track_scales(net), GRAD, TOKENS), expected, strict=True):
        assert_bitwise(actual, right)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_graph_is_what_the_model_called_in_order():
    model = track_scales(Net())
    assert len(model.scales_graph().nodes) == 0
    model(TOKENS)
    graph = nodes(model)
    expected = """
        tokens embed_weight embedding qkv_weight qkv_bias linear chunk getitem getitem_1 getitem_2
        scaled_dot_product_attention add up_weight linear_1 relu dropout getitem_3 getitem_4 add_1
        linear_2 output
    """
    assert list(graph) == expected.split()
    ops = {"tokens": "placeholder", "qkv_bias": "get_attr", "chunk": "call_method"}
    assert {name: graph[name].op for name in ops} == ops
    assert graph["embed_weight"].target == "embed.weight"
    assert graph["linear"].target is F.linear
    assert graph["linear_2"].args[:2] == (graph["add_1"], graph["embed_weight"])
    assert graph["output"].args == (graph["linear_2"],)
    assert [n for n in graph if graph[n].meta["requires_grad"]] == [
        "embed_weight", "qkv_weight", "qkv_bias", "up_weight",
    ]  # fmt: skip
    assert not graph["tokens"].meta["outputs_float_tensor"]
    assert not graph["chunk"].meta["outputs_float_tensor"]
    assert all(
        ("metrics" in node.meta) == node.meta["outputs_float_tensor"] for node in graph.values()
    )


def close(found: Metrics.Data, tensor: torch.Tensor) -> bool:
    x = tensor.detach().double().flatten()
    numbers = [x.abs().mean(), x.mean().abs(), x.std(), x.abs().max(), x.abs().min()]
    mine = [found.mean_abs, found.abs_mean, found.std, found.abs_max, found.abs_min]
    return found.numel == x.numel() and torch.allclose(
        torch.tensor(mine, dtype=torch.float64), torch.stack(numbers), rtol=1e-5, atol=1e-7
    )


class Calls(nn.Module):
    """A function of the model and its input."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(7, 6)), function

    def forward(self, x):
        return self.function(self, x)


def test_scales_are_those_of_the_tensors_and_of_their_gradients_summed_over_users():
    torch.manual_seed(3)
    x, grad = torch.randn(5, 7), torch.randn(5, 6)
    model = track_scales(Calls(lambda m, x: F.silu(h := x @ m.w) * h.sigmoid() + h))
    y = model(x)
    assert nodes(model)["matmul"].meta["metrics"].bwd is None
    y.backward(grad)
    leaf, weight = x.double().requires_grad_(), model.w.detach().double().requires_grad_()
    h = leaf @ weight
    s, g = F.silu(h), h.sigmoid()
    p = s * g
    out = p + h
    names = ["x", "w", "matmul", "silu", "sigmoid", "mul", "add"]
    tensors = [leaf, weight, h, s, g, p, out]
    gradients = torch.autograd.grad(out, tensors, grad.double())
    graph = nodes(model)
    for name, tensor, gradient in zip(names, tensors, gradients, strict=True):
        metrics = graph[name].meta["metrics"]
        assert close(metrics.fwd, tensor), name
        assert close(metrics.bwd, gradient), name
    # One user alone would be another number.
    assert not close(graph["matmul"].meta["metrics"].bwd, grad)


def test_an_inplace_call_is_a_node_of_its_own_with_its_own_gradient():
    def writes(m, x):
        y = x * 2
        z = y.mul_(3.0)
        y[0] = 0.0
        return z + y

    torch.manual_seed(4)
    x, grad = torch.randn(4, 5), torch.randn(4, 5)
    model = track_scales(Calls(writes))
    model(x).backward(grad)
    graph = nodes(model)
    assert list(graph) == ["x", "mul", "mul_", "setitem", "add", "output"]
    assert graph["add"].args == (graph["setitem"], graph["setitem"])
    assert close(graph["mul_"].meta["metrics"].fwd, 6 * x)
    passed = 2 * grad
    passed[0] = 0
    assert close(graph["setitem"].meta["metrics"].bwd, 2 * grad)
    assert close(graph["mul_"].meta["metrics"].bwd, passed)
    assert close(graph["mul"].meta["metrics"].bwd, 3 * passed)
    assert close(graph["x"].meta["metrics"].bwd, 6 * passed)


def test_an_input_that_needs_no_gradient_is_left_as_it_is_and_still_written_to():
    class Writes(nn.Module):
        def forward(self, x, *, pair):
            x += 1
            x.view(-1)[0] = 5.0
            return x * pair[0] + pair[1]

    x, pair = torch.zeros(3), (torch.ones(3), torch.ones(3).requires_grad_())
    model = track_scales(Writes())
    y = model(x, pair=pair)
    y.backward(torch.randn(3))
    assert x.tolist() == [5.0, 1.0, 1.0]
    assert not x.requires_grad
    assert x.grad is None
    assert pair[0].grad is None
    assert pair[1].grad is not None
    assert {"x", "pair_0", "pair_1"} <= set(nodes(model))
    assert nodes(model)["x"].meta["metrics"].bwd is not None
    assert nodes(model)["pair_0"].meta["metrics"].bwd is not None


def test_decomposed_calls_do_not_end_the_graph():
    model = track_scales(Calls(lambda m, x: x.unflatten(-1, (2, 3)).sum(-1).exp()))
    model(torch.randn(4, 6))
    nodes = list(model.scales_graph().nodes)
    assert [node.op for node in nodes].index("output") == len(nodes) - 1
    assert nodes[-2].name == "exp"


# --- metrics


def by_hand(values):
    n, mean = len(values), math.fsum(values) / len(values)
    return {
        "mean_abs": math.fsum(map(abs, values)) / n,
        "abs_mean": abs(mean),
        "std": math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1)) if n > 1 else 0.0,
        "abs_max": max(map(abs, values)),
        "abs_min": min(map(abs, values)),
        "numel": n,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (), (2, 1), (7, 33, 5), (1000,)])
def test_metrics_are_those_of_float64_arithmetic(shape, dtype):
    torch.manual_seed(1)
    x = (torch.randn(shape, dtype=torch.float64) * 3 - 1).to(dtype).requires_grad_()
    found, expected = Metrics(x).fwd, by_hand(x.detach().double().flatten().tolist())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert Metrics.names() == list(expected)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("x", [torch.tensor([1.0, math.nan]), torch.empty(0, 3)])
def test_a_nan_shows_in_every_number_and_of_nothing_are_no_numbers(x):
    found = Metrics(x).fwd
    assert all(math.isnan(getattr(found, name)) for name in Metrics.names() if name != "numel")
    assert found.numel == x.numel()


def test_sparse_gradients_and_float8_tensors_count_as_what_they_stand_for():
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert Metrics(dense.to_sparse()).fwd == Metrics(dense).fwd
    x = torch.tensor([[448.0, -2.0]] * 16)
    assert Metrics(Float8Tensor.from_high_precision(x, E4M3, Tensorwise())).fwd == Metrics(x).fwd


# --- pruned graphs


class Views(nn.Module):
    """Views, slices, integers and sums."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.linear = nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        flat = x.flatten(0, -1).view(x.shape)
        scores = F.softmax(self.linear(flat), dim=-1)
        top = scores.argmax(-1).unsqueeze(-1)
        a, b = torch.split(x, 32, -1)
        return torch.cat([a, b, torch.gather(x, -1, top)], dim=-1)


def graph():
    torch.manual_seed(1)
    model = track_scales(Views())
    y = model(torch.randint(0, 50, (8, 16)))
    y.backward(torch.randn_like(y))
    return model.scales_graph()


def named(g):
    return {node.name: node for node in g.nodes}


def test_what_is_no_float_tensor_goes_and_its_users_read_its_float_input():
    whole = graph()
    before = list(named(whole))
    left = named(prune_non_float_tensors(whole))
    assert set(before) - set(left) == {"tokens", "argmax", "unsqueeze", "split"}
    assert left["gather"].args == (left["embedding"], -1, left["softmax"])
    assert left["getitem"].args[0] is left["embedding"]
    assert left["embedding"].args[0] is None
    assert list(named(whole)) == before
    assert left["softmax"].meta["metrics"] is named(whole)["softmax"].meta["metrics"]
