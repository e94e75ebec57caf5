"""Ranks with different layers get the same error on every rank, before float8 values travel.

The second part is about ``sync`` over groups of ranks.
"""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from wire import Wire

from float8 import (
    DelayedScalingConfig,
    Float8ColwiseParallel,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import gathered_weights, sync
from float8.linear.casts import max_over_ranks

NAMES = ("k", "q", "v")


class Layers(nn.Module):
    """Layers that run in the order of their names, whatever order they are registered in."""

    def __init__(self, names=NAMES, width=32):
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            torch.manual_seed(ord(name))
            self.layers[name] = nn.Linear(width, width)
            with torch.no_grad():
                self.layers[name].weight.mul_(ord(name) - 95)

    def forward(self, x):
        for name in sorted(self.layers):
            x = x + self.layers[name](x)
        return x


def converted(names=NAMES, recipe="tensorwise", gathers=False, only=None, width=32, **options):
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert_to_float8_training converted no layer")
        return convert_to_float8_training(
            Layers(names, width),
            config=config,
            module_filter_fn=lambda module, fqn: only is None or fqn[-1] in only,
        )


def trained(model):
    """Forward and backward of one step; values differ from rank to rank."""
    torch.manual_seed(dist.get_rank())
    out = model(torch.randn(16, 32) * (1 + dist.get_rank()))
    out.backward(torch.randn(16, 32) * (1 + dist.get_rank()))
    return out


def message_of(function, *arguments, kind=RuntimeError):
    with pytest.raises(kind) as raised:
        function(*arguments)
    return str(raised.value)


def same_message_of(function, *arguments):
    """The text of an error that a call must raise on all ranks, the same on each."""
    message = message_of(function, *arguments)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1, messages
    return message


PRECOMPUTE = precompute_float8_dynamic_scale_for_fsdp
INPUT, MISSING = "cast_config_input is delayed tensorwise on rank 0 and ", "missing on rank 1"
OTHERS = {  # what rank 1 has in place of three delayed layers, and what the error says
    "another name": ({"names": "kqw"}, f"v: {INPUT}{MISSING}"),
    "a layer less": ({"only": "kv"}, f"q: {INPUT}{MISSING}"),
    "no layer": ({"only": ""}, f"k: {INPUT}{MISSING}"),
    "another size": ({"width": 48}, "k: in_features is 32 on rank 0 and 48 on rank 1"),
    "another recipe": (
        {"recipe": "tensorwise"}, f"k: {INPUT}dynamic tensorwise on rank 1",
    ),
    "another product": (
        {"pad_inner_dim": True}, "k: pad_inner_dim is False on rank 0 and True on rank 1",
    ),
    "another config": (
        {"delayed_scaling": DelayedScalingConfig(history_len=4)},
        "k: delayed_scaling is DelayedScalingConfig(history_len=16",
    ),
}  # fmt: skip


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", OTHERS)
def test_a_difference_is_an_error_of_the_first_sync(rank, what):
    options, expected = OTHERS[what]
    model = delayed_model(**{"names": NAMES, **(options if rank == 1 else {})})
    message = same_message_of(sync_float8_amax_and_scale_history, model)
    assert "layers." + expected in message and "group=" in message, message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("act", ["gather", "precompute"])
def test_a_difference_is_an_error_before_weights_travel(rank, act, by_layer):
    model = converted(gathers=True, pad_inner_dim=rank == 1)
    for layer in model.layers.values() if by_layer else ():
        fully_shard(layer)
    message = same_message_of(PRECOMPUTE if act == "precompute" else trained, fully_shard(model))
    assert ": pad_inner_dim is False on rank 0 and True on rank 1" in message


@pytest.mark.ranks(2)
def test_other_layers_are_an_error_before_anything_travels(rank):
    """FSDP2 gathers the weights of a unit by position, in the order of registration."""
    model = fully_shard(converted("vqk" if rank else "kqv", gathers=True))
    message = same_message_of(trained, model)
    assert "name is layers.k on rank 0 and layers.v on rank 1" in message
    recipe = ("tensorwise", "rowwise")[rank]  # the second one is gathered in high precision
    message = same_message_of(PRECOMPUTE, fully_shard(converted(recipe=recipe, gathers=True)))
    assert "layers.k: cast_config_input is" in message
    model, mesh = converted(recipe=recipe), init_device_mesh("cpu", (2,))
    style = Float8ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"layers.k": style})
    message = same_message_of(model, torch.randn(16, 32))
    assert "a layer: cast_config_input is dynamic tensorwise on rank 0" in message


def orders_of_registration_may_differ(rank):
    """Each layer is a unit of FSDP2's: the bits are those of ranks that register alike."""
    for recipe in ("tensorwise", "delayed"):
        results = []
        for names in (NAMES, ("v", "k", "q") if rank == 1 else NAMES):
            model = converted(names, recipe, gathers=True)
            for layer in model.layers.values():
                fully_shard(layer)
            optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
            for _ in range(3):
                out = trained(model)
                optimizer.step()
                optimizer.zero_grad()
                sync_float8_amax_and_scale_history(model)
                PRECOMPUTE(model)
            weights = {n: p.full_tensor() for n, p in sorted(model.named_parameters())}
            results.append({"out": out, **weights, **dict(sorted(model.named_buffers()))})
        alike, differently = results
        assert alike.keys() == differently.keys()
        assert all(torch.equal(alike[name], differently[name]) for name in alike)


