"""`cached_weights` of weights that FSDP2 gathers: fewer casts, and the same bits.

`test_parallel_training.py` compares every recipe with one process. Here a model is compared with
the same model without a cache.
"""

from contextlib import nullcontext

import mixtures
import one_process as one
import pytest
import torch
from assertions import assert_all_bitwise
from meter import Casts
from parallel_forms import fsdp2, mesh
from recompute import KINDS, Checkpointed
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import parallelize_module

from float8 import (
    Float8ColwiseParallel,
    Float8Linear,
    after_step,
    cached_weights,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

ELEMENTS = one.WIDTH * one.HIDDEN  # of each weight; no other matrix has as many
BF16 = torch.bfloat16


def make(recipe="rowwise", wrap=lambda model: model, over=None, **options):
    return fsdp2(one.make(recipe, wrap), over, reshard_after_forward=False, **options)


def linears(model):
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def microbatch(model, seed, last=True, run=None):
    """Output and grad_input; the weights stay gathered if it is not the ``last``."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(2, one.TOKENS, one.WIDTH, generator=generator)
    x.requires_grad_()
    out = (run or model)(x)
    out.backward(g.to(out.dtype))
    return [out.detach(), x.grad]


def step(model, optimizer, number=0, count=3, between=lambda model: None, run=None):
    """A step of some microbatches; what they return, and the parameters."""
    seen = []
    for i in range(count):
        seen += microbatch(model, 10 * number + i, i == count - 1, run)
        if i < count - 1:
            seen += between(model) or []
    optimizer.step()
    optimizer.zero_grad()
    after_step(model)
    return [*seen, *one.whole(model.parameters())]


def train(model, cached=True, dtype=None, **options):
    """Four steps, every second one with the ``options``; a cache has one ``dtype``, in all."""
    optimizer, model.shards = one.adamw(model), [*model.parameters()]
    with cached_weights(model, dtype=dtype) if cached else nullcontext():
        return [
            t
            for number in range(4)
            for t in step(model, optimizer, number, **(options if number % 2 or dtype else {}))
        ]


def casts_of(run):
    """What ``run`` returns, and how often it casts a weight."""
    with Casts() as casts:
        result = run()
    return result, casts.sizes.count(ELEMENTS)


# --- counted casts


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_kept_is_cast_once_per_step(rank, recipe):
    """By two casts, where the two are unlike."""
    model, each = make(recipe), 2 if recipe == "rowwise_with_gw_hp" else 1
    optimizer = one.adamw(model)
    _, without = casts_of(lambda: step(model, optimizer, 0, count=4))
    with cached_weights(model):
        _, first = casts_of(lambda: step(model, optimizer, 1, count=4))
        _, second = casts_of(lambda: step(model, optimizer, 2, count=7))
    assert (without, first, second) == (2 * 4 * 2, 2 * each, 2 * each)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2), (False, 1)])
def test_a_weight_is_cast_at_each_gather(rank, reshard, gathers):
    """Freed after each backward, or after each forward too."""
    model = fsdp2(one.make("rowwise"), reshard_after_forward=reshard)
    model.set_reshard_after_backward(True)
    with cached_weights(model):
        _, casts = casts_of(lambda: one.loss_of(model, one.batch(0, 0)).backward())
    assert casts == 2 * gathers


@pytest.mark.ranks(2)
def test_the_casts_are_freed_with_the_weight(rank):
    model = make()
    optimizer, kept = one.adamw(model), []

    def look(model):
        kept.append([layer.cached_weights["weight"] for layer in linears(model)])

    with cached_weights(model):
        step(model, optimizer, between=look)
        assert all(a is b for a, b in zip(*kept, strict=True))
        assert not any(layer.cached_weights for layer in linears(model))
        model.unshard()
        model[0].unshard()
        assert model[0].cached_weights
        model[0].reshard()
        assert not model[0].cached_weights
        model[0].unshard()
    assert not model[0].cached_weights
    model[0].reshard()
    model[0].unshard()
    assert not model[0].cached_weights


# --- the same bits


def write_to_shards(model):
    with torch.no_grad():
        for layer in linears(model):
            layer.reshard()
            layer.weight.mul_(1.5)


def write_to_gathered(model):
    with torch.no_grad():
        for layer in linears(model):
            layer.weight.mul_(1.5)


def load(model):
    model.load_state_dict({name: 2 * p for name, p in model.state_dict().items()})


def evaluate(model):
    x = torch.ones(8, one.WIDTH)
    with torch.no_grad():
        seen = [model(x)]
    with torch.inference_mode():
        seen.append(model(x).clone())
    with high_precision(model):
        seen.append(model(x).detach())
    return seen


def evaluate_and_sync(model):
    evaluate(model)
    sync_float8_amax_and_scale_history(model)


def step_of_shards(model):
    """By gradients of its own; FSDP2 goes on with the weights that it has gathered."""
    for p in model.shards:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.shards, 0.1).step()
    for p in model.shards:
        p.grad = None


def reshard_before_backward(model):
    def run(x):
        out = model(x)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return out

    return run


def in_autocast(model):
    def run(x):
        with torch.autocast("cpu", BF16):
            return model(x)

    return run


def gathered_before_autocast(model):
    def run(x):
        for layer in linears(model):
            layer.unshard()
        return in_autocast(model)(x)

    return run


def prefetched(model):
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    return model


class Tied(nn.Sequential):
    """Two layers with one weight."""

    def __init__(self, *layers):
        super().__init__(*layers, nn.GELU(), nn.Linear(one.WIDTH, one.HIDDEN), nn.GELU(), layers[2])
        self[4].weight = self[0].weight


MIXED = MixedPrecisionPolicy(BF16, torch.float32)
SCENARIOS = {
    "plain": {},
    "mixed": {"mp_policy": MIXED},
    "one unit": {"shard": lambda model: fully_shard(model, reshard_after_forward=False)},
    "tied": {
        "wrap": lambda model: Tied(*model),
        "shard": lambda model: fully_shard(model, reshard_after_forward=False),
    },
    "shards written to": {"between": write_to_shards},
    "gathered weights written to": {"between": write_to_gathered},
    "loaded": {"between": load},
    "evaluated": {"between": evaluate},
    "evaluated and synced": {"between": evaluate_and_sync},
    "a step in between": {"between": step_of_shards},
    "resharded before backward": {"run": reshard_before_backward},
    "autocast": {"run": in_autocast, "dtype": BF16},
    "gathered before autocast": {"run": gathered_before_autocast, "dtype": BF16},
    "prefetched": {"run": prefetched},
    **{kind: {"wrap": lambda m, kind=kind: Checkpointed(m, kind)} for kind in KINDS},
    **{
        f"{kind}, resharded": {
            "wrap": lambda m, kind=kind: Checkpointed(m, kind),
            "shard": lambda model: fully_shard(model, reshard_after_forward=False),
            "run": reshard_before_backward,
        }
        for kind in KINDS
    },
}


def scenario_of(
    recipe, cached, wrap=lambda m: m, shard=None, mp_policy=None, run=None, between=None, dtype=None
):
    options = {} if mp_policy is None else {"mp_policy": mp_policy}
    model = shard(one.make(recipe, wrap)) if shard else make(recipe, wrap, **options)
    options = {"between": between} if between else {}
    return casts_of(lambda: train(model, cached, dtype, run=run and run(model), **options))


# Where the histories of delayed casts could differ.
OF_HISTORIES = ("mixed", "tied", "loaded", "evaluated and synced", "a step in between", KINDS[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, "rowwise") for name in SCENARIOS] + [(name, "delayed") for name in OF_HISTORIES],
)
def test_results_have_the_bits_of_casts_in_every_call(rank, name, recipe):
    found, casts = scenario_of(recipe, True, **SCENARIOS[name])
    expected, most = scenario_of(recipe, False, **SCENARIOS[name])
    assert_all_bitwise(found, expected, (recipe, name))
    assert casts != most, "no weight was cached"


@pytest.mark.ranks(2)
def test_weights_that_are_gathered_in_float8_need_no_cache(rank):
    found, casts = casts_of(lambda: train(make("gathered delayed")))
    expected, same = casts_of(lambda: train(make("gathered delayed"), cached=False))
    assert_all_bitwise(found, expected, "gathered in float8")
    assert casts == same


@pytest.mark.ranks(4)
def test_replicas_of_sharded_models(rank):
    found, casts = casts_of(lambda: train(make(over=mesh())))
    expected, most = casts_of(lambda: train(make(over=mesh()), cached=False))
    assert_all_bitwise(found, expected, "HSDP")
    assert casts < most


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_compiled_layers_read_the_casts(rank, recipe):
    """In graphs that cast no weight."""
    casts, graphs = [], []

    def count(graph, inputs):
        ops = [n for n in graph.graph.nodes if n.target is torch.ops.float8.cast.default]
        weights = sum(op.args[0].meta["val"].numel() == ELEMENTS for op in ops)
        graphs.append(weights)

        def run(*args):
            casts.extend([1] * weights)
            return graph(*args)

        return make_boxed_func(run)

    def compiled(model):
        for layer in linears(model):
            layer.compile(backend=aot_autograd(fw_compiler=count), fullgraph=True)
        return model

    found = train(compiled(make(recipe)))
    # Forward and backward of two layers; once more where delayed casts have their first scales.
    assert not casts and len(graphs) == (8 if recipe == "delayed" else 4)
    torch.compiler.reset()
    assert_all_bitwise(found, train(compiled(make(recipe)), cached=False), recipe)
    assert casts


# --- pipelines


def pipeline(rank, schedule, shards):
    """The stage of this rank, its optimizer, and a function that runs a step."""
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    model = one.make("rowwise")
    model = fsdp2(model, own, reshard_after_forward=False) if shards else model
    x, y = (torch.zeros(one.TOKENS, one.WIDTH, requires_grad=grad) for grad in (rank > 0, True))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), input_args=x, output_args=y)
    stages = [stage] if schedule is ScheduleInterleavedZeroBubble else stage
    run, optimizer = schedule(stages, 4, loss_fn=nn.functional.mse_loss), one.adamw(model)

    def step(number):
        x, target = torch.randn(2, 4 * one.TOKENS, one.WIDTH, generator=_generator(number))
        run.step(*([x] if rank == 0 else []), target=target)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_a_stage_casts_a_weight_once_per_step(rank, schedule):
    """Inside `cached_weights`, whether FSDP2 shards it or not."""
    plain, expected = pipeline(rank, schedule, shards=False)
    sharded, of_shards = pipeline(rank, schedule, shards=True)
    cached, of_cache = pipeline(rank, schedule, shards=False)
    with cached_weights(cached), cached_weights(sharded):
        for number in range(3):
            _, most = casts_of(lambda n=number: expected(n))
            counts = [
                casts_of(lambda n=number, run=run: run(n))[1] for run in (of_shards, of_cache)
            ]
            assert counts == [2, 2] and most > 8
            for model in (sharded, cached):
                one.assert_same_model(model, plain, (schedule, number))


# --- experts


def train_experts(model, cached):
    """Three steps of three microbatches, in which FSDP2 keeps the weights."""
    model = fully_shard(model, reshard_after_forward=False)
    with cached_weights(model) if cached else nullcontext():
        return steps_of_experts(model)


def steps_of_experts(model):
    optimizer, seen, counts = one.adamw(model), [], []
    for number in range(3):
        with Casts() as casts:
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                model.set_reshard_after_backward(i == 2)
                x = mixtures.tokens(dtype=torch.float32, seed=10 * number + i)
                out = model(x)
                out.backward(torch.randn(out.shape, generator=_generator(i)))
                seen += [out.detach(), x.grad]
        counts.append(sum(casts.sizes.count(size) for size in STACKS))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *one.whole(model.parameters())], counts


STACKS = [mixtures.EXPERTS * mixtures.D * mixtures.HIDDEN * n for n in (1, 2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_experts_are_cast_once_per_step(rank, recipe):
    def experts():
        return one.convert(mixtures.model(torch.float32), recipe, pads=True)

    found, counts = train_experts(experts(), True)
    expected, most = train_experts(experts(), False)
    assert_all_bitwise(found, expected, recipe)
    assert most == [2 * 2 * 3] * 3 and counts == [2, 2, 2]


# --- tensor parallelism


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shards", [False, True])
def test_tensor_parallel_layers_are_refused(rank, shards):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = one.make("tensorwise")
    parallelize_module(model, both["tp"], {"0": Float8ColwiseParallel()})
    model = fsdp2(model, both["data"]) if shards else model
    with pytest.raises(TypeError, match="0: weight is a DTensor"), cached_weights(model):
        pass
