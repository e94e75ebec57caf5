"""`cached_weights`: the same bits with fewer casts, and never those of an old weight."""

from __future__ import annotations

import copy
import io
import sys
import threading
from unittest import mock

import pytest
import torch
from assertions import assert_bitwise
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
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
from float8.linear.float8_weight import cached_tensor, to_resident

OPTIONS = [{}, {"in_place": True}]
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=str)


def model(recipe="tensorwise", dtype=torch.bfloat16):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)).to(dtype)
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(plain, config=config)


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


def train(net, optimizer=None, steps=3, microbatches=2, sync="after the step"):
    """Outputs, gradients and parameters."""
    optimizer = optimizer or sgd(net)
    seen = []
    for number in range(steps):
        seen += [t for i in range(microbatches) for t in microbatch(net, 10 * number + i)]
        if sync == "before the step":
            sync_float8_amax_and_scale_history(net)
        optimizer.step()
        optimizer.zero_grad()
        if sync == "after the step":
            sync_float8_amax_and_scale_history(net)
    return [*seen, *net.parameters(), *net.buffers()]


def fresh(net):
    """What the model gives without the cache."""
    return microbatch(copy.deepcopy(net), 3)


def assert_all_bitwise(actual, expected, replay=""):
    for mine, theirs in zip(actual, expected, strict=True):
        assert_bitwise(mine, theirs, replay)


def counted(name):
    """A mock that counts the calls of a kernel, and still makes them."""
    return mock.patch(f"float8.kernels.{name}", wraps=getattr(float8.kernels, name))


class Casts(TorchDispatchMode):
    """Records the first two arguments of each cast: the matrix and its known scale."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.float8.cast_plain.default:
            self.seen.append(args[:2])
        return func(*args, **(kwargs or {}))


def casts_of_weights(net, run):
    """How often a matrix of the first layer's weight's elements is cast while ``run`` runs."""
    with Casts() as casts:
        run()
    return sum(x.numel() == net[0].weight.numel() for x, _ in casts.seen)


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
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(3)]


class Clamping(float8.optim.AdamW):
    """An optimizer that writes to weights after its update, unseen by version counters."""

    def step(self, closure=None):
        super().step(closure)
        multiply(self)


class Masters(torch.optim.Optimizer):
    """An optimizer with masters, which writes to weights by ``.data`` alone."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.masters = [p.detach().float() for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            p.data.copy_(master.sub_(0.1 * p.grad))


def multiply(optimizer, *unused):
    for p in optimizer.param_groups[0]["params"]:
        p.data.mul_(4)


def hooked(net):
    optimizer = ours(net)
    optimizer.register_step_post_hook(multiply)
    return train(net, optimizer)


def hooked_globally(net):
    """By a hook that runs before that of the library."""
    hook = register_optimizer_step_post_hook(multiply)
    _global_optimizer_post_hooks.move_to_end(hook.id, last=False)
    try:
        return train(net, ours(net))
    finally:
        hook.remove()


def some_steps_and_averages(net, make):
    """A step that GradScaler skips on the host; evaluations with averaged weights."""
    optimizer = make(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    average, seen = torch.optim.swa_utils.AveragedModel(net), []
    for number in range(3):
        seen += microbatch(net, number)
        if number == 1:
            net[0].weight.grad[0, 0] = torch.inf
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(net)
        own = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters()), list(average.parameters()))
            seen += [net(torch.ones(16, 32, dtype=torch.bfloat16)), *average.parameters()]
            torch._foreach_copy_(list(net.parameters()), own)
    assert scaler.get_scale() == 512.0
    return seen


def tied(net):
    """Two parameters of one memory; their version counters differ."""
    other = copy.deepcopy(net[0])
    other.weight.data = net[0].weight.data
    return stepped(net, [*net.parameters(), *other.parameters()])


