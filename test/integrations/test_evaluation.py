"""A model in eval mode leaves float8 where no gradients are asked for, and only there."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from float8 import RMSNormCast, convert_to_float8_training, fuse_norms, high_precision
from float8.integrations import evaluation
from float8.integrations.evaluation import evaluate_in_high_precision


class Recursive(nn.Sequential):
    """Calls itself once, as a model that generates does."""

    def forward(self, x, again=True):
        if again:
            return self(x, again=False)
        if x.shape[0] == 0:
            raise RuntimeError("empty")
        return super().forward(x)


@pytest.fixture
def case():
    """(model, input, its output in high precision, in float8)"""
    model, x = Recursive(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), torch.randn(16, 32)
    plain = model(x)
    convert_to_float8_training(model)
    quantised = model(x)
    evaluate_in_high_precision(model)
    evaluate_in_high_precision(model)  # changes nothing
    return model, x, plain, quantised


def test_eval_mode_without_gradients_is_high_precision_and_nothing_else(case):
    model, x, plain, quantised = case
    assert not torch.equal(plain, quantised)
    for training in (False, True):
        model.train(training)
        assert torch.equal(model(x), quantised)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), quantised if training else plain)
    assert not any(layer.high_precision for layer in model if isinstance(layer, nn.Linear))


def test_a_part_that_is_called_by_itself_does_as_the_model_does(case):
    model, x, _, _ = case
    layer = model[0]
    plain, quantised = nn.functional.linear(x, layer.weight, layer.bias), layer(x)
    assert not torch.equal(plain, quantised)
    with torch.no_grad():
        assert torch.equal(layer(x), quantised)
        model.eval()
        for _ in range(2):  # an encoder, before a decoder generates
            assert torch.equal(layer(x), plain)
            model(x)
    assert torch.equal(layer(x), quantised)


def test_contexts_that_are_open_stay_so(case):
    model, x, plain, quantised = case
    with high_precision(model):
        with torch.no_grad():
            model.eval()(x)
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), quantised)


def test_an_error_on_the_way_leaves_nothing_open(case):
    model, x, _, quantised = case
    with torch.no_grad(), pytest.raises(RuntimeError, match="empty"):
        model.eval()(x[:0])
    assert torch.equal(model(x), quantised)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


@pytest.mark.parametrize("error", [Interrupt, ValueError])
@pytest.mark.parametrize("part", ["", "0", "2"])
@pytest.mark.parametrize("prepend", [True, False])
def test_what_an_error_or_ctrl_c_breaks_off_is_over_at_the_next_call(error, part, prepend):
    model, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), torch.randn(16, 32)
    convert_to_float8_training(model)
    quantised = model(x)
    evaluate_in_high_precision(model)

    def fail(module, args):
        raise error

    hook = model.get_submodule(part).register_forward_pre_hook(fail, prepend=prepend)
    with torch.no_grad(), pytest.raises(error):
        model.eval()(x)
    hook.remove()
    assert torch.equal(model(x), quantised)
    assert not any((model[0].high_precision, model[2].high_precision))


def test_copies_and_pickles_do_as_the_model_does(case):
    model, x, plain, quantised = case
    model.eval()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), quantised)
        with torch.no_grad():
            assert torch.equal(copied(x), plain)
            assert torch.equal(model(x), plain)


def test_compiled_in_one_graph(case):
    recursive, x, plain, quantised = case
    model = nn.Sequential(*recursive)
    evaluate_in_high_precision(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled.train()(x), quantised)
        with torch.no_grad():
            assert torch.equal(compiled.eval()(x), plain)


def test_a_thread_that_evaluates_changes_nothing_of_one_that_infers_in_float8(case):
    model, x, plain, quantised = case
    model.eval()
    assert torch.equal(model(x), quantised)  # with gradients, as an importance score asks for them
    is_inside, may_end, found = threading.Event(), threading.Event(), []

    class Wait(nn.Module):
        def forward(self, x):
            if not torch.is_grad_enabled():
                is_inside.set()
                assert may_end.wait(60)
            return x

    def evaluate():
        with torch.no_grad():
            found.append(model(x))

    gelu, model[1] = model[1], nn.Sequential(model[1], Wait())
    thread = threading.Thread(target=evaluate)
    thread.start()
    assert is_inside.wait(60)
    try:
        assert torch.equal(model(x), quantised)  # while the other one is between two layers
    finally:
        may_end.set()
        thread.join()
    assert torch.equal(found[0], plain)
    model[1] = gelu


def test_a_norm_that_is_fused_later_evaluates_as_its_readers_do():
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 16)).eval()
    x = torch.randn(16, 32)
    plain = model(x)
    convert_to_float8_training(model)
    evaluate_in_high_precision(model)
    fuse_norms(model)
    assert isinstance(model[0], RMSNormCast)
    with torch.no_grad():
        assert torch.equal(model(x), plain)


def test_models_that_version_0_6_0_pickled_with_its_hooks_evaluate_in_high_precision():
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), torch.randn(16, 32)
    plain = model(x)
    convert_to_float8_training(model)
    for module in (model, *model):
        module.is_evaluating = False
        module.register_forward_pre_hook(evaluation._enter)
        module.register_forward_hook(evaluation._leave, always_call=True)
    loaded = pickle.loads(pickle.dumps(model)).eval()
    assert not torch.equal(loaded(x), plain)
    with torch.no_grad():
        assert torch.equal(loaded(x), plain)
