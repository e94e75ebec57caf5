"""`op_on`: eager code calls a kernel's launcher itself, unless something has to see the op."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from float8.kernels import registration
from float8.kernels.registration import LAUNCHERS, define_op, op_on


@pytest.fixture(scope="module")
def op():
    """An op that doubles; its launcher, for "CUDA" tensors, triples."""
    found = define_op("test_op_on(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like, "CPU")
    LAUNCHERS["test_op_on"] = lambda x: x * 3
    yield found
    LAUNCHERS.pop("test_op_on")


@pytest.fixture(autouse=True)
def cpu_is_a_gpu(monkeypatch):
    monkeypatch.setattr(registration, "_on_gpu", operator.attrgetter("is_cpu"))


def run(x):
    return op_on("test_op_on", x)(x)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_plain_tensors_go_past_the_dispatcher(op):
    x = torch.ones(2)
    for plain in (x, torch.nn.Parameter(x), x.to(torch.bfloat16)):
        with torch.no_grad():
            assert run(plain).tolist() == [3.0, 3.0]
    with torch.inference_mode():
        assert run(torch.ones(2)).tolist() == [3.0, 3.0]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return run(x)

        @staticmethod
        def backward(ctx, g):
            return run(g)

    y = x.clone().requires_grad_()
    out = Function.apply(y)
    out.sum().backward()
    assert out.tolist() == y.grad.tolist() == [3.0, 3.0]


def test_tensors_of_other_devices_go_to_the_op(op, monkeypatch):
    monkeypatch.undo()
    assert run(torch.ones(2)).tolist() == [2.0, 2.0]
    assert run(torch.ones(2, device="meta")).device.type == "meta"


def test_whatever_sees_ops_sees_this_one(op):
    x = torch.ones(2)
    with Seen() as seen:
        assert run(x).tolist() == [2.0, 2.0]
    assert seen.ops[0] is op
    with FakeTensorMode() as mode:
        assert run(mode.from_tensor(x)).shape == (2,)
    with Passes():
        assert run(x).tolist() == [2.0, 2.0]
    assert run(x.as_subclass(Subclass)).tolist() == [2.0, 2.0]
    with torch.profiler.profile(acc_events=True) as profile:
        run(x)
    assert "float8::test_op_on" in [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_it_is_a_node_of_what_is_traced(op, pre_dispatch):
    graph = make_fx(run, pre_dispatch=pre_dispatch)(torch.ones(2)).graph
    assert [node.target for node in graph.find_nodes(op="call_function", target=op)] == [op]


def test_it_is_a_node_of_what_is_compiled(op):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    assert torch.compile(run, backend=keep, fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [node.target for node in graphs[0].graph.find_nodes(op="call_function", target=op)]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, since torch 2.15
def test_transforms_and_autograd_get_what_torch_says(op):
    assert torch.vmap(run)(torch.ones(2, 1)).tolist() == [[2.0], [2.0]]
    y = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        run(y).sum().backward()
