"""`high_precision` in threads, copies, generators and compiled code, with what backward repeats."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from assertions import assert_bitwise
from shapes import pairs
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from float8 import convert_to_float8_training, high_precision


def in_a_thread(function):
    """What a function returns, or raises, in a thread of its own."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


RUNS = {"in this thread": lambda function: function(), "in another": in_a_thread}


@contextmanager
def open_in_another_thread(model):
    """`high_precision`, held open by another thread."""
    is_open, may_end = threading.Event(), threading.Event()

    def hold():
        with high_precision(model):
            is_open.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_open.wait(60)
    try:
        yield
    finally:
        may_end.set()
        thread.join()


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


def test_one_threads_evaluation_changes_nothing_of_anothers(case):
    model, x, plain, quantised = case
    with open_in_another_thread(model):
        assert_bitwise(model(x), quantised)
        with high_precision(model):
            assert_bitwise(model(x), plain)
        assert_bitwise(model(x), quantised)
    with high_precision(model):
        assert_bitwise(in_a_thread(lambda: model(x)), quantised)


def test_state_dicts_are_plain_in_the_thread_that_asked_for_it():
    model = mlp("delayed")
    keys = list(model.state_dict())
    with open_in_another_thread(model):
        assert list(model.state_dict()) == keys
    with high_precision(model):
        assert len(model.state_dict()) == 4
        assert list(in_a_thread(model.state_dict)) == keys


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
    for generator in generators:
        assert_bitwise(next(generator), plain)

    def end():
        generators.pop().close()
        generators.clear()
        gc.collect()

    del generator
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


def test_replicas_of_data_parallel_follow_the_thread_that_made_them(case):
    model, x = case[:2]

    def replica():  # as torch.nn.parallel.replicate makes one
        made = model[0]._replicate_for_data_parallel()
        for name, parameter in model[0].named_parameters(recurse=False):
            setattr(made, name, parameter)
        return made

    first, outside = model[0], replica()
    with high_precision(model):
        expected, inside = first(x), replica()
        assert_bitwise(in_a_thread(lambda: outside(x)), in_a_thread(lambda: first(x)))
    assert_bitwise(in_a_thread(lambda: inside(x)), expected)
    assert_bitwise(outside(x), first(x))


# --- compiled code


def test_compiled_code_guards_on_its_own_thread(case):
    model, x, plain, quantised = case
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_bitwise(compiled(x), quantised)
        with high_precision(model):
            assert_bitwise(compiled(x), plain)
            assert_bitwise(in_a_thread(lambda: compiled(x)), quantised)
        with open_in_another_thread(model):
            assert_bitwise(compiled(x), quantised)
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
    for outer, last in ((nothing, quantised), (high_precision, plain), (nothing, quantised)):
        with outer(model):
            for found, expected in zip(compiled(x), (plain, plain, last), strict=True):
                assert_bitwise(found, expected)
        assert_bitwise(model(x), quantised)


# --- backward, and what it computes again


def nothing(model):
    return nullcontext()


def gradients(model, run, before, inside, after):
    """Gradients of ``run(model, x)``, forward and backward where the scopes say."""
    torch.manual_seed(0)
    x, cotangent = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    model.zero_grad()
    with before(model):
        y = run(model, x)
    with inside(model):
        after(lambda: y.backward(cotangent))
    return [x.grad, *(p.grad for p in model.parameters())]


def whole(model, x, recompute):
    return recompute(model, x)


def nested(model, x, recompute):
    return recompute(lambda x: recompute(model[2:], model[:2](x)), x)


def compiled(model, x, recompute):
    return recompute(torch.compile(model, backend="eager"), x)


def half(model, x, recompute):
    """The scope begins within the region, which opens it again when it is recomputed."""

    def region(x):
        y = model[:2](x)
        with high_precision(model):
            return model[2:](y)

    return recompute(region, x)


@pairs(
    thread=list(RUNS),
    scopes=[(nothing, high_precision), (high_precision, nothing)],
    region=[whole, nested, compiled, half],
    use_reentrant=[False, True],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested ones
def test_backward_belongs_to_its_forward(thread, scopes, region, use_reentrant):
    model, (before, inside) = mlp(), scopes
    plain = partial(half if region is half else whole, recompute=lambda function, x: function(x))
    expected = gradients(model, plain, before, nothing, RUNS["in this thread"])
    run = partial(region, recompute=partial(checkpoint, use_reentrant=use_reentrant))
    found = gradients(model, run, before, inside, RUNS[thread])
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other)
    x, twin = torch.ones(2, 16), copy.deepcopy(model)  # whose copy is in no scope
    assert_bitwise(model(x), twin(x))


def test_a_scope_that_is_open_around_both_stays_open(case):
    model, x, plain, _ = case
    with high_precision(model):
        checkpoint(model, x, use_reentrant=False).sum().backward()
        assert_bitwise(model(x), plain)
