"""`cached_weights`: the same bits with fewer casts, and never those of an old weight."""

from __future__ import annotations

import copy
import io
from unittest import mock

import pytest
import torch
from assertions import assert_bitwise
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import float8.autograd
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    cached_weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

STATELESS = [name for name in RECIPES if name != "delayed"]


def model(recipe="tensorwise", dtype=torch.bfloat16):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)).to(dtype)
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(plain, config=config)


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.5)


def microbatch(net, seed, run=None):
    torch.manual_seed(seed)
    x = torch.randn(16, 32, dtype=net[0].weight.dtype, requires_grad=True)
    out = (run or net)(x)
    out.backward(torch.randn_like(out))
    return out.detach(), x.grad


def train(net, steps=3, microbatches=2, sync=False, sync_first=False):
    optimizer = optimizer_of(net)
    seen = []
    for step in range(steps):
        seen += [t for i in range(microbatches) for t in microbatch(net, 10 * step + i)]
        if sync and sync_first:
            sync_float8_amax_and_scale_history(net)
        optimizer.step()
        optimizer.zero_grad()
        if sync and not sync_first:
            sync_float8_amax_and_scale_history(net)
    return [*seen, *net.parameters()]


def assert_all_bitwise(actual, expected, replay=""):
    for mine, theirs in zip(actual, expected, strict=True):
        assert_bitwise(mine, theirs, replay)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", STATELESS)
def test_training_has_the_same_bits(recipe, in_place):
    net = model(recipe)
    with cached_weights(net, in_place):
        got = train(net)
    assert_all_bitwise(got, train(model(recipe)), recipe)


@pytest.mark.parametrize("sync_first", [False, True])
def test_delayed_uses_the_newest_scale_and_records_the_weights_that_were_cast(sync_first):
    net = model("delayed")
    with cached_weights(net):
        train(net, sync=True, sync_first=sync_first)
        cast = net[0].cast_weight
        rows = net[0].cached_weight.rows
        assert_bitwise(rows[1].reshape(()), cast.scale)
        again = model("delayed")
        again.load_state_dict(net.state_dict())
        expected, _ = microbatch(again, 7)
        got, _ = microbatch(net, 7)
        assert_bitwise(got, expected)
        assert cast.current_amax >= net[0].weight.abs().max()


def casts_of_weights(net, run):
    """How often a matrix of the first layer's weight's elements is cast while ``run`` runs."""
    with mock.patch("float8.kernels.cast", wraps=float8.kernels.cast) as cast:
        run()
    return sum(call.args[0].numel() == net[0].weight.numel() for call in cast.call_args_list)


def test_a_weight_is_cast_once_per_optimizer_step():
    net = model("tensorwise")
    optimizer = optimizer_of(net)
    with cached_weights(net):
        assert casts_of_weights(net, lambda: [microbatch(net, i) for i in range(4)]) == 0
        assert casts_of_weights(net, optimizer.step) == 1
    assert casts_of_weights(net, lambda: microbatch(net, 0)) == 2


def test_another_models_optimizer_casts_nothing():
    net, other = model(), model()
    microbatch(other, 0)
    with cached_weights(net):
        assert casts_of_weights(net, optimizer_of(other).step) == 0


def fresh(net):
    """What the model gives without the cache."""
    return microbatch(copy.deepcopy(net), 3)


def load(net):
    net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})


def load_by_assignment(net):
    net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True)


def load_into_one_layer(net):
    net[0].load_state_dict({k: v * 2 for k, v in net[0].state_dict().items()})


@pytest.mark.parametrize("write", [load, load_by_assignment, load_into_one_layer])
def test_loading_casts_again(write):
    net = model()
    with cached_weights(net):
        before = fresh(net)[0]
        write(net)
        got = microbatch(net, 3)
        assert_all_bitwise(got, fresh(net))
        assert not torch.equal(got[0], before)


def test_other_writes_need_refresh():
    """The stated contract, both halves: unseen until ``refresh``."""
    net = model()
    with cached_weights(net) as cache:
        before = microbatch(net, 3)[0]
        net[0].weight.data.mul_(2)
        assert_bitwise(microbatch(net, 3)[0], before)
        cache.refresh()
        assert_all_bitwise(microbatch(net, 3), fresh(net))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    net = model()

    def run(x):
        return checkpoint(net, x, use_reentrant=use_reentrant)

    with cached_weights(net):
        got = microbatch(net, 1, run)
    assert_all_bitwise(got, microbatch(model(), 1))


@pytest.mark.slow
def test_compiled_without_a_graph_break():
    net = model()
    optimizer = optimizer_of(net)
    compiled = torch.compile(net, fullgraph=True)
    with cached_weights(net, in_place=True):
        for step in range(3):
            microbatch(net, step, compiled)
            optimizer.step()
            optimizer.zero_grad()
        got = compiled(torch.ones(16, 32, dtype=torch.bfloat16))
    expected = net(torch.ones(16, 32, dtype=torch.bfloat16))
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


def test_in_place_refresh_between_forward_and_backward_is_an_error():
    net = model()
    with cached_weights(net, in_place=True) as cache:
        out = net(torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))
        cache.refresh()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_refresh_between_forward_and_backward_keeps_the_weights_of_the_forward():
    net = model()
    expected = microbatch(model(), 1)[1]
    with cached_weights(net) as cache:
        torch.manual_seed(1)
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
        out = net(x)
        grad_output = torch.randn_like(out)
        net[0].weight.data.zero_()
        cache.refresh()
        out.backward(grad_output)
        assert_bitwise(x.grad, expected)


def test_copies_and_pickles_leave_the_cache_behind():
    net = model()
    with cached_weights(net):
        copied = copy.deepcopy(net)
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert net[0].cached_weight is not None
    for each in (copied, loaded, net):
        assert each[0].cached_weight is None
        assert "cached_weight" not in each[0].state_dict()


def test_the_scope_ends_with_an_exception_too():
    net = model()
    with pytest.raises(ZeroDivisionError), cached_weights(net):
        raise ZeroDivisionError
    assert all(layer.cached_weight is None for layer in (net[0], net[2]))
    assert not net[0]._load_state_dict_post_hooks


def test_one_model_has_one_cache():
    net = model()
    error = pytest.raises(RuntimeError, match="0: its weight is cached by another")
    with cached_weights(net), error, cached_weights(net):
        pass


def test_autocast_is_that_of_the_entry():
    net = model(dtype=torch.float32)
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        with cached_weights(net):
            assert_bitwise(net(x), expected)
    error = pytest.raises(ValueError, match=r"cached in torch.float32 and is used in torch.bf")
    with cached_weights(net), torch.autocast("cpu", torch.bfloat16), error:
        net(x)


def test_frozen_weights_and_layers_that_stay_in_high_precision():
    off = {"scaling_type": float8.ScalingType.DISABLED}
    config = Float8LinearConfig(*[float8.CastConfig(**off)] * 3)
    layer = Float8Linear(32, 16, config=config)
    x = torch.randn(8, 32)
    with cached_weights(layer):
        assert layer.cached_weight is None
        assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    net = model()
    net.requires_grad_(False)
    with cached_weights(net):
        assert_all_bitwise(microbatch(net, 1), microbatch(model(), 1))


def test_sharded_weights_are_refused():
    layer = Float8Linear(32, 16, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(16, 32), torch.ones(16, 32)))
    error = pytest.raises(TypeError, match="weight is a TwoTensor; cached_weights casts whole")
    with error, cached_weights(layer):
        pass
