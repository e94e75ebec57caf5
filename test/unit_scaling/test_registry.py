"""`float8.unit_scaling.registry`: entries for torch's functions, and calls that modes see."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from assertions import assert_bitwise
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.registry import SPELLINGS, overridable

# --- torch_map


@pytest.fixture(autouse=True)
def restored_map():
    before = dict(registry.torch_map)
    yield
    registry.torch_map.clear()
    registry.torch_map.update(before)


def mine(*args, **kwargs):
    return args, kwargs


def test_a_function_of_torch_has_the_unit_scaled_one_of_its_name():
    assert len(U.torch_map) == 15
    for torch_function, ours in U.torch_map.items():
        assert ours is getattr(U, torch_function.__name__)


@pytest.mark.parametrize(
    "torch_function",
    [f for f in registry.torch_map if inspect.isfunction(f)],
    ids=lambda f: f.__name__,
)
def test_ours_takes_every_argument_of_torchs(torch_function):
    ours = inspect.signature(registry.torch_map[torch_function]).parameters
    theirs = inspect.signature(torch_function).parameters
    assert set(theirs) <= set(ours)
    positional = [name for name, p in theirs.items() if p.default is p.empty]
    assert list(ours)[: len(positional)] == positional


def test_an_entry_can_be_added():
    U.register(torch.sin, mine)
    assert U.torch_map[torch.sin] is mine
    del U.torch_map[torch.sin]


# --- overridable


@overridable
def twice(x, *, by=2.0):
    """Twice."""
    return torch.mul(x, by)


# --- spellings

CALLS = {
    "a @ b": (lambda a, b: a @ b, torch.matmul),
    "a.matmul(b)": (lambda a, b: a.matmul(b), torch.matmul),
    "operator.matmul": (operator.matmul, torch.matmul),
    "torch.linalg.matmul": (torch.linalg.matmul, torch.matmul),
    "a.mm(b)": (lambda a, b: a.mm(b), torch.mm),
    "a.bmm(b)": (lambda a, b: a[None].bmm(b[None])[0], torch.bmm),
    "a.addmm(a, b)": (lambda a, b: a.addmm(a, b), torch.addmm),
    "a.baddbmm": (lambda a, b: a[None].baddbmm(a[None], b[None])[0], torch.baddbmm),
    "a.addbmm": (lambda a, b: a.addbmm(a[None], b[None]), torch.addbmm),
    "a + b": (lambda a, b: a + b, torch.add),
    "a.add(b)": (lambda a, b: a.add(b), torch.add),
    "a.__add__(b)": (lambda a, b: a.__add__(b), torch.add),
    "1 + a": (lambda a, b: 1 + a, torch.add),
    "operator.add": (operator.add, torch.add),
    "a += b": (lambda a, b: operator.iadd(a.clone(), b), Tensor.add_),
    "a.add_(b)": (lambda a, b: a.clone().add_(b), Tensor.add_),
    "a.softmax": (lambda a, b: a.softmax(-1), torch.softmax),
    "torch.special.softmax": (lambda a, b: torch.special.softmax(a, -1), torch.softmax),
    "F.rms_norm": (lambda a, b: F.rms_norm(a, (3,)), F.rms_norm),
    "overridable": (lambda a, b: twice(a, by=3.0), twice),
    "by keyword": (lambda a, b: U.gelu(input=a), U.gelu),
}


class Doubles(TorchFunctionMode):
    """Doubles the result of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if SPELLINGS.get(func, func) is self.function:
            return result * 2
        return result


def test_a_mode_sees_every_spelling_as_its_function_in_eager_and_compiled_code():
    def everything(a, b):
        found = []
        for call, function in CALLS.values():
            with Doubles(function):
                found.append(call(a, b))
        return found

    a, b = torch.randn(2, 3, 3)
    compiled = torch.compile(everything, backend="eager", fullgraph=True)
    for run in (everything, compiled):
        for result, (name, (call, _)) in zip(run(a, b), CALLS.items(), strict=True):
            torch.testing.assert_close(
                result, 2 * call(a, b), msg=lambda m, name=name: f"{name}: {m}"
            )


def test_a_mode_sees_an_overridable_function_and_not_what_it_calls():
    x = torch.randn(3)
    with Doubles(torch.mul):
        assert_bitwise(twice(x), 2 * x)
        assert_bitwise(twice.implementation(x), 4 * x)
