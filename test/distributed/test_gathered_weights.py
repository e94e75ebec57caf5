"""FSDP2 gathers weights in float8: what travels, and what is remembered, stored and refused.

`test_parallel_training.py` has the bits of training.
"""

import one_process as one
import pytest
import torch
import torch.distributed as dist
from parallel_forms import fsdp2, mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from wire import Wire

from float8 import (
    Float8Linear,
    Float8Tensor,
    after_step,
    convert_from_float8_training,
    high_precision,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed.sharded_weight import ShardedWeight

GATHERED = ("tensorwise", "delayed", "unit", "blockwise", "mxfp8_2d")
ODD = {"width": 7, "hidden": 5}  # which make uneven shards
WHOLE = StateDictOptions(full_state_dict=True)


def make(recipe="tensorwise", **sizes):
    return one.make(one.GATHERED + recipe, **sizes)


def sharded(recipe="tensorwise", **sizes):
    return fsdp2(make(recipe, **sizes))


def step(model, number=0, width=32):
    return one.rank_step(model, [one.batch(number, dist.get_rank(), width=width)])


def amax_of(weight):
    return weight.detach().full_tensor().abs().amax().reshape(1, 1)


# --- what travels


@pytest.mark.ranks(2)
def test_one_byte_per_element_travels(rank):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # The amaxes of weights (48, 32) and (32, 48): one number per block.
    reduced = {None: [], "tensorwise": [4, 4], "blockwise": [4, 4], "mxfp8_2d": [8, 8]}
    elements, biases = 2 * 32 * 48, 32 + 48  # half of them, twice
    for recipe, amaxes in reduced.items():
        model = fsdp2(make(recipe) if recipe else one.make("rowwise"), mp_policy=policy)
        step(model)  # the first gather compares the ranks
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        with Wire() as wire:
            step(model)
        assert wire.count("all_gather") == 4  # each layer, forward and backward
        assert [e.bytes for e in wire.sent if e.kind == "all_reduce"] == amaxes, recipe
        sent = (1 if recipe else 2) * elements + 2 * biases
        assert wire.bytes("all_gather") == sent, recipe


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "numbers", "after"),
    [
        ("tensorwise", 2, 1),
        ("delayed", 2, 1),
        ("unit", 0, 0),
        ("rowwise", 0, 0),
        ("blockwise", 2, 1),
        ("mxfp8_2d", 4, 1),
    ],
)
def test_a_step_takes_one_all_reduce_at_most(rank, recipe, numbers, after):
    """For the histories or the dynamic scales, before the first step too."""
    model = sharded(recipe)
    optimizer = one.adamw(model)
    with Wire() as wire:
        precompute_float8_dynamic_scale_for_fsdp(model)
        step(model)
    reduced = [each.bytes for each in wire.sent if each.kind == "all_reduce"]
    assert reduced == [numbers * 4] * (numbers > 0)  # of both weights
    for number in range(2):
        optimizer.step()
        optimizer.zero_grad()
        with Wire() as wire:
            after_step(model)
        assert wire.count("all_reduce") == after, number
        with Wire() as wire:
            step(model, number)
        assert wire.count("all_reduce") == 0, number


@pytest.mark.ranks(2)
def test_amaxes_that_are_found_before_the_first_gather_of_uneven_shards(rank):
    """FSDP2 replaces the shards that it pads then, on the last rank alone."""
    for recipe in ("tensorwise", "blockwise"):
        model, expected = sharded(recipe, **ODD), sharded(recipe, **ODD)
        after_step(model)
        with torch.no_grad():
            if rank == 1:
                for each in (model, expected):
                    each[0].weight.to_local()[:1, :1].fill_(3.0)
        after_step(model)
        step(model, width=7)
        step(expected, width=7)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), recipe


