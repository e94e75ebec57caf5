"""`cached_weights`: the same bits with fewer casts, and never those of an old weight."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from assertions import assert_all_bitwise, assert_bitwise
from meter import Casts
from shapes import pairs
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    cached_weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES


def model(recipe="tensorwise", dtype=torch.bfloat16):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)).to(dtype)
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(plain, config=config)


EVERY_OPTION = pytest.mark.parametrize("options", [{}, {"in_place": True}], ids=str)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.5)


def ours(net):
    return float8.optim.AdamW(net.parameters(), lr=0.1, min_size=0)


def microbatch(net, seed, run=None):
    torch.manual_seed(seed)
    x = torch.randn(16, 32, dtype=net[0].weight.dtype, requires_grad=True)
    out = (run or net)(x)
    out.backward(torch.randn_like(out))
    return out.detach(), x.grad


def train(net, optimizer=None, syncs_first=False, run=None):
    """Outputs, gradients, parameters and buffers."""
    optimizer, seen = optimizer or sgd(net), []
    for number in range(3):
        seen += [t for i in range(2) for t in microbatch(net, 10 * number + i, run)]
        if syncs_first:
            sync_float8_amax_and_scale_history(net)
        optimizer.step()
        optimizer.zero_grad()
        if not syncs_first:
            sync_float8_amax_and_scale_history(net)
    return [*seen, *net.parameters(), *net.buffers()]


def fresh(net):
    """What the model gives without the cache."""
    return microbatch(copy.deepcopy(net), 3)


def casts_of_weights(net, run):
    """How often a matrix of the first layer's weight's elements is cast while ``run`` runs."""
    with Casts() as casts:
        run()
    return casts.sizes.count(net[0].weight.numel())


# --- the same bits, whatever happens in the scope


def copy_masters(net):
    with torch.no_grad():
        torch._foreach_copy_(list(net.parameters()), [2 * p for p in net.parameters()])


def replace_weight(net):
    net[0].weight = nn.Parameter(2 * net[0].weight.detach())


def parametrize(net):
    torch.nn.utils.parametrizations.weight_norm(net[0])
    with torch.no_grad():
        net[0].parametrizations.weight.original0.mul_(2)


def load(net, factor=2, **options):
    net.load_state_dict({k: v * factor for k, v in net.state_dict().items()}, **options)


def special(net, value):
    with torch.no_grad():
        net[0].weight[0, 0] = value
        net[2].weight.fill_(value)
    load(net, 1)


def written(write, *args, **options):
    def scenario(net):
        before = microbatch(net, 3)
        write(net, *args, **options)
        after = microbatch(net, 3)
        assert not torch.equal(before[0], after[0])
        return [*before, *after]

    return scenario


def functional_call(net):
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    doubled = {name: 2 * p for name, p in net.named_parameters()}
    return [torch.func.functional_call(net, doubled, (x,)).detach()]


def lbfgs(net):
    """It moves weights between its closures."""
    optimizer, outputs = torch.optim.LBFGS(net.parameters(), max_iter=4), []

    def closure():
        optimizer.zero_grad()
        outputs.append(microbatch(net, 1)[0])
        return outputs[-1].square().mean()

    optimizer.step(closure)
    return outputs


class Masters(torch.optim.Optimizer):
    """An optimizer with masters, which writes to weights by ``.data`` alone."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.masters = [p.detach().float() for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            p.data.copy_(master.sub_(0.1 * p.grad))


def hooked(net):
    """By a hook that writes to weights after the update, unseen by version counters."""
    optimizer = ours(net)
    optimizer.register_step_post_hook(lambda *_: [p.data.mul_(4) for p in net.parameters()])
    return train(net, optimizer)


def tied(net):
    """Two parameters of one memory, in one optimizer; their version counters differ."""
    other = copy.deepcopy(net[0])
    other.weight.data = net[0].weight.data
    other.weight.grad = torch.ones_like(other.weight)
    torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.5).step()
    return microbatch(net, 3)


SCENARIOS = {
    "copy": written(copy_masters),
    "replace": written(replace_weight),
    "parametrize": written(parametrize),
    "load": written(load),
    "load by assignment": written(load, assign=True),
    "load into one layer": written(lambda net: load(net[0])),
    **{str(v): written(special, v) for v in (torch.nan, torch.inf, 0.0)},
    "functional_call": functional_call,
    "LBFGS": lbfgs,
    "masters": lambda net: train(net, Masters(net.parameters())),
    "a hook of the optimizer": hooked,
    "compiled": lambda net: train(net, run=torch.compile(net, backend="aot_eager", fullgraph=True)),
    "tied": tied,
    "frozen": lambda net: microbatch(net.requires_grad_(False), 1),
    **{
        f"checkpoint {reentrant}": lambda net, reentrant=reentrant: microbatch(
            net, 1, lambda x: checkpoint(net, x, use_reentrant=reentrant)
        )
        for reentrant in (False, True)
    },
}


@EVERY_OPTION
@pytest.mark.parametrize("name", SCENARIOS)
def test_results_have_the_bits_of_those_without_a_cache(name, options):
    net = model()
    with cached_weights(net, **options):
        got = SCENARIOS[name](net)
    assert_all_bitwise(got, SCENARIOS[name](model()), (name, options))


