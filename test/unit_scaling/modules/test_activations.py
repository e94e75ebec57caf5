"""Modules without weights compute their functions, in training and in evaluation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from scale_assertions import gradients
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U

MODULES = {
    "gelu": (uu.GELU(), U.gelu),
    "gelu, tanh": (
        uu.GELU(mult=0.5, constraint=None, approximate="tanh"),
        lambda x: U.gelu(x, mult=0.5, constraint=None, approximate="tanh"),
    ),
    "silu": (uu.SiLU(), U.silu),
    "silu, sharp": (uu.SiLU(mult=2.0, constraint="gmean"), lambda x: U.silu(x, 2.0, "gmean")),
    "softmax": (uu.Softmax(-1), lambda x: U.softmax(x, -1)),
    "softmax over rows": (
        uu.Softmax(0, mult=3.0, constraint=None),
        lambda x: U.softmax(x, 0, constraint=None, mult=3.0),
    ),
    "no dropout": (uu.Dropout(0.0), lambda x: x),
}
EVERY = pytest.mark.parametrize(("module", "function"), MODULES.values(), ids=MODULES)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_is_its_function_forward_and_backward(module, function, dtype):
    x = torch.randn(7, 13).to(dtype)
    expected = gradients(function, x)
    for m in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(gradients(m, x), expected, rtol=0, atol=0)


def test_compiled_modules_compute_the_same():
    def every(x):
        return sum(module(x) for module, _ in MODULES.values())

    x = torch.randn(7, 13)
    compiled = torch.compile(every, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), gradients(every, x))


def test_modules_are_subclasses_of_torchs():
    assert isinstance(uu.GELU(), nn.GELU)
    assert isinstance(uu.SiLU(), nn.SiLU)
    assert isinstance(uu.Softmax(0), nn.Softmax)
    assert isinstance(uu.Dropout(), nn.Dropout)
    assert isinstance(uu.CrossEntropyLoss(), nn.CrossEntropyLoss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_its_function(reduction):
    logits, target = torch.randn(40, 11), torch.randint(11, (40,))
    target[::4] = 7
    weight = torch.rand(11) + 0.5
    module = uu.CrossEntropyLoss(
        mult=2.0, weight=weight, ignore_index=7, reduction=reduction, label_smoothing=0.1
    )
    found = gradients(lambda x: module(x, target), logits)
    expected = gradients(
        lambda x: U.cross_entropy(
            x, target, weight, ignore_index=7, reduction=reduction, label_smoothing=0.1, mult=2.0
        ),
        logits,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_dropout_drops_in_training_only():
    module, x = uu.Dropout(0.5), torch.randn(40, 30)
    torch.manual_seed(1)
    found = module(x)
    torch.manual_seed(1)
    assert torch.equal(found, U.dropout(x, 0.5)) and (found == 0).any()
    assert torch.equal(module.eval()(x), x)
