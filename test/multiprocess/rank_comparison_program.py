"""Ranks that hold different layers, or make different calls, get an error on every rank.

Faults are planted on rank 1, and must end as the same error on both ranks, within seconds. The last
part is about ``sync`` over groups of ranks. `test_first_use.py` starts the processes.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from tensor_parallel_program import EXACT, Wire, make_model, parallelized, sequence_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    convert_from_float8_training,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import gathered_weights, rank_comparison
from float8.linear import delayed
from float8.linear.scaling import max_over_ranks

SECONDS = 20  # of a machine that is busy; a comparison takes milliseconds
NAMES = ("k", "q", "v")



@contextmanager
def all_are_compared():
    """Afterwards no converted model waits for a comparison, and the hook is gone."""
    gc.collect()  # models of earlier checks may still wait
    yield
    assert not first_use.WAITING
    assert not torch_module._global_forward_pre_hooks


class Layers(nn.Module):
    """Layers that run in the order of their names, whatever order they are registered in."""

    def __init__(self, names=NAMES, bias=True):
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            torch.manual_seed(ord(name))
            layer = nn.Linear(32, 32, bias=bias)
            with torch.no_grad():
                layer.weight.mul_(ord(name) - 100)
            self.layers[name] = layer

    def forward(self, x):
        for name in sorted(self.layers):
            x = x + self.layers[name](x)
        return x


def converted(names=NAMES, recipe="tensorwise", gathers=False, **options):
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, **options)
    return convert_to_float8_training(Layers(names), config=config)


def fsdp2(model, root=True):
    """Every layer a unit of its own, or with ``root`` all layers in one unit."""
    for layer in [] if root else model.layers.values():
        fully_shard(layer)
    return fully_shard(model)


def ddp(model):
    return DistributedDataParallel(model)


def trained(model):
    """Forward and backward of one step."""
    torch.manual_seed(dist.get_rank())
    out = model(torch.randn(16, 32))
    out.backward(torch.randn(16, 32))
    return out


def message_of(function, *arguments, kind=RuntimeError):
    """The text of an error that a call must raise within seconds."""
    began = time.monotonic()
    try:
        function(*arguments)
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert time.monotonic() - began < SECONDS, message
    return message


def same_message_of(function, *arguments):
    """The text of an error that a call must raise on all ranks, the same on each."""
    message = message_of(function, *arguments)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1, messages
    return message


# What rank 1 has in place of three tensorwise layers, and what the error says.
MODELS = {
    "another recipe": (
        lambda: converted(recipe="rowwise"),
        "layers.k: cast_config_input is dynamic tensorwise on rank 0 and dynamic rowwise",
    ),
    "another flag": (
        lambda: converted(gathers=True),
        "layers.k: enable_fsdp_float8_all_gather is False on rank 0 and True on rank 1",
    ),
    "another product": (
        lambda: converted(pad_inner_dim=True),
        "layers.k: pad_inner_dim is False on rank 0 and True on rank 1",
    ),
    "a layer less": (
        lambda: convert_to_float8_training(
            Layers(), module_filter_fn=lambda module, fqn: fqn != "layers.q"
        ),
        "layers.q: rank 0 has such a float8 layer, and rank 1 has none",
    ),
    "no layer": (
        lambda: convert_without_layers(),  # noqa: PLW0108
        "layers.k: rank 0 has such a float8 layer, and rank 1 has none",
    ),
    "another order": (lambda: converted("vqk"), "layers.k: place among the layers of"),
}


def convert_without_layers():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert_to_float8_training converted no layer")
        return convert_to_float8_training(Layers(), module_filter_fn=lambda module, fqn: False)


def a_difference_is_an_error_before_anything_travels(rank, wrap):
    for what, (make, expected) in MODELS.items():
        if wrap == "fsdp1" and what == "another flag":
            continue  # it refuses the flag
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_fsdp_float8_all_gather=True has no effect")
            model = globals()[wrap](make() if rank == 1 else converted())
            message = same_message_of(trained, model)
        assert expected in message, (what, message)
        del model
    with all_are_compared():
        model = globals()[wrap](converted())
        trained(model)
    assert not any("torch" in str(f[1]) and "global" in str(f[1]) for f in warnings.filters)


def a_difference_of_the_gather_flag_is_an_error(rank):
    """Half of the ranks would send one byte per element, the others two or four."""
    for act in (trained, precompute_float8_dynamic_scale_for_fsdp):
        model = fsdp2(converted(gathers=rank == 0))
        message = same_message_of(act, model)
        assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 1" in message
        del model


def precompute_on_one_rank_is_an_error(rank):
    """Before the first step, and after it."""
    model = fsdp2(converted(gathers=True))
    act = precompute_float8_dynamic_scale_for_fsdp if rank == 0 else trained
    message = same_message_of(act, model)
    assert "rank 0 calls precompute_float8_dynamic_scale_for_fsdp where rank 1 runs" in message
    model = fsdp2(converted(gathers=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model)
    optimizer.step()
    message = same_message_of(act, model)
    assert "rank 0 calls precompute_float8_dynamic_scale_for_fsdp where rank 1 gathers" in message


def orders_of_registration_may_differ(rank):
    """Each layer is a unit of FSDP2's: the bits are those of ranks that register alike."""
    results = []
    for names in (NAMES, ("v", "k", "q") if rank == 1 else NAMES):
        for recipe in ("tensorwise", "delayed"):
            model = fsdp2(converted(names, recipe, gathers=True), root=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                out = trained(model)
                optimizer.step()
                optimizer.zero_grad()
                sync_float8_amax_and_scale_history(model)
                precompute_float8_dynamic_scale_for_fsdp(model)
            weights = {n: p.full_tensor() for n, p in sorted(model.named_parameters())}
            results.append((out, weights, dict(sorted(model.named_buffers()))))
    alike, differently = results[:2], results[2:]
    for (out, *expected), (other, *found) in zip(alike, differently, strict=True):
        assert torch.equal(out, other)
        for a, b in zip(expected, found, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a)


def an_order_of_registration_is_found(rank):
    """A planted fault: reductions in the order of ``named_modules``, and no comparison."""

    def in_order(model, kind):
        return [found for found in model.named_modules() if isinstance(found[1], kind)]

    with (
        mock.patch.object(gathered_weights, "modules_by_name", in_order),
        mock.patch.object(delayed, "modules_by_name", in_order),
    ):
        try:
            orders_of_registration_may_differ(rank)
        except AssertionError:
            return
    raise RuntimeError("scales of different weights were mixed, and no check failed")


def a_rank_that_does_not_arrive_is_named(rank):
    """An unconverted model on rank 1: rank 0 waits as long as its group would, and names it."""
    store = dist.distributed_c10d._get_default_store()
    kept = store.timeout
    try:
        store.set_timeout(kept / 300)
        if rank == 0:
            model = ddp_without_collectives(converted())
            try:
                trained(model)
            except RuntimeError as error:
                assert "for rank 1 to compare float8 layers with ranks [0, 1]" in str(error)  # noqa: PT017
            else:
                raise AssertionError("no error")
    finally:
        store.set_timeout(kept)


def a_new_process_group_starts_from_zero(rank):
    """After a comparison that not all ranks made, in which their counts would differ."""
    a_rank_that_does_not_arrive_is_named(rank)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    anew = dist.PrefixStore("anew", store)
    dist.init_process_group("gloo", store=anew, rank=rank, world_size=2)
    trained(ddp(converted()))
    model = ddp(converted(recipe="rowwise" if rank == 1 else "tensorwise"))
    assert "dynamic rowwise" in same_message_of(trained, model)


def ddp_without_collectives(model):
    """DDP without the collective of its constructor, which would need rank 1."""
    wrapped = DistributedDataParallel(model, process_group=dist.new_group([0]))
    wrapped.process_group = dist.group.WORLD
    return wrapped


def later_steps_compare_nothing(rank):
    """No request to the store, no hook, after the first step; eager and compiled."""
    gc.collect()  # models of earlier checks may still wait
    model = fsdp2(converted(gathers=True))
    other = torch.compile(ddp(converted()), backend="eager")
    for step in range(4):
        kept = first_use.compare_ranks
        first_use.compare_ranks = compare = mock.Mock(wraps=kept)
        try:
            for each in (model, other):
                with warnings.catch_warnings(record=True) as caught:
                    trained(each)
                assert not any("global hooks" in str(w.message) for w in caught)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            precompute_float8_dynamic_scale_for_fsdp(model)
        finally:
            first_use.compare_ranks = kept
        assert compare.call_count == (3 if step == 0 else 0), (step, compare.mock_calls)
        assert not torch_module._global_forward_pre_hooks


def a_copy_and_a_second_conversion_are_compared(rank):
    original = converted()
    model = ddp(copy.deepcopy(original))
    trained(model)
    if rank == 0:  # which changes nothing, so no other rank need do it
        convert_to_float8_training(model.module)
        trained(model.module)
    again = convert_from_float8_training(original)
    recipe = "rowwise" if rank == 1 else "tensorwise"
    again = ddp(convert_to_float8_training(again, config=RECIPES[recipe]))
    assert "dynamic rowwise" in same_message_of(trained, again)


def an_evaluation_of_one_rank_is_not_compared(rank):
    """One rank may evaluate a DDP model before training."""
    model = ddp(converted())
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(16, 32))
        model.train()
    trained(model)


