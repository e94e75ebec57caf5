"""A tracked model computes the same as the model, and the graph has its calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn

from float8.unit_scaling.transforms.metrics import Metrics
from float8.unit_scaling.transforms.track_scales import track_scales


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


def test_tensors_of_unknown_origin_are_constants_and_their_gradients_are_recorded():
    outside = torch.full((7, 6), 2.0)

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    plain = Calls(lambda m, x: Doubles.apply(m.w) * outside + m.scale)
    plain.register_buffer("scale", torch.full((7, 6), 4.0))
    model = track_scales(plain)
    model(torch.ones(3)).backward(torch.ones(7, 6))
    graph = nodes(model)
    assert graph["_tensor_constant0"].meta["metrics"].fwd.mean_abs == 2.0
    assert graph["scale"].target == "scale"
    made = graph["mul_1"].args[0].meta["metrics"]
    assert close(made.fwd, 2 * model.w) and close(made.bwd, outside)


def test_decomposed_calls_do_not_end_the_graph():
    model = track_scales(Calls(lambda m, x: x.unflatten(-1, (2, 3)).sum(-1).exp()))
    model(torch.randn(4, 6))
    nodes = list(model.scales_graph().nodes)
    assert [node.op for node in nodes].index("output") == len(nodes) - 1
    assert nodes[-2].name == "exp"