@pytest.mark.ranks(2)
def test_the_gathered_weight_is_the_operand(rank):
    """It is in float8, freed after forward, and gathered again for backward."""
    model, seen = sharded(), []
    layer = model[0]
    layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    loss = one.loss_of(model, one.batch(0, rank))
    (weight,) = seen
    assert isinstance(weight, Float8Tensor) and isinstance(weight, nn.Parameter)
    assert weight.float8_data.dtype == torch.float8_e4m3fn
    assert weight.float8_data.untyped_storage().size() == 0  # resharded
    assert isinstance(layer.weight, DTensor)
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32


# --- the amax of a weight is remembered until the weight is written to

WRITES = {
    "a step": lambda p: torch.optim.SGD([p], lr=1.0).step(),
    "a foreach step": lambda p: torch.optim.SGD([p], lr=1.0, foreach=True).step(),
    "copy_": lambda p: p.copy_(p.clone() * 2),
    "data": lambda p: p.data.mul_(2),
    "to_local": lambda p: p.to_local().mul_(2),
    "a copy of masters": lambda p: p.to_local().data.copy_(p.to_local().plain * 2),
    "an initialisation": nn.init.ones_,
    "foreach": lambda p: torch._foreach_mul_([p], 2),
    "out": lambda p: torch.mul(p, 2, out=p),
    "the stored tensor": lambda p: p._local_tensor.plain.mul_(2),
    "a state dict": lambda p: nn.ParameterList([p]).state_dict()["0"].to_local().mul_(2),
}


def is_known(weight):
    """Whether the weight's amax is known; then it is the right one."""
    amax = weight.to_local().known.of([weight])
    assert amax is None or torch.equal(amax, amax_of(weight))
    return amax is not None


@pytest.mark.ranks(2)
def test_a_write_forgets_the_amax(rank):
    model = sharded(**ODD)
    step(model, width=7)
    weight = model[0].weight
    for what, write in WRITES.items():
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert is_known(weight), what
        weight.grad = torch.randn_like(weight.detach())
        with torch.no_grad():
            write(weight)
        assert not is_known(weight), what


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_compiled_step_forgets_the_amax(rank):
    """Inductor's code passes no dispatch; only the parameter's version changes."""
    model = sharded()
    weight = model[0].weight
    optimizer = torch.optim.SGD([weight], lr=0.5)
    # Inductor on one rank only: compiling takes long.
    compiled = torch.compile(optimizer.step, backend="inductor" if rank == 0 else "aot_eager")
    for number in range(2):
        step(model, number)
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert is_known(weight)
        compiled()
        assert not is_known(weight)
        optimizer.zero_grad()


# --- checkpoints, evaluation, ties


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_checkpoints_are_plain_and_load(rank, recipe):
    """Whole and sharded, with and without assign, into a model on the meta device too."""
    model = sharded(recipe, **ODD)
    step(model, width=7)
    whole = get_model_state_dict(model, options=WHOLE)
    assert {type(value) for value in whole.values()} == {torch.Tensor}
    for values in (model.state_dict(), get_model_state_dict(model)):
        for name, value in values.items():
            assert type(getattr(value, "_local_tensor", value)) is torch.Tensor, name
            assert torch.equal(*one.whole([value, whole[name]])), name
    for way in ("copy", "assign", "whole", "meta"):
        other = make(recipe, **ODD).to("meta" if way == "meta" else "cpu")
        other = fsdp2(other)
        if way in ("copy", "assign"):
            with torch.no_grad():
                other[0].weight.zero_()
            other.load_state_dict(model.state_dict(), assign=way == "assign")
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "meta")
            set_model_state_dict(
                other, {} if rank > 0 and way == "meta" else dict(whole), options=options
            )
        assert isinstance(other[0].weight._local_tensor, ShardedWeight)
        assert step(other, 1, width=7) == step(model, 1, width=7), way
        if way != "meta":  # rank 0 sends its own amaxes
            one.assert_same_model(other, model, way)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8_2d"])