def a_forward_of_one_rank_is_not_compared(rank):
    """One rank may run the model before it is wrapped, for a summary or a profile."""
    model = converted()
    if rank == 0:
        trained(model)
    model = ddp(model)
    with model.no_sync():
        for _ in range(rank):
            trained(model)
    trained(model)
    assert model.module.layers["k"] in first_use._compared


def a_step_of_one_rank_is_not_compared(rank):
    """The step removes the hook; DDP installs it again."""

    def tried(recipe="tensorwise"):
        model = converted(recipe=recipe)
        if rank == 0:
            trained(model)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert not torch_module._global_forward_pre_hooks
        return ddp(model)

    with all_are_compared():
        first = tried()
        trained(first)
    model = tried("rowwise" if rank == 1 else "tensorwise")
    assert "dynamic rowwise" in same_message_of(trained, model)


def a_forward_before_the_group_is_made_is_not_compared(rank):
    """As torchrun starts processes: it compares nothing, and does not count as a comparison."""
    with all_are_compared():
        with (
            mock.patch.object(dist, "is_torchelastic_launched", return_value=True),
            mock.patch.object(dist, "is_initialized", return_value=False),
        ):
            model = converted()
            if rank == 0:
                trained(model)
        model = ddp(model)
        trained(model)
        assert model.module.layers["k"] in first_use._compared