@pairs(recipe=list(RECIPES), in_place=[False, True], make=[sgd, ours], syncs_first=[False, True])
def test_training_has_the_same_bits(recipe, in_place, make, syncs_first):
    net, plain = model(recipe), model(recipe)
    with cached_weights(net, in_place=in_place):
        got = train(net, make(net), syncs_first)
    assert_all_bitwise(got, train(plain, make(plain), syncs_first), recipe)


def test_a_weight_is_cast_once_per_step_of_its_own_optimizer():
    net, other = model(), model()
    microbatch(other, 0)
    with cached_weights(net):
        assert casts_of_weights(net, lambda: [microbatch(net, i) for i in range(4)]) == 0
        assert casts_of_weights(net, sgd(net).step) == 1
        assert casts_of_weights(net, sgd(other).step) == 0
    with pytest.raises(ZeroDivisionError), cached_weights(net):
        raise ZeroDivisionError  # which ends the scope too
    assert casts_of_weights(net, lambda: microbatch(net, 0)) == 2
    enter(net)


def test_amaxes_are_recorded_by_forwards_in_training_whenever_the_weight_was_cast():
    net = model("delayed").eval()
    with cached_weights(net):
        assert net[0].cast_weight.current_amax == 0
        microbatch(net, 1)
        assert net[0].cast_weight.current_amax == 0, "an evaluation records nothing"
        microbatch(net.train(), 1)
        assert net[0].cast_weight.current_amax == net[0].weight.abs().max()


def test_a_cache_in_place_does_not_write_a_delayed_scale():
    """As when a checkpoint without history is loaded: the first scale comes when it is due."""
    net = model("delayed")
    plain = {k: v.clone() for k, v in net.state_dict().items() if "cast_" not in k}
    with torch.no_grad():
        net[0].cast_weight.scale.fill_(0.25)
    net[0].cast_weight.history_ready = True
    with cached_weights(net, in_place=True):
        net.load_state_dict(plain, strict=False)
        assert net[0].cast_weight.scale == 0 and not net[0].cast_weight.history_ready


# --- the contract


def test_writes_that_are_not_counted_need_refresh():
    """The stated contract, both halves: unseen until ``refresh``."""
    net = model()
    with cached_weights(net) as cache:
        before = microbatch(net, 3)[0]
        net[0].weight.data.mul_(2)
        assert_bitwise(microbatch(net, 3)[0], before)
        cache.refresh()
        assert_all_bitwise(microbatch(net, 3), fresh(net))


# --- copies, modes and dtypes


def test_copies_and_pickles_leave_the_cache_behind():
    net, buffer = model(), io.BytesIO()
    with cached_weights(net):
        copied = copy.deepcopy(net)
        torch.save(net, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert net[0].cached_weights
    copied.load_state_dict(net.state_dict())
    for each in (copied, loaded, net):
        assert not each[0].cached_weights
        assert "cached_weights" not in each[0].state_dict()


def test_a_refresh_in_inference_mode_or_after_a_change_of_dtype_serves_training():
    net = model(dtype=torch.float32)
    with cached_weights(net) as cache:
        net.bfloat16()
        with torch.inference_mode():
            cache.refresh()
        assert_all_bitwise(microbatch(net, 1), microbatch(copy.deepcopy(net), 1))


def test_autocast_is_that_of_the_entry():
    net, x = model(dtype=torch.float32), torch.randn(16, 32)
    with torch.no_grad():  # the amax of float32 weights would give another scale than bfloat16's
        net[0].weight[3, 5] = 1.0 + 2.0**-9 - 2.0**-20
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        with cached_weights(net):
            assert_bitwise(net(x), expected)
    error = pytest.raises(ValueError, match=r"cached_weights\(model, dtype=torch.bfloat16\)")
    with cached_weights(net), torch.autocast("cpu", torch.bfloat16), error:
        net(x)
    with cached_weights(net, dtype=torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        assert casts_of_weights(net, lambda: net(x)) == 0
        assert_bitwise(net(x), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_refresh_between_forward_and_backward_keeps_the_weights_of_the_forward(in_place):
    """In place it is an error."""
    net, error = model(), pytest.raises(RuntimeError, match="modified by an inplace operation")
    with error if in_place else nullcontext(), cached_weights(net, in_place=in_place) as cache:

        def run(x):
            out = net(x)
            net[0].weight.data.zero_()
            cache.refresh()
            return out

        assert_all_bitwise(microbatch(net, 1, run), microbatch(model(), 1))


def sharded():
    layer = Float8Linear(32, 16, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(16, 32), torch.ones(16, 32)))
    return layer


def not_yet_sharded():
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(nn.Linear(32, 16), config=config)


def twice(recipe):
    net = model(recipe)
    with cached_weights(net):
        enter(net)


def enter(net):
    with cached_weights(net):
        pass


REFUSED = [
    (lambda: enter(sharded()), TypeError, "TwoTensor"),
    (lambda: enter(not_yet_sharded()), TypeError, "fully_shard has sharded before"),
    (lambda: twice("tensorwise"), RuntimeError, "0: .*another"),
    (lambda: cached_weights(model(), dtype=torch.int8).__enter__(), TypeError, "int8"),
    (lambda: enter(nn.Sequential(nn.Linear(16, 16))), UserWarning, "no float8 layer"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refusals(call, error, words):
    is_warning = issubclass(error, Warning)
    with pytest.warns(error, match=words) if is_warning else pytest.raises(error, match=words):
        call()