def test_evaluation_and_high_precision(rank, recipe):
    """Without gradients; and in high precision, with the gathered weights."""
    plain, single, model = one.make(None), one.make(recipe), sharded(recipe)
    cast = RECIPES[recipe].cast_config_weight
    x = one.batch(0, rank)[0]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(x), single(x))
    with high_precision(model):
        out = model(x)
        out.backward(torch.randn_like(out))
    for p in plain.parameters():
        if p.dim() == 2:
            how = torch.float8_e4m3fn, cast.granularity, None, cast.scale_format
            p.data = Float8Tensor.from_high_precision(p.data, *how).dequantize()
    assert torch.equal(out, plain(x))
    assert torch.equal(model.eval()(x), single.eval()(x))


class Tied(nn.Module):
    """Two layers share a weight, and an embedding shares one with the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head.weight, self.two.weight = self.embedding.weight, self.one.weight

    def forward(self, tokens):
        return self.head(self.two(self.one(self.embedding(tokens))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_tied_weights_train(rank, recipe):
    single, model = (one.convert(Tied(), name) for name in (recipe, one.GATHERED + recipe))
    (reason,) = model.float8_conversion.gathered_in_high_precision.items()
    assert reason[0] == "head" and "tied to a Embedding" in reason[1]
    assert isinstance(model.one.weight, ShardedWeight) and model.one.weight is model.two.weight
    assert model.head.weight is model.embedding.weight
    fully_shard(model)
    for _ in range(2):
        g = torch.randn(16, 16)
        for m in (single, model):
            m(torch.arange(16)).backward(g)
            sync_float8_amax_and_scale_history(m)
        grads = one.whole(q.grad for q in model.parameters())
        assert all(torch.equal(p.grad, g) for p, g in zip(single.parameters(), grads, strict=True))


# --- what is refused


def in_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 32))


def back_when_gathered(model):
    single = fully_shard(one.convert(nn.Sequential(nn.Linear(16, 16)), "gathered tensorwise"))
    single(torch.randn(4, 16))  # the root is not resharded after forward
    convert_from_float8_training(single)


def tensor_parallel(model):
    tp = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = parallelize_module(nn.Sequential(nn.Linear(16, 16)), tp, {"0": ColwiseParallel()})
    one.convert(plain, "gathered tensorwise")


REFUSED = {
    "0: its weight is a DTensor: leave enable_fsdp": tensor_parallel,
    "MixedPrecisionPolicy": in_autocast,
    "get_model_state_dict": convert_from_float8_training,
    r"get_model_state_dict.": back_when_gathered,
    "has sharded its weight: convert the model first": lambda model: one.convert(
        fully_shard(one.make(None)), "gathered tensorwise"
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("message", REFUSED)
def test_what_sharded_models_cannot_do_is_refused(rank, message):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        REFUSED[message](sharded())


@pytest.mark.ranks(4)
def test_a_sync_over_a_group_without_all_shards_is_refused(rank):
    pairs = mesh()
    sync_float8_amax_and_scale_history(fsdp2(make("delayed"), pairs), pairs)
    with pytest.raises(RuntimeError, match="the group of sync must hold all"):
        sync_float8_amax_and_scale_history(fsdp2(make("delayed"), pairs), pairs["replicate"])


# --- one process: what conversion makes


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_before_sharding_are_those_of_the_plain_recipe(recipe):
    single, model = one.make(recipe), make(recipe)
    steps = [[[one.batch(step, 0)]] for step in range(2)]
    one.assert_same_training(0, single, model, steps, recipe)
    a, b = single.state_dict(), model.state_dict()
    assert a.keys() == b.keys() and {type(value) for value in b.values()} == {torch.Tensor}
    layers = [m for m in model if isinstance(m, Float8Linear)]
    reasons = model.float8_conversion.gathered_in_high_precision
    expected = ShardedWeight if recipe in GATHERED else nn.Parameter
    assert {type(layer.weight) for layer in layers} == {expected}
    assert set(reasons) == set([] if recipe in GATHERED else model.float8_conversion.converted)


def test_an_optimizer_from_before_is_refused_at_its_first_step():
    model = one.make(None)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    one.convert(model, "gathered tensorwise")
    with pytest.raises(RuntimeError, match=r"0.*then build the optimizer"):
        optimizer.step()
    torch.optim.AdamW(model.parameters()).step()