def a_sample_of_one_rank_is_not_compared(rank):
    """A generator samples before it is wrapped, and its critic steps first."""
    for wrap in (ddp, fsdp2):
        with all_are_compared():
            generator, critic = converted(), wrap(converted())
            if rank == 0:
                with torch.no_grad():
                    generator(torch.randn(16, 32))
            generator = wrap(generator)
            trained(critic)
            torch.optim.SGD(critic.parameters(), lr=0.1).step()
            trained(generator)


def a_teacher_does_not_keep_the_hook(rank):
    """It is not wrapped, and only runs without gradients."""
    gc.collect()
    teacher, student = converted().eval(), ddp(converted())
    with torch.no_grad():
        teacher(torch.randn(16, 32))
    trained(student)
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    assert not torch_module._global_forward_pre_hooks


def parts_that_run_by_themselves_are_compared(rank):
    """The root that was converted never runs; its encoder and decoder do."""
    for wrap in (ddp, fsdp2):
        with all_are_compared():
            model = convert_to_float8_training(nn.ModuleList([Layers(), Layers()]))
            for part in [wrap(part) for part in model]:
                trained(part)


def models_without_data_parallelism_may_differ(rank):
    """Pipeline stages differ by design."""
    with all_are_compared():
        model = converted(NAMES[: rank + 1], "rowwise" if rank else "tensorwise")
        trained(model)
        torch.optim.SGD(model.parameters()).step()


def layers_that_ddp_leaves_out_may_differ(rank):
    """The experts of each rank are such layers."""
    with all_are_compared():
        names = ("k", "q" if rank == 0 else "v")
        model = converted(names)
        model._ddp_params_and_buffers_to_ignore = [
            f"layers.{names[1]}.{name}" for name in ("weight", "bias")
        ]
        trained(ddp(model))


def a_first_gather_compares_without_the_hook(rank):
    """Models that were converted before the process group was made have no hook."""
    config = {} if rank == 0 else {"pad_inner_dim": True}
    for root in (True, False):
        model = fsdp2(converted(gathers=True, **config), root)
        first_use._uninstall()
        assert "layers.k: pad_inner_dim is False on rank 0" in same_message_of(trained, model)
    model = fsdp2(converted(gathers=True))
    first_use._uninstall()
    trained(model)
    assert model not in first_use.WAITING


def a_gather_flag_without_fsdp2_warns_once(rank):
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
        trained(fsdp2(converted(gathers=True)))
        trained(fsdp2(converted(recipe="rowwise", gathers=True)))  # the report says why


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


def the_hook_breaks_no_graph_of_a_compiled_function(rank):
    """It is traced and does nothing."""
    model = converted()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        return model(x)

    run(torch.randn(16, 32))
    first_use._uninstall()
    run(torch.randn(16, 32))
    first_use.WAITING.clear()


