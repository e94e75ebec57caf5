"""`float8.unit_scaling.override`: a torch function mode sees our functions whole."""

import copy
import pickle

import pytest
import torch
from assertions import assert_bitwise
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from float8.unit_scaling import functional as U
from float8.unit_scaling.override import overridable


@overridable
def twice(x, *, by=2.0):
    """Twice."""
    return torch.mul(x, by)


class Watching(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Tripling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] * 3 if func is twice else func(*args, **(kwargs or {}))


def test_a_mode_sees_the_call_and_not_what_is_inside():
    x = torch.randn(3)
    with Watching() as mode:
        y = twice(x, by=2.5)
    assert_bitwise(y, x * 2.5)
    assert mode.seen == [twice]


def test_a_mode_may_look_inside():
    x = torch.randn(3)
    with Watching() as mode:
        twice.implementation(x)
    assert mode.seen == [torch.mul]


def test_a_mode_may_replace_the_call_in_eager_and_compiled_code():
    def forward(x):
        with Tripling():
            return twice(x) + 1

    x = torch.ones(3)
    assert_bitwise(forward(x), torch.full((3,), 4.0))
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert_bitwise(compiled(x), torch.full((3,), 4.0))


def test_without_a_mode_the_function_is_itself():
    assert_bitwise(twice(torch.ones(2)), torch.full((2,), 2.0))
    assert twice.__name__ == "twice" and twice.__doc__ == "Twice."
    assert copy.deepcopy(U.gelu) is U.gelu
    assert pickle.loads(pickle.dumps(U.gelu)) is U.gelu


def test_a_tensor_given_by_keyword_is_seen():
    x = torch.ones(2)
    with Watching() as mode:
        U.gelu(input=x)
    assert mode.seen == [U.gelu]


FUNCTIONS = [
    getattr(U, n)
    for n in U.__all__
    if n not in {"torch_map", "register", "unregister", "residual_apply"}
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_unit_scaled_function_is_overridable(function):
    assert hasattr(function, "implementation")


def test_the_products_of_a_linear_layer_are_one_primitive():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with Watching() as mode:
        U.linear_readout.implementation(x, w)
    assert mode.seen == [U.linear]
    with Watching() as mode:
        U.linear.implementation(x, w)
    assert mode.seen.count(U.scaled_linear) == 1 and F.linear not in mode.seen
    with Watching() as mode:
        U.scaled_linear.implementation(x, w, None, (1.0, 1.0, 1.0))
    assert F.linear in mode.seen
