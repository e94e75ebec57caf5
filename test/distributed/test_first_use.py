"""Ranks with different layers or calls get the same error on every rank, within seconds.

The second part is about ``sync`` over groups of ranks. `test_rank_comparison.py` has the comparison
itself.
"""

import copy
import datetime
import gc
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel as ddp

from benchmarks.measuring.wire import Wire
from float8 import (
    DelayedScalingConfig,
    Float8ColwiseParallel,
    Float8Linear,
    convert_from_float8_training,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import first_use, gathered_weights, rank_comparison
from float8.linear import delayed
from float8.linear.scaling import max_over_ranks

SECONDS = 20  # of a machine that is busy; a comparison takes milliseconds
NAMES = ("k", "q", "v")
assert rank_comparison.NOTICE > SECONDS  # a comparison that waits is too slow


@contextmanager
def all_are_compared():
    """Afterwards no converted model waits for a comparison, and the hook is gone."""
    gc.collect()
    yield
    assert not first_use.WAITING
    assert not torch_module._global_forward_pre_hooks


class Layers(nn.Module):
    """Layers that run in the order of their names, whatever order they are registered in."""

    def __init__(self, names=NAMES):
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            torch.manual_seed(ord(name))
            self.layers[name] = nn.Linear(32, 32)
            with torch.no_grad():
                self.layers[name].weight.mul_(ord(name) - 95)

    def forward(self, x):
        for name in sorted(self.layers):
            x = x + self.layers[name](x)
        return x


def converted(names=NAMES, recipe="tensorwise", gathers=False, only=None, **options):
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, **options)
    return convert_to_float8_training(
        Layers(names),
        config=config,
        module_filter_fn=lambda module, fqn: only is None or fqn[-1] in only,
    )