def stages_are_compared_with_their_own_ranks(rank):
    """Four ranks, two stages of two; then a fault on rank 1, which is no error in stage 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    wraps = {
        "ddp": lambda m: DistributedDataParallel(m, process_group=mesh["dp"].get_group()),
        "fsdp2": lambda m: fully_shard(m, mesh=mesh["dp"]),
    }
    for what, wrap in wraps.items():
        names = NAMES[: stage + 1]
        trained(wrap(converted(names)))
        model = wrap(converted(names, "rowwise" if rank == 1 else "tensorwise"))
        if stage == 0:
            assert "and dynamic rowwise" in message_of(trained, model), what
        else:
            trained(model)


def replicas_of_shards_are_compared(rank):
    """HSDP: rank 3 gathers with rank 2, and averages gradients with rank 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trained(fully_shard(converted(gathers=True), mesh=mesh))
    model = fully_shard(converted(gathers=rank != 3), mesh=mesh)
    message = same_message_of(trained, model)
    assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 3" in message


# --- sync over groups of ranks

DELAYED = RECIPES["delayed"]
SHORTER = replace(DELAYED, delayed_scaling=DelayedScalingConfig(history_len=4))


def model_of(*names, config=DELAYED, width=32):
    torch.manual_seed(0)
    layers = {name: nn.Linear(32, width if name == "wide" else 32) for name in names}
    return convert_to_float8_training(nn.ModuleDict(layers), config=config)


def run_layers(model, rank):
    """Run forward and backward through each layer; values differ from rank to rank."""
    torch.manual_seed(rank)
    for layer in model.values():
        layer(torch.randn(16, 32) * (rank + 1)).backward(torch.randn(16, layer.out_features))


def buffers(model):
    return torch.cat([b.reshape(-1) for b in model.buffers()])


def gathered(x, group=None):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return parts


# What rank 1 has in place of the layers "a" and "b" with recipe delayed, and what the error says.
OTHERS = {
    "another name": (lambda: model_of("a", "c"), "b: rank 0 has such a float8 layer, and rank 1"),
    "a layer more": (lambda: model_of("a", "b", "c"), "c: rank 1 has such a float8 layer, and ra"),
    "a layer less": (lambda: model_of("a"), "b: rank 0 has such a float8 layer, and rank 1 has"),
    "no layer": (
        lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}),
        "a: rank 0 has such a float8 layer",
    ),
    "another recipe": (
        lambda: model_of("a", "b", config=RECIPES["tensorwise"]),
        "a: cast_config_input is delayed tensorwise on rank 0 and dynamic tensorwise on rank 1",
    ),
    "another config": (
        lambda: model_of("a", "b", config=SHORTER),
        "a: delayed_scaling is DelayedScalingConfig(history_len=16",
    ),
}


def a_difference_is_an_error_of_the_first_sync(rank):
    for what, (make, expected) in OTHERS.items():
        model = make() if rank == 1 else model_of("a", "b")
        message = message_of(sync_float8_amax_and_scale_history, model)
        assert expected in message, (what, message)
        assert "group=" in message, (what, message)
        dist.barrier()


def sync_reduces_in_the_order_of_the_names(rank):
    """Ranks may register their layers in different orders."""
    model = model_of("b", "a", "c") if rank == 1 else model_of("a", "b", "c")
    expected = model_of("a", "b", "c")
    model.load_state_dict(expected.state_dict())
    for each in (model, expected):
        torch.manual_seed(rank)
        for factor, name in enumerate("abc", 1):
            grad = torch.randn(16, 32)
            each[name](torch.randn(16, 32) * factor * (rank + 1)).backward(grad)
        sync_float8_amax_and_scale_history(each)
    found = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        parts = gathered(buffer)
        assert all(torch.equal(part, parts[0]) for part in parts), name
        assert torch.equal(found[name], buffer), name