def stepped(net, parameters):
    optimizer = float8.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.5, min_size=0)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
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
    "an override of step": lambda net: train(net, Clamping(net.parameters())),
    "masters": lambda net: train(net, Masters(net.parameters())),
    "a hook of the optimizer": hooked,
    "a hook of all optimizers": hooked_globally,
    "averages": lambda net: some_steps_and_averages(net, torch.optim.AdamW),
    "averages, ours": lambda net: some_steps_and_averages(net, float8.optim.AdamW),
    "tied": tied,
    "repeated": lambda net: stepped(net, [net[0].weight, net[2].weight, net[0].weight]),
    "one stepped": lambda net: stepped(net, [net[0].weight]),
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
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_results_have_the_bits_of_those_without_a_cache(name, options):
    net = model()
    with cached_weights(net, **options):
        got = SCENARIOS[name](net)
    assert_all_bitwise(got, SCENARIOS[name](model()), (name, options))


@EVERY_OPTION
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [sgd, ours])
def test_training_has_the_same_bits(recipe, options, make):
    net, plain = model(recipe), model(recipe)
    with cached_weights(net, **options):
        got = train(net, make(net))
    assert_all_bitwise(got, train(plain, make(plain)), recipe)


def test_sync_before_the_step_changes_no_bits():
    net = model("delayed")
    with cached_weights(net):
        got = train(net, sync="before the step")
    assert_all_bitwise(got, train(model("delayed"), sync="before the step"))


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
        net[0].cast_weight.start_from(torch.tensor(0.25))
    with cached_weights(net, in_place=True):
        net.load_state_dict(plain, strict=False)
        assert net[0].cast_weight.scale == 0 and not net[0].cast_weight.history_ready


def test_a_weight_is_cast_once_per_step_of_its_own_optimizer():
    net, other = model(), model()
    optimizer = sgd(net)
    microbatch(other, 0)
    with cached_weights(net):
        assert casts_of_weights(net, lambda: [microbatch(net, i) for i in range(4)]) == 0
        assert casts_of_weights(net, optimizer.step) == 1
        assert casts_of_weights(net, sgd(other).step) == 0
    assert casts_of_weights(net, lambda: microbatch(net, 0)) == 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_the_cached_weight_is_had_as_a_tensor_without_another_cast(recipe, in_place):
    """After a step and a ``sync``; it is what the layer's cast makes, and keeps its scale."""
    net = model(recipe)
    with cached_weights(net, in_place=in_place):
        train(net)
        found = []
        assert casts_of_weights(net, lambda: found.append(cached_tensor(net[0]))) == 0
        (w8,) = found
        expected = to_resident(net[0].weight, net[0].config, net[0].casts[1].state)
        if recipe == "delayed":  # whose scale it keeps
            microbatch(net, 5)
            sync_float8_amax_and_scale_history(net)
        assert_bitwise(w8.scale, expected.scale)
        assert_bitwise(cached_tensor(net[2]).dequantize(), cached_tensor(net[2]).dequantize())
        assert (w8.dtype, w8.block) == (net[0].weight.dtype, expected.block)
        if recipe != "delayed":
            assert_bitwise(w8.float8_data, expected.float8_data)


