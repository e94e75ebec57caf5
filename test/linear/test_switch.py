"""`high_precision` in several threads, each independent, with recomputation in backward."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from assertions import assert_bitwise
from shapes import pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8 import Float8LinearConfig, convert_to_float8_training, high_precision
from float8.linear.switch import Switchable


def in_a_thread(function):
    """What a function returns, or raises, in a thread of its own."""
    found = {}

    def run():
        try:
            found["result"] = function()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if "error" in found:
        raise found["error"]
    return found["result"]


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


def mlp(recipe="tensorwise", layers=2, size=16):
    parts = [m for _ in range(layers) for m in (nn.Linear(size, size), nn.GELU())]
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(*parts), config=config)


@pytest.fixture
def case():
    """(model, input, its output in high precision, in float8)"""
    model, x = mlp(), torch.randn(8, 16)
    with high_precision(model):
        plain = model(x)
    assert not torch.equal(plain, model(x))
    return model, x, plain, model(x)


def test_eight_threads_leave_every_layer_in_float8():
    model, rounds = mlp("delayed", layers=10), 100
    switchables = [m for m in model.modules() if isinstance(m, Switchable)]
    assert len(switchables) == 40  # layers and their casts
    wrong = []

    def work():
        for _ in range(rounds):
            with high_precision(model):
                wrong.extend(m for m in switchables if not m.high_precision)
            wrong.extend(m for m in switchables if m.high_precision)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert not any(m.high_precision for m in switchables)
    assert len(model.state_dict()) == 10 * (2 + 3 * 3)


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
    model = case[0]
    with high_precision(model[0]):
        with high_precision(model):
            assert model[2].high_precision
        assert model[0].high_precision
        assert not model[2].high_precision
    assert not model[0].high_precision


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.parametrize("run", RUNS)
def test_a_generator_leaves_the_scope_where_it_entered_it(case, how, run):
    model, x, plain, quantised = case

    def evaluations():
        with high_precision(model):
            while True:
                yield model(x)

    generator = evaluations()
    assert_bitwise(next(generator), plain)

    def end():
        nonlocal generator
        if how == "close":
            generator.close()
        generator = None
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
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for _ in range(2):
        assert_bitwise(compiled(x), quantised)
        with high_precision(model):
            assert_bitwise(compiled(x), plain)
            with high_precision(model):
                assert_bitwise(compiled(x), plain)
            assert_bitwise(in_a_thread(lambda: compiled(x)), quantised)
        with open_in_another_thread(model):
            assert_bitwise(compiled(x), quantised)
    assert len(graphs) == 2


def test_a_scope_in_a_compiled_function(case):
    model, x, plain, quantised = case

    def both(x):
        with high_precision(model):
            first = model(x)
        return first, model(x)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for _ in range(2):
        first, second = compiled(x)
        assert_bitwise(first, plain)
        assert_bitwise(second, quantised)
        assert_bitwise(model(x), quantised)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo reads
def test_a_graph_that_breaks_within_a_scope(case):
    model, x, plain, quantised = case

    def broken(x):
        with high_precision(model):
            first = model(x)
            torch._dynamo.graph_break()
            second = model(x)
        return first, second, model(x)

    compiled = torch.compile(broken, backend="eager")
    for outer, expected in ((nothing, quantised), (high_precision, plain), (nothing, quantised)):
        with outer(model):
            first, second, third = compiled(x)
            assert_bitwise(first, plain)
            assert_bitwise(second, plain)
            assert_bitwise(third, expected)
        assert_bitwise(model(x), quantised)


# --- backward, and what it computes again


def gradients(model, run, before, inside, after=lambda: None):
    """Gradients of ``run(model, x)``, forward and backward where the scopes say."""
    torch.manual_seed(0)
    x, cotangent = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    model.zero_grad()
    with before(model):
        y = run(model, x)
    with inside(model):
        after(lambda: y.backward(cotangent))
    return [x.grad, *(p.grad for p in model.parameters())]


@contextmanager
def nothing(model):
    yield


def nested(model, x, recompute):
    def outer(x):
        return recompute(model[2:], model[:2](x))

    return recompute(outer, x)


def half(model, x, recompute):
    """The scope begins within the region, which opens it again when it is recomputed."""

    def region(x):
        y = model[:2](x)
        with high_precision(model):
            return model[2:](y)

    return recompute(region, x)


REGIONS = {
    "whole": lambda model, x, recompute: recompute(model, x),
    "nested": nested,
    "compiled": lambda model, x, recompute: recompute(torch.compile(model, backend="eager"), x),
    "half": half,
}


@pairs(
    thread=list(RUNS),
    scopes=[(nothing, high_precision), (high_precision, nothing)],
    region=list(REGIONS),
    use_reentrant=[False, True],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested ones
def test_backward_belongs_to_its_forward(thread, scopes, region, use_reentrant):
    model, (before, inside) = mlp(), scopes
    recompute = partial(checkpoint, use_reentrant=use_reentrant)
    reference = half if region == "half" else REGIONS["whole"]
    plain = partial(reference, recompute=lambda function, x: function(x))
    expected = gradients(model, plain, before, nothing, lambda backward: backward())
    run = partial(REGIONS[region], recompute=recompute)
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