def one_collective_for_all_histories(rank):
    """After the first call; a model without delayed casts needs no collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallel = parallelized(make_model(), mesh, sequence_parallel(), EXACT["delayed"], False)
    for model in (model_of("a", "b"), tensor_parallel):
        sync_float8_amax_and_scale_history(model)
        counts = _counted(lambda model=model: sync_float8_amax_and_scale_history(model))
        assert counts == [("all_reduce", 9 if model is tensor_parallel else 6)], counts
    dynamic = model_of("a", config=RECIPES["tensorwise"])
    sync_float8_amax_and_scale_history(dynamic)
    assert _counted(lambda: sync_float8_amax_and_scale_history(dynamic)) == []


class _Collectives(Wire):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            sent = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.sent.append((func.__name__.split(".")[0], sent.numel()))
        return func(*args, **(kwargs or {}))


def _counted(act):
    with _Collectives() as wire:
        act()
    return wire.sent


def ranks_end_with_equal_bits(rank):
    world = dist.get_world_size()
    groups = [None, dist.group.WORLD, init_device_mesh("cpu", (world,))]
    if world == 4:
        groups.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    found = []
    for group in groups:
        model = model_of("a", "b")
        for _ in range(2):
            run_layers(model, rank)
            sync_float8_amax_and_scale_history(model, group)
        parts = gathered(buffers(model))
        assert all(torch.equal(part, parts[0]) for part in parts), group
        assert all(cast.history_ready for layer in model.values() for cast in layer.casts)
        found.append(parts[0])
    assert all(torch.equal(each, found[0]) for each in found)


def a_pipeline_stage_syncs_with_its_own_ranks(rank):
    """Four ranks, two stages of two, which have their own layers and scales."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    for group in (mesh["dp"], mesh["dp"].get_group()):
        model = model_of("first") if stage == 0 else model_of("second", "third")
        message = message_of(sync_float8_amax_and_scale_history, model)
        assert "first: rank 0 has such a float8 layer, and rank" in message
        run_layers(model, rank)
        sync_float8_amax_and_scale_history(model, group)
        parts = gathered(buffers(model), mesh["dp"].get_group())
        assert torch.equal(*parts)
        # The peak of a stage is that of its last rank, whose values are the largest.
        alone = model_of("first") if stage == 0 else model_of("second", "third")
        run_layers(alone, 2 * stage + 1)
        name = next(iter(model))
        peak = alone[name].cast_input.current_amax
        assert model[name].cast_input.amax_history[0] == peak


def a_rank_outside_of_the_group_gets_an_error(rank):
    group = dist.new_group([0])
    model = model_of("a")
    if rank == 0:
        sync_float8_amax_and_scale_history(model, group)
        return
    message = message_of(sync_float8_amax_and_scale_history, model, group, kind=ValueError)
    assert "not in the group" in message


def tensor_parallel_ranks_must_be_in_the_group(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(make_model(), mesh["tp"], sequence_parallel(), EXACT["delayed"], False)
    message = message_of(sync_float8_amax_and_scale_history, model, mesh["dp"])
    assert message.startswith("gate: ranks ["), message
    sync_float8_amax_and_scale_history(model, mesh["tp"])
    sync_float8_amax_and_scale_history(model, mesh)


def amaxes_of_two_devices_take_one_collective(rank):
    """The amaxes of one device stand in for those of two."""
    reduced = delayed._reduced_over_ranks

    def in_two_parts(currents, groups):
        (amaxes,) = currents
        halves = reduced(list(amaxes.split([2, len(amaxes) - 2])), groups)
        assert len(halves) == 2
        return [torch.cat(halves)]

    found = []
    for function in (reduced, in_two_parts):
        model = model_of("a", "b")
        run_layers(model, rank)
        with mock.patch.object(delayed, "_reduced_over_ranks", function):
            sync_float8_amax_and_scale_history(model)
        found.append(buffers(model))
    assert torch.equal(*found)


def amaxes_are_reduced_over_the_given_group_only(rank):
    """On a mesh of replicas and tensor parallelism; every rank has another amax.

    Megatron-LM#442 reduced them over the tensor-parallel ranks in place of all that share a scale.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {
        "replicas": (mesh["dp"], [rank % 2, rank % 2 + 2]),
        "replicas' group": (mesh["dp"].get_group(), [rank % 2, rank % 2 + 2]),
        "tensor parallel": (mesh["tp"], [rank - rank % 2, rank - rank % 2 + 1]),
        "both": (mesh, [0, 1, 2, 3]),
    }
    for what, (group, members) in groups.items():
        amaxes_are_those_of(members, group, rank, what)


def amaxes_are_those_of(members, group, rank, what):
    model = model_of("a", "b")
    run_layers(model, rank)
    casts = [cast for layer in model.values() for cast in layer.casts]
    own = gathered(torch.stack([cast.current_amax for cast in casts]))
    assert len({part[0].item() for part in own}) == len(own)
    expected = torch.stack([own[member] for member in members]).amax(0)
    sync_float8_amax_and_scale_history(model, group)
    found = torch.stack([cast.amax_history[0] for cast in casts])
    assert torch.equal(found.reshape(-1), expected.reshape(-1)), what


def a_wrong_group_is_found(rank):
    """A planted fault: every reduction is over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    everywhere = lambda amax, group: max_over_ranks(amax, dist.group.WORLD)  # noqa: E731
    members = [rank % 2, rank % 2 + 2]
    with mock.patch.object(delayed, "max_over_ranks", everywhere):
        arguments = (members, mesh["dp"], rank, "wrong")
        assert message_of(amaxes_are_those_of, *arguments, kind=AssertionError) == "wrong"