def test_what_is_not_current_is_no_tensor():
    net = model()
    assert cached_tensor(net[0]) is None
    with cached_weights(net) as cache:
        for write in (copy_masters, replace_weight):
            cache.refresh()
            assert cached_tensor(net[0]) is not None
            write(net)
            assert cached_tensor(net[0]) is None
        data, _ = net[2].cached_weight.row_major
        swizzled = torch.zeros(data.numel() // 32)  # the scales of MX GEMMs on a GPU
        net[2].cached_weight.row_major = (data, swizzled)
        assert cached_tensor(net[2]) is None


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
        assert net[0].cached_weight is not None
    copied.load_state_dict(net.state_dict())
    for each in (copied, loaded, net):
        assert each[0].cached_weight is None
        assert "cached_weight" not in each[0].state_dict()


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


def test_layers_that_stay_in_high_precision_are_left_alone():
    off = float8.CastConfig(float8.ScalingType.DISABLED)
    layer = Float8Linear(32, 16, config=Float8LinearConfig(off, off, off))
    x = torch.randn(8, 32)
    with cached_weights(layer):
        assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_compiled_without_a_graph_break():
    net = model()
    optimizer = sgd(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with cached_weights(net, in_place=True):
        for step in range(3):
            microbatch(net, step, compiled)
            optimizer.step()
            optimizer.zero_grad()
        got = compiled(torch.ones(16, 32, dtype=torch.bfloat16))
    expected = net(torch.ones(16, 32, dtype=torch.bfloat16))
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


def test_a_refresh_between_forward_and_backward_keeps_the_weights_of_the_forward():
    """In place it is an error."""
    expected = microbatch(model(), 1)[1]
    for in_place in (False, True):
        net = model()
        with cached_weights(net, in_place=in_place) as cache:
            torch.manual_seed(1)
            x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
            out = net(x)
            grad_output = torch.randn_like(out)
            net[0].weight.data.zero_()
            cache.refresh()
            if not in_place:
                out.backward(grad_output)
                assert_bitwise(x.grad, expected)
                continue
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward(grad_output)


def test_a_step_in_place_of_one_layer_leaves_the_graph_of_another_alone():
    net = model()
    x, g = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 16, dtype=torch.bfloat16)
    inner = torch.randn(16, 48, dtype=torch.bfloat16, requires_grad=True)
    with cached_weights(net, in_place=True):
        out = net[2](inner)
        net[0](x).sum().backward()
        torch.optim.SGD(net[0].parameters(), lr=0.1).step()
        out.backward(g)


def test_the_scope_ends_with_an_exception_too():
    net = model()
    with pytest.raises(ZeroDivisionError), cached_weights(net):
        raise ZeroDivisionError
    assert all(layer.cached_weight is None for layer in (net[0], net[2]))
    with cached_weights(net):
        pass


def sharded():
    layer = Float8Linear(32, 16, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(16, 32), torch.ones(16, 32)))
    return layer


def twice(recipe):
    net = model(recipe)
    with cached_weights(net):
        enter(net)


def enter(net):
    with cached_weights(net):
        pass


REFUSED = [
    (lambda: enter(sharded()), TypeError, "TwoTensor"),
    (lambda: twice("tensorwise"), RuntimeError, "0: .*another"),
    (lambda: cached_weights(model(), dtype=torch.int8).__enter__(), TypeError, "int8"),
    (lambda: enter(nn.Sequential(nn.Linear(16, 16))), UserWarning, "no float8 layer"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refusals(call, error, words):
    is_warning = issubclass(error, Warning)
    with pytest.warns(error, match=words) if is_warning else pytest.raises(error, match=words):
        call()


def test_contexts_open_and_close_in_other_threads():
    nets = [model() for _ in range(2)]
    errors = []

    def opens():
        try:
            for _ in range(100):
                with cached_weights(nets[0]):
                    pass
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=opens)
    try:
        with cached_weights(nets[1]):
            thread.start()
            while thread.is_alive():
                train(nets[1], ours(nets[1]), steps=1)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert not errors


@pytest.mark.parametrize("make", [torch.optim.SGD, float8.optim.SGD])
def test_a_compiled_step_does_not_trace_the_casts(make):
    net = model()
    optimizer = make(net.parameters(), lr=torch.tensor(0.1))
    counter = CompileCounter()
    optimizer.step = torch.compile(optimizer.step, backend=counter)
    with cached_weights(net):
        train(net, optimizer, steps=1)
        with counted("cast_operand") as casts:
            optimizer.step()
        assert casts.call_count == 2
        assert_all_bitwise(microbatch(net, 3), fresh(net))
    assert counter.frame_count == 1