def fsdp1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def simple_fsdp(model):
    """Every weight a DTensor that a property of the layer's class gathers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            for name, p in list(layer.named_parameters(recurse=False)):
                layer.register_parameter(
                    name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
                )

            def gathered(name):
                def get(self):
                    p = self._parameters[name]
                    return p.redistribute(placements=[Replicate()]).to_local()

                return property(get)

            own = {name: gathered(name) for name in ("weight", "bias")}
            layer.__class__ = type("Simple" + type(layer).__name__, (type(layer),), own)
    return model


WRAPS = {"DDP": ddp, "FSDP1": fsdp1, "FSDP2": fully_shard}


def trained(model):
    """Forward and backward of one step; values differ from rank to rank."""
    torch.manual_seed(dist.get_rank())
    out = model(torch.randn(16, 32) * (1 + dist.get_rank()))
    out.backward(torch.randn(16, 32) * (4 - dist.get_rank()))
    return out


def message_of(function, *arguments, kind=RuntimeError):
    """The text of an error that a call must raise within seconds."""
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        function(*arguments)
    assert time.monotonic() - began < SECONDS, raised.value
    return str(raised.value)


def same_message_of(function, *arguments):
    """The text of an error that a call must raise on all ranks, the same on each."""
    message = message_of(function, *arguments)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1, messages
    return message


NONE = "rank 0 has such a float8 layer, and rank 1 has none"
MODELS = {  # what rank 1 has in place of three tensorwise layers, and what the error says
    "another recipe": (
        {"recipe": "rowwise"},
        "k: cast_config_input is dynamic tensorwise on rank 0 and dynamic rowwise",
    ),
    "another flag": (
        {"gathers": True},
        "k: enable_fsdp_float8_all_gather is False on rank 0 and True on rank 1",
    ),
    "another product": (
        {"pad_inner_dim": True}, "k: pad_inner_dim is False on rank 0 and True on rank 1",
    ),
    "a layer less": ({"only": "kv"}, "q: " + NONE),
    "no layer": ({"only": ""}, "k: " + NONE),
    "another order": ({"names": "vqk"}, "k: place among the layers of"),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_difference_is_an_error_before_anything_travels(rank, wrap, what):
    if wrap == "FSDP1" and what == "another flag":
        return  # it refuses the flag
    options, expected = MODELS[what]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_fsdp_float8_all_gather=True has no effect")
        model = WRAPS[wrap](converted(**options) if rank == 1 else converted())
        assert "layers." + expected in same_message_of(trained, model)
    del model
    with all_are_compared():
        trained(WRAPS[wrap](converted()))


PRECOMPUTE = precompute_float8_dynamic_scale_for_fsdp


@pytest.mark.ranks(2)
def test_precompute_compares_too(rank):
    """A flag of one rank; a call on one rank, before the first step, and after it."""
    message = same_message_of(PRECOMPUTE, fully_shard(converted(gathers=rank == 0)))
    assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 1" in message
    act = PRECOMPUTE if rank == 0 else trained
    for steps, other in ((0, "runs"), (1, "gathers")):
        model = fully_shard(converted(gathers=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            trained(model)
            optimizer.step()
        calls = f"rank 0 calls precompute_float8_dynamic_scale_for_fsdp where rank 1 {other}"
        assert calls in same_message_of(act, model)


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
        mock.patch.object(delayed, "modules_by_name", in_order),
        pytest.raises(AssertionError),
    ):
        orders_of_registration_may_differ(rank)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_arrive_is_named_and_a_new_group_starts_from_zero(rank):
    """Rank 1 does not run: rank 0 waits as long as its group would. Their counts then differ."""
    store = dist.distributed_c10d._get_default_store()
    alone = dist.new_group([0])
    kept = store.timeout
    if rank == 0:
        model = ddp(converted(), process_group=alone)  # its constructor has collectives
        model.process_group = dist.group.WORLD
        store.set_timeout(datetime.timedelta(seconds=1))
        message = message_of(trained, model)
        assert "for rank 1 to compare float8 layers with ranks [0, 1]" in message
        store.set_timeout(kept)
    dist.barrier()
    dist.destroy_process_group()
    anew = dist.PrefixStore("anew", store)
    dist.init_process_group("gloo", store=anew, rank=rank, world_size=2)
    trained(ddp(converted()))
    model = ddp(converted(recipe="rowwise" if rank == 1 else "tensorwise"))
    assert "dynamic rowwise" in same_message_of(trained, model)


@pytest.mark.ranks(2)
def test_later_steps_compare_nothing(rank):
    """No request to the store, no hook, after the first step; eager and compiled."""
    model = fully_shard(converted(gathers=True))
    other = torch.compile(ddp(converted()), backend="eager")
    for step in range(3):
        counted = mock.patch.object(first_use, "compare_ranks", wraps=first_use.compare_ranks)
        with counted as compare, warnings.catch_warnings(record=True) as caught:
            trained(model), trained(other)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            PRECOMPUTE(model)
        assert not any("global hooks" in str(w.message) for w in caught)
        assert compare.call_count == (3 if step == 0 else 0), step
        assert not torch_module._global_forward_pre_hooks


@pytest.mark.ranks(2)
def test_a_copy_and_a_second_conversion_are_compared(rank):
    original = converted()
    model = ddp(copy.deepcopy(original))
    trained(model)
    if rank == 0:  # which changes nothing, so no other rank need do it
        convert_to_float8_training(model.module)
        trained(model.module)
    recipe = "rowwise" if rank == 1 else "tensorwise"
    again = convert_from_float8_training(original)
    again = ddp(convert_to_float8_training(again, config=RECIPES[recipe]))
    assert "dynamic rowwise" in same_message_of(trained, again)


def evaluates(model):
    with torch.no_grad():
        model.eval()(torch.randn(16, 32))
    model.train()


def steps(model):
    trained(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch_module._global_forward_pre_hooks


def runs_before_the_group_is_made(model):
    """As torchrun starts processes: it does not count as a comparison."""
    with (
        mock.patch.object(dist, "is_torchelastic_launched", return_value=True),
        mock.patch.object(dist, "is_initialized", return_value=False),
    ):
        trained(model)


ALONE = {each.__name__: each for each in (evaluates, trained, steps, runs_before_the_group_is_made)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("what", "wrap"), [*((what, "DDP") for what in ALONE), ("evaluates", "FSDP2")]
)
def test_what_one_rank_does_before_a_model_is_wrapped_is_not_compared(rank, what, wrap):
    """As a summary, a profile or a sample; another wrapped model may step first."""
    with all_are_compared():
        model = converted()
        if rank == 0:
            ALONE[what](model)
        model.zero_grad()
        critic = WRAPS[wrap](converted())
        model = WRAPS[wrap](model)
        trained(critic)
        torch.optim.SGD(critic.parameters(), lr=0.1).step()
        trained(model)
    model = converted(recipe="rowwise" if rank == 1 else "tensorwise")
    if rank == 0:
        ALONE[what](model)
    model.zero_grad()
    assert "dynamic rowwise" in same_message_of(trained, WRAPS[wrap](model))


@pytest.mark.ranks(2)
def test_what_ranks_may_do_differently(rank):
    with all_are_compared():  # evaluate alone, and have more microbatches
        model = ddp(converted())
        if rank == 0:
            evaluates(model)
        with model.no_sync():
            for _ in range(rank):
                trained(model)
        trained(model)
    with all_are_compared():  # hold a pipeline stage
        model = converted(NAMES[: rank + 1], "rowwise" if rank else "tensorwise")
        trained(model)
        torch.optim.SGD(model.parameters()).step()
    with all_are_compared():  # hold experts that DDP leaves out
        model = converted(("k", "v" if rank else "q"))
        own = [f"layers.{'v' if rank else 'q'}.{name}" for name in ("weight", "bias")]
        model._ddp_params_and_buffers_to_ignore = own
        trained(ddp(model))
    teacher, student = converted(), ddp(converted())
    evaluates(teacher)  # which is not wrapped, and only runs without gradients
    trained(student)
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    assert not torch_module._global_forward_pre_hooks
    del teacher
    for wrap in (ddp, fully_shard):
        with all_are_compared():  # the root that was converted never runs; its parts do
            model = convert_to_float8_training(nn.ModuleList([Layers(), Layers()]))
            for part in [wrap(part) for part in model]:
                trained(part)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_first_gather_compares_without_the_hook(rank, by_layer):
    """Models that were converted before the process group was made have no hook."""

    def sharded(**options):
        model = converted(gathers=True, **options)
        for layer in model.layers.values() if by_layer else ():
            fully_shard(layer)
        return fully_shard(model)

    model = sharded(pad_inner_dim=rank == 1)
    first_use._uninstall()
    assert "layers.k: pad_inner_dim is False on rank 0" in same_message_of(trained, model)
    model = sharded()
    first_use._uninstall()
    trained(model)
    assert model not in first_use.WAITING


@pytest.mark.ranks(2)
def test_a_gather_flag_without_fsdp2_warns_once(rank):
    """Under DDP, and a parametrisation like SimpleFSDP's. FSDP1 refuses it."""
    assert "FSDP1" in same_message_of(fsdp1, converted(gathers=True))
    for wrap in (ddp, simple_fsdp):
        model = wrap(converted(gathers=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(model)
        (message,) = [str(w.message) for w in caught if "has no effect" in str(w.message)]
        assert "on 3 layers (first: " in message and "layers.k" in message, message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(fully_shard(converted(gathers=True)))
        trained(fully_shard(converted(recipe="rowwise", gathers=True)))  # the report says why


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_hook_breaks_no_graph_of_a_compiled_function(rank):
    """It is traced and does nothing."""
    run = torch.compile(converted(), backend="eager", fullgraph=True)
    run(torch.randn(16, 32))
    first_use._uninstall()
    run(torch.randn(16, 32))
    first_use.WAITING.clear()


PAIRS = {"mesh_dim_names": ("dp", "tp")}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_stages_are_compared_with_their_own_ranks(rank, wrap):
    """Four ranks, two stages of two; then a fault on rank 1, which is no error in stage 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    own = {"process_group": mesh["dp"].get_group()} if wrap == "DDP" else {"mesh": mesh["dp"]}
    trained(WRAPS[wrap](converted(NAMES[: stage + 1]), **own))
    recipe = "rowwise" if rank == 1 else "tensorwise"
    model = WRAPS[wrap](converted(NAMES[: stage + 1], recipe), **own)
    if stage == 0:
        assert "and dynamic rowwise" in message_of(trained, model)
    else:
        trained(model)


@pytest.mark.ranks(4)
def test_replicas_of_shards_are_compared(rank):
    """HSDP: rank 3 gathers with rank 2, and averages gradients with rank 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trained(fully_shard(converted(gathers=True), mesh=mesh))
    message = same_message_of(trained, fully_shard(converted(gathers=rank != 3), mesh=mesh))
    assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 3" in message


# --- sync over groups of ranks


def delayed_model(names="ab", recipe="delayed", **options):
    return converted(tuple(names), recipe, **options)


def buffers(model):
    return torch.cat([b.reshape(-1) for b in model.buffers()])


def gathered(x, group=None):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return parts


OTHERS = {  # what rank 1 has in place of two delayed layers, and what the error says
    "another name": ({"names": "ac"}, "b: rank 0 has such a float8 layer, and rank 1"),
    "a layer more": ({"names": "abc"}, "c: rank 1 has such a float8 layer, and ra"),
    "no layer": ({"only": ""}, "a: rank 0 has such a float8 layer"),
    "another recipe": (
        {"recipe": "tensorwise"},
        "a: cast_config_input is delayed tensorwise on rank 0 and dynamic tensorwise on rank 1",
    ),
    "another config": (
        {"delayed_scaling": DelayedScalingConfig(history_len=4)},
        "a: delayed_scaling is DelayedScalingConfig(history_len=16",
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", OTHERS)
def test_a_difference_is_an_error_of_the_first_sync(rank, what):
    options, expected = OTHERS[what]
    model = delayed_model(**options) if rank == 1 else delayed_model()
    message = message_of(sync_float8_amax_and_scale_history, model)
    assert "layers." + expected in message and "group=" in message, message


@pytest.mark.ranks(2)
def test_sync_reduces_in_the_order_of_the_names(rank):
    """Ranks may register their layers in different orders."""
    model, expected = delayed_model("bac" if rank == 1 else "abc"), delayed_model("abc")
    for each in (model, expected):
        trained(each)
        sync_float8_amax_and_scale_history(each)
    found = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(*gathered(buffer)) and torch.equal(found[name], buffer), name


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
    with mock.patch.object(delayed, "max_over_ranks", everywhere), pytest.raises(AssertionError):
        amaxes_are_those_of(replicas, mesh["dp"], rank)


@pytest.mark.ranks(4)
def test_pipeline_stages_and_tensor_parallel_ranks_need_their_group(rank):
    """Stages have their own layers; all ranks that hold a part of a layer must be in the group."""
    mesh = init_device_mesh("cpu", (2, 2), **PAIRS)
    stage = lambda: delayed_model("a" if rank < 2 else "bc")  # noqa: E731
    message = message_of(sync_float8_amax_and_scale_history, stage())
    assert "layers.a: rank 0 has such a float8 layer, and rank" in message
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


@pytest.mark.ranks(2)
def test_amaxes_of_two_devices_take_one_collective(rank):
    """The amaxes of one device stand in for those of two."""
    reduced, found = delayed._reduced_over_ranks, []

    def in_two_parts(currents, groups):
        (amaxes,) = currents
        halves = reduced(list(amaxes.split([2, len(amaxes) - 2])), groups)
        assert len(halves) == 2
        return [torch.cat(halves)]

    for function in (reduced, in_two_parts):
        model = delayed_model()
        trained(model)
        with mock.patch.object(delayed, "_reduced_over_ranks", function):
            sync_float8_amax_and_scale_history(model)
        found.append(buffers(model))
    assert torch.equal(*found)
