"""`high_precision` in copies, generators, compiled code and recomputation."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from assertions import assert_all_bitwise, assert_bitwise
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from float8 import convert_to_float8_training, high_precision


def in_a_thread(function):
    """What a function returns, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result(60)


RUNS = {"in this thread": lambda function: function(), "in another": in_a_thread}


def mlp(recipe="tensorwise"):
    parts = [m for _ in range(2) for m in (nn.Linear(16, 16), nn.GELU())]
    return convert_to_float8_training(nn.Sequential(*parts), config=recipe)


@pytest.fixture
def case():
    """(model, input, its output in high precision, in float8)"""
    model, x = mlp(), torch.randn(8, 16)
    with high_precision(model):
        plain = model(x)
    assert not torch.equal(plain, model(x))
    return model, x, plain, model(x)


def test_state_dicts_are_plain_in_the_context():
    model = mlp("delayed")
    keys = list(model.state_dict())
    with high_precision(model):
        assert len(model.state_dict()) == 4
    assert list(model.state_dict()) == keys


def test_a_part_is_switched_off_alone_and_with_the_whole(case):
    model, x, plain, quantised = case
    with high_precision(model[0]):
        with high_precision(model):
            assert_bitwise(model(x), plain)
        mixed = model(x)
        assert not torch.equal(mixed, plain) and not torch.equal(mixed, quantised)
    assert_bitwise(model(x), quantised)


@pytest.mark.parametrize("run", RUNS)
def test_a_generator_leaves_the_scope_where_it_entered_it(case, run):
    model, x, plain, quantised = case

    def evaluations():
        with high_precision(model):
            while True:
                yield model(x)

    generators = [evaluations(), evaluations()]
    assert_bitwise(next(generators[0]), plain)
    assert_bitwise(next(generators[1]), plain)

    def end():
        generators.pop().close()
        generators.clear()
        gc.collect()

    RUNS[run](end)
    assert_bitwise(model(x), quantised)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_that_is_made_inside_is_in_no_scope(case, copied):
    model, x, plain, quantised = case
    with high_precision(model):
        other = copied(model)
        assert_bitwise(model(x), plain)
        assert_bitwise(other(x), quantised)
    with high_precision(other):
        assert_bitwise(other(x), plain)
        assert_bitwise(model(x), quantised)


# --- compiled code


def test_compiled_code_guards_on_the_switch(case):
    model, x, plain, quantised = case
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_bitwise(compiled(x), quantised)
        with high_precision(model):
            assert_bitwise(compiled(x), plain)
            assert_bitwise(in_a_thread(lambda: compiled(x)), plain)
    assert graphs.frame_count == 2


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo reads
def test_a_scope_in_a_compiled_function(case, breaks):
    model, x, plain, quantised = case

    def function(x):
        with high_precision(model):
            first = model(x)
            if breaks:
                torch._dynamo.graph_break()
            second = model(x)
        return first, second, model(x)

    compiled = torch.compile(function, backend="eager", fullgraph=not breaks)
    for outer in (nullcontext, high_precision, nullcontext):
        last = plain if outer is high_precision else quantised
        with outer(model):
            assert_all_bitwise(compiled(x), (plain, plain, last))
        assert_bitwise(model(x), quantised)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_is_recomputed_as_the_model_is_then(case, use_reentrant, run):
    """Inside the context of its forward, to the same gradients, also by a thread of autograd."""
    model, x, plain, _ = case
    x = x.requires_grad_()
    with high_precision(model):
        expected = torch.autograd.grad(model(x).sum(), x)
        out = checkpoint(model, x, use_reentrant=use_reentrant)
        RUNS[run](out.sum().backward)
        assert_bitwise(model(x), plain)
    assert_bitwise(x.grad, *expected)