@pytest.mark.ranks(2)
def test_orders_of_registration_may_differ(rank):
    orders_of_registration_may_differ(rank)

    def in_order(model, kind):
        return [found for found in model.named_modules() if isinstance(found[1], kind)]

    with (  # a planted fault: reductions in the order of ``named_modules``
        mock.patch.object(gathered_weights, "modules_by_name", in_order),
        mock.patch.object(sync, "modules_by_name", in_order),
        pytest.raises(AssertionError),
    ):
        orders_of_registration_may_differ(rank)


PAIRS = {"mesh_dim_names": ("dp", "tp")}


# --- sync over groups of ranks


def delayed_model(names="ab", recipe="delayed", **options):
    return converted(tuple(names), recipe, **options)


def buffers(model):
    return torch.cat([b.reshape(-1) for b in model.buffers()])


def gathered(x, group=None):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return parts


@pytest.mark.ranks(2)
def test_one_collective_for_all_histories(rank):
    """After the first call; a model without delayed casts needs no collective."""
    tensor_parallel = parallelize_module(
        delayed_model(),
        init_device_mesh("cpu", (2,)),
        {"layers.a": Float8ColwiseParallel(output_layouts=Replicate())},
    )
    dynamic = delayed_model(recipe="tensorwise")
    for model, expected in ((delayed_model(), 1), (tensor_parallel, 1), (dynamic, 0)):
        sync_float8_amax_and_scale_history(model)
        with Wire() as wire:
            sync_float8_amax_and_scale_history(model)
        assert [e.bytes for e in wire.sent] == [6 * 4.0] * expected


def amaxes_are_those_of(members, group, rank):
    """After a sync the histories have the largest of the members' amaxes."""
    model = delayed_model()
    trained(model)
    casts = [cast for layer in model.layers.values() for cast in layer.casts]
    own = gathered(torch.stack([cast.current_amax for cast in casts]))
    assert len({part[0].item() for part in own}) == len(own)
    expected = torch.stack([own[member] for member in members]).amax(0)
    sync_float8_amax_and_scale_history(model, group)
    found = torch.stack([cast.amax_history[0] for cast in casts])
    assert torch.equal(found.reshape(-1), expected.reshape(-1))
    assert all(cast.history_ready for cast in casts)


@pytest.mark.ranks(4)
def test_amaxes_are_reduced_over_the_given_group_only(rank):
    """On a mesh of replicas and tensor parallelism; every rank has another amax.

    Megatron-LM#442 reduced them over the tensor-parallel ranks in place of all that share a scale.
    """
    mesh, everyone = init_device_mesh("cpu", (2, 2), **PAIRS), [0, 1, 2, 3]
    replicas, parallel = [rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1]
    for group, members in (
        (mesh["dp"], replicas),
        (mesh["dp"].get_group(), replicas),
        (mesh["tp"], parallel),
        (mesh, everyone),
        (None, everyone),
        (dist.group.WORLD, everyone),
    ):
        amaxes_are_those_of(members, group, rank)
    everywhere = lambda amax, group: max_over_ranks(amax, dist.group.WORLD)  # noqa: E731
    fails = nullcontext() if 3 in replicas else pytest.raises(AssertionError)  # 3 has the largest
    with mock.patch.object(sync, "max_over_ranks", everywhere), fails:
        amaxes_are_those_of(replicas, mesh["dp"], rank)


@pytest.mark.ranks(4)
def test_pipeline_stages_and_tensor_parallel_ranks_need_their_group(rank):
    """Stages have their own layers; all ranks that hold a part of a layer must be in the group."""
    mesh = init_device_mesh("cpu", (2, 2), **PAIRS)
    stage = lambda: delayed_model("a" if rank < 2 else "bc")  # noqa: E731
    message = message_of(sync_float8_amax_and_scale_history, stage())
    assert "layers.a: cast_config_input is delayed" in message and "missing on rank 2" in message
    model = stage()
    trained(model)
    sync_float8_amax_and_scale_history(model, mesh["tp"])
    assert torch.equal(*gathered(buffers(model), mesh["tp"].get_group()))

    model = delayed_model()
    style = Float8ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"layers.a": style})
    message = message_of(sync_float8_amax_and_scale_history, model, mesh["dp"])
    assert message.startswith("layers.a: ranks ["), message
    sync_float8_amax_and_scale_history(model, mesh["tp"])
    sync_float8_amax_and_scale_history(model, mesh)


@pytest.mark.ranks(2)
def test_a_rank_outside_of_the_group_gets_an_error(rank):
    group, model = dist.new_group([0]), delayed_model()
    if rank == 0:
        sync_float8_amax_and_scale_history(model, group)
        return
    message = message_of(sync_float8_amax_and_scale_history, model, group, kind=ValueError)
    assert "not in the group" in message
