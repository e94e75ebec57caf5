"""Each spelling stands for its function: same arguments, same result, eager and compiled."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from float8.unit_scaling.spellings import SPELLINGS

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
    "F.rms_norm": (
        lambda a, b: torch.nn.functional.rms_norm(a, (3,)),
        torch.nn.functional.rms_norm,
    ),
    "F.layer_norm": (
        lambda a, b: torch.nn.functional.layer_norm(a, (3,)),
        torch.nn.functional.layer_norm,
    ),
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


def test_functions_that_differ_stay_apart():
    assert SPELLINGS.get(Tensor.sub) is None
    assert SPELLINGS[Tensor.add_ if Tensor.add_ in SPELLINGS else Tensor.__iadd__] is Tensor.add_
    assert SPELLINGS[Tensor.mm] is not SPELLINGS[Tensor.matmul]
