"""What must be true of ranks that hold different layers, or make different calls: two gloo ranks.

`test/distributed/test_first_use.py` starts them. Every fault is planted on rank 1, and must end as
one error on both ranks, within seconds.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Linear,
    convert_from_float8_training,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import first_use, gathered_weights, rank_comparison

SECONDS = 20  # of a machine that is busy; a comparison takes milliseconds
NAMES = ("k", "q", "v")
assert rank_comparison.NOTICE > SECONDS  # a comparison that waits is too slow


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


def message_of(act, kind=RuntimeError):
    """The error of ``act``, which has to be one and the same on all ranks, and quick."""
    began = time.monotonic()
    try:
        act()
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert time.monotonic() - began < SECONDS, message
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, message)
    assert len(set(said)) == 1, said
    return message


# What rank 1 has in place of three tensorwise layers, and what both ranks are told.
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


def a_difference_is_told_before_anything_travels(rank, wrap):
    for what, (make, expected) in MODELS.items():
        if wrap == "fsdp1" and what == "another flag":
            continue  # it refuses the flag
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_fsdp_float8_all_gather=True has no effect")
            model = globals()[wrap](make() if rank == 1 else converted())
            message = message_of(lambda model=model: trained(model))
        assert expected in message, (what, message)
        del model
    gc.collect()  # the models of errors
    model = globals()[wrap](converted())
    trained(model)
    assert not first_use.WAITING
    assert not torch_module._global_forward_pre_hooks
    assert not any("torch" in str(f[1]) and "global" in str(f[1]) for f in warnings.filters)


def a_difference_of_the_gather_flag_is_told(rank):
    """Half of the ranks would send one byte per element, the others two or four."""
    for first in ("forward", "precompute"):
        model = fsdp2(converted(gathers=rank == 0))
        act = trained if first == "forward" else precompute_float8_dynamic_scale_for_fsdp
        message = message_of(lambda act=act, model=model: act(model))
        assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 1" in message
        del model


def precompute_on_one_rank_is_told(rank):
    """Before the first step, and after it."""
    model = fsdp2(converted(gathers=True))
    act = precompute_float8_dynamic_scale_for_fsdp if rank == 0 else trained
    message = message_of(lambda: act(model))
    assert "rank 0 calls precompute_float8_dynamic_scale_for_fsdp where rank 1 runs" in message
    model = fsdp2(converted(gathers=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model)
    optimizer.step()
    message = message_of(lambda: act(model))
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


def an_order_of_registration_is_seen(rank):
    """A planted fault: reductions in the order of ``named_modules``, and no comparison."""

    def in_order(model, kind):
        return [found for found in model.named_modules() if isinstance(found[1], kind)]

    with (
        mock.patch.object(gathered_weights, "modules_by_name", in_order),
        mock.patch.object(sync, "modules_by_name", in_order),
    ):
        try:
            orders_of_registration_may_differ(rank)
        except AssertionError:
            return
    raise RuntimeError("scales of different weights were mixed, and not seen")


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


def a_new_process_group_begins_anew(rank):
    """Also behind a comparison that not all ranks made: their counts would differ."""
    a_rank_that_does_not_arrive_is_named(rank)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    anew = dist.PrefixStore("anew", store)
    dist.init_process_group("gloo", store=anew, rank=rank, world_size=2)
    trained(ddp(converted()))
    model = ddp(converted(recipe="rowwise" if rank == 1 else "tensorwise"))
    assert "dynamic rowwise" in message_of(lambda: trained(model))


def ddp_without_collectives(model):
    """DDP, whose constructor would need rank 1: as it is when ranks differ in the first forward."""
    wrapped = DistributedDataParallel(model, process_group=dist.new_group([0]))
    wrapped.process_group = dist.group.WORLD
    return wrapped


def a_step_costs_nothing_afterwards(rank):
    """No request to the store, no hook, after the second step; eager and compiled."""
    gc.collect()  # models of claims before this one
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
    assert "dynamic rowwise" in message_of(lambda: trained(again))


def an_evaluation_of_one_rank_is_left_alone(rank):
    """One rank may evaluate a DDP model before training."""
    model = ddp(converted())
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(16, 32))
        model.train()
    trained(model)


def a_trial_of_one_rank_is_left_alone(rank):
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


def a_trial_with_an_optimizer_on_one_rank_is_left_alone(rank):
    """The wait that its step ends begins again with DDP."""
    gc.collect()

    def tried(recipe="tensorwise"):
        model = converted(recipe=recipe)
        if rank == 0:
            trained(model)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert not torch_module._global_forward_pre_hooks
        return ddp(model)

    trained(tried())
    assert not torch_module._global_forward_pre_hooks
    model = tried("rowwise" if rank == 1 else "tensorwise")
    assert "dynamic rowwise" in message_of(lambda: trained(model))


def a_trial_before_the_group_is_made_is_left_alone(rank):
    """As torchrun starts processes: it compares nothing, and does not count as a comparison."""
    gc.collect()
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
    assert not torch_module._global_forward_pre_hooks


def a_sample_of_one_rank_is_left_alone(rank):
    """Of a generator, before it is wrapped, where its critic steps first."""
    gc.collect()
    for wrap in (ddp, fsdp2):
        generator, critic = converted(), wrap(converted())
        if rank == 0:
            with torch.no_grad():
                generator(torch.randn(16, 32))
        generator = wrap(generator)
        trained(critic)
        torch.optim.SGD(critic.parameters(), lr=0.1).step()
        trained(generator)
        assert not torch_module._global_forward_pre_hooks


def a_teacher_does_not_keep_the_hook(rank):
    """A plain one, the same on all ranks, that only ever runs without gradients."""
    gc.collect()
    teacher, student = converted().eval(), ddp(converted())
    with torch.no_grad():
        teacher(torch.randn(16, 32))
    trained(student)
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    assert not torch_module._global_forward_pre_hooks


def parts_that_run_by_themselves_are_compared(rank):
    """The root that was converted never runs, as its encoder and decoder do."""
    gc.collect()
    for wrap in (ddp, fsdp2):
        model = convert_to_float8_training(nn.ModuleList([Layers(), Layers()]))
        for part in [wrap(part) for part in model]:
            trained(part)
        assert not first_use.WAITING
        assert not torch_module._global_forward_pre_hooks


def models_without_data_parallelism_may_differ(rank):
    """As pipeline stages do."""
    gc.collect()
    model = converted(NAMES[: rank + 1], "rowwise" if rank else "tensorwise")
    trained(model)
    torch.optim.SGD(model.parameters()).step()
    assert not first_use.WAITING
    assert not torch_module._global_forward_pre_hooks


def layers_that_ddp_leaves_out_may_differ(rank):
    """As the experts of a rank do."""
    gc.collect()
    names = ("k", "q" if rank == 0 else "v")
    model = converted(names)
    model._ddp_params_and_buffers_to_ignore = [
        f"layers.{names[1]}.{name}" for name in ("weight", "bias")
    ]
    trained(ddp(model))
    assert not first_use.WAITING


def a_first_gather_compares_without_the_hook(rank):
    """Where models were converted before the process group was made."""
    config = {} if rank == 0 else {"pad_inner_dim": True}
    for root in (True, False):
        model = fsdp2(converted(gathers=True, **config), root)
        first_use._uninstall()
        assert "layers.k: pad_inner_dim is False on rank 0" in message_of(lambda: trained(model))  # noqa: B023
    model = fsdp2(converted(gathers=True))
    first_use._uninstall()
    trained(model)
    assert model not in first_use.WAITING


def a_gather_that_never_meets_fsdp2_is_told(rank):
    """DDP, FSDP1, and a parametrisation as SimpleFSDP's: by name, once."""
    assert "FSDP1" in message_of(lambda: fsdp1(converted(gathers=True)))
    for wrap in (ddp, simple_fsdp):
        model = wrap(converted(gathers=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(model)
        said = [str(w.message) for w in caught if "has no effect" in str(w.message)]
        assert len(said) == 1, (wrap, caught)
        assert "on 3 layers (first: " in said[0], said
        assert "layers.k" in said[0], said
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


def the_entry_of_a_model_in_a_function_that_is_compiled(rank):
    """The hook is traced, does nothing, and breaks no graph."""
    model = converted()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        return model(x)

    run(torch.randn(16, 32))
    first_use._uninstall()
    run(torch.randn(16, 32))
    first_use.WAITING.clear()


def stages_are_compared_with_their_own_ranks(rank):
    """Four ranks, two stages of two; then a fault on rank 1, of which stage 1 hears nothing."""
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
        try:
            trained(model)
        except RuntimeError as error:
            message = str(error)
        else:
            message = ""
        assert ("and dynamic rowwise" in message) == (stage == 0), (what, message)


def replicas_of_shards_are_compared(rank):
    """HSDP: rank 3 gathers with rank 2, and averages gradients with rank 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trained(fully_shard(converted(gathers=True), mesh=mesh))
    model = fully_shard(converted(gathers=rank != 3), mesh=mesh)
    message = message_of(lambda: trained(model))
    assert "enable_fsdp_float8_all_gather is True on rank 0 and False on rank 3" in message
