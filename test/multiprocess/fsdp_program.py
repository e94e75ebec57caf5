"""FSDP2 with weights gathered in float8, on two and on four processes.

The reference is one process that runs the same recipe without the option, over the batches of all
ranks in turn. `test_gathered_weights.py` starts the processes.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    Float8Linear,
    Float8Tensor,
    after_step,
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import float8_gather, gathered_weights, sharded_weight
from float8.distributed.sharded_weight import ShardedWeight


class Collectives(TorchDispatchMode):
    """Record the calls at the process group: (collective, dtype, bytes)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        if is_collective and not any(name in str(func) for name in ("barrier", "wait_tensor")):
            sent = args[1] if "_base_" in str(func) else args[0]
            tensors = [sent] if isinstance(sent, torch.Tensor) else list(sent)
            name = func._schema.name.rpartition(":")[2].strip("_").replace("all_", "all")
            for t in tensors:
                self.calls.append((name, t.dtype, t.numel() * t.element_size()))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(call[0] == name for call in self.calls)

    def bytes(self, name):
        return sum(call[2] for call in self.calls if call[0] == name)


class Block(nn.Module):
    """Two layers and a GELU; odd sizes make uneven shards."""

    def __init__(self, dims, checkpointed=False):
        super().__init__()
        self.up, self.down = nn.Linear(dims[0], dims[1]), nn.Linear(dims[1], dims[0], bias=False)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self._run, x, use_reentrant=self.checkpointed == "reentrant")
        return self._run(x)

    def _run(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def model_of(dims=(32, 48), blocks=2, checkpointed=False):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dims, checkpointed) for _ in range(blocks)))


def convert(model, recipe, gathers):
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, pad_inner_dim=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recipe "unit"')  # these layers are not unit-scaled
        return convert_to_float8_training(model, config=config)


def shard(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def data_of(step, rank, dim, dtype=None):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, dim, generator=generator) * (rank + 1)
    return x, torch.randn(16, dim, generator=generator).to(dtype or torch.float32)


def oracle_step(model, step, ranks, dim, dtype):
    """Return the outputs of all ranks' batches; leave the averaged gradients in the model."""
    model.zero_grad()
    outs = []
    for rank in ranks:
        x, g = data_of(step, rank, dim, dtype)
        cast = {name: p.to(dtype or p.dtype) for name, p in model.named_parameters()}
        outs.append(torch.func.functional_call(model, cast, (x.to(dtype or x.dtype),)))
        outs[-1].backward(g)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= len(ranks)
    return outs


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def equal(a, b, what):
    a, b = full(a), full(b)
    if not torch.equal(a, b):
        difference = (a.float() - b.float()).abs().max().item()
        raise AssertionError(f"{what}: {type(a)} {tuple(a.shape)} differs by {difference}")


def trains_like_one_process(
    rank,
    recipe="tensorwise",
    dims=(32, 48),
    dtype=None,
    steps=3,
    precompute=False,
    same_data=False,
    checkpointed=False,
    meta=False,
    hsdp=False,
    offload=False,
    compiled=False,
    frozen=False,
    ours=False,
    **options,
):
    world = dist.get_world_size()
    single = convert(model_of(dims), recipe, gathers=False)
    sharded = convert(model_of(dims, checkpointed=checkpointed), recipe, gathers=True)
    assert "enable" not in str(sharded.float8_conversion.gathered_in_high_precision)
    if meta:
        sharded = sharded.to("meta")
    if frozen:
        for model in (single, sharded):
            model[0].up.weight.requires_grad_(False)
    if hsdp:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
    if compiled:
        sharded[-1].up.compile(backend=compiled, fullgraph=True)
    shard(sharded, **options)
    if meta:
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for p, q in zip(sharded.parameters(), single.parameters(), strict=True):
                p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
    make = float8.optim.SGD if ours else partial(torch.optim.AdamW, foreach=True)
    optimizers = [
        make((p for p in m.parameters() if p.requires_grad), lr=0.01) for m in (single, sharded)
    ]
    ranks = [0] * world if same_data else list(range(world))
    for step in range(steps):
        outs = oracle_step(single, step, ranks, dims[0], dtype)
        x, g = data_of(step, ranks[rank], dims[0], dtype)
        sharded.zero_grad()
        out = sharded(x.requires_grad_())  # as reentrant checkpointing needs it
        out.backward(g)
        equal(out, outs[rank], (recipe, step, "output"))
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                equal(p.grad, q.grad, (recipe, step, name, "grad"))
        for optimizer in optimizers:
            optimizer.step()
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            equal(p, q, (recipe, step, name))
        sync_float8_amax_and_scale_history(single)
        (after_step if precompute else sync_float8_amax_and_scale_history)(sharded)
        for (name, b), c in zip(single.named_buffers(), sharded.buffers(), strict=True):
            equal(b, c, (recipe, step, name))


def with_options(rank, check, options):
    """Run a check with keyword arguments."""
    globals()[check](rank, **options)


def step(model, number=0, dim=32, dtype=None):
    x, g = data_of(number, dist.get_rank(), dim, dtype)
    out = model(x)
    out.backward(g)
    return out


def sharded_model(recipe="tensorwise", dims=(32, 48), **options):
    return shard(convert(model_of(dims), recipe, gathers=True), **options)


def one_byte_per_element_travels(rank, dtype):
    """Count the bytes of a step's all-gathers, and its all-reduces, at the process group."""
    world, elements, biases = dist.get_world_size(), 4 * 32 * 48, 2 * 48
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    sent = {}
    for gathers in (False, True):
        model = shard(convert(model_of(), "tensorwise", gathers), mp_policy=policy)
        with Collectives() as collectives:
            step(model, dtype=dtype)
        sent[gathers] = collectives.bytes("allgather_base")
        assert collectives.count("allgather_base") == 4  # each block, forward and backward
        reduced = [call for call in collectives.calls if call[0] == "allreduce"]
        assert reduced == ([("allreduce", torch.float32, 4)] * 4 if gathers else [])
    elements, biases = (2 * size // world for size in (elements, biases))  # two gathers' shards
    assert sent[False] == 2 * elements + 2 * biases
    assert sent[True] == elements + 2 * biases


def one_all_reduce_for_all_weights(rank):
    """From the first step on, in which FSDP2 pads short shards on some of the ranks."""
    model = sharded_model(dims=(7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        with Collectives() as collectives:
            precompute_float8_dynamic_scale_for_fsdp(model)
            step(model, number, dim=7)
        assert [call[2] for call in collectives.calls if call[0] == "allreduce"] == [4 * 4]
        optimizer.step()
        optimizer.zero_grad()


def known_scales_need_no_all_reduce(rank):
    for recipe, first in (("unit", 0), ("delayed", 4)):
        model = sharded_model(recipe)
        for number in range(2):
            with Collectives() as collectives:
                precompute_float8_dynamic_scale_for_fsdp(model)
                step(model, number)
            assert collectives.count("allreduce") == (first > 0 and number == 0), recipe
            sync_float8_amax_and_scale_history(model)


def after_step_does_what_a_recipe_needs(rank):
    """One all-reduce for the histories, or one for the dynamic scales, or none."""
    for recipe, expected in (("tensorwise", 1), ("delayed", 1), ("unit", 0), ("rowwise", 0)):
        model = sharded_model(recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(3):
            with Collectives() as forward:
                step(model, number)
            assert number == 0 or forward.count("allreduce") == 0, recipe
            optimizer.step()
            optimizer.zero_grad()
            with Collectives() as after:
                after_step(model)
            assert after.count("allreduce") == expected, (recipe, number)


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
}


def the_optimizer_records_the_amaxes_of_shards(rank):
    """Then the next scales take no pass over the shards; a write in between is found."""
    model = sharded_model(dims=(7, 5))
    optimizer = float8.optim.AdamW(model.parameters(), lr=0.01)
    for precompute in (False, True):
        step(model, dim=7)
        optimizer.step()
        optimizer.zero_grad()
        weights = [m.weight for m in model.modules() if isinstance(m, Float8Linear)]
        for weight in weights:
            shard = weight.to_local()
            expected = shard.plain.abs().max() if shard.numel() else torch.zeros(())
            assert torch.equal(shard.amax_of_shard(weight), expected.view(1, 1))
        with (
            mock.patch.object(float8.kernels, "amaxes", side_effect=AssertionError("a pass")),
            mock.patch.object(float8_gather, "amax_of_shard", side_effect=AssertionError("a pass")),
        ):
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
                assert all(torch.equal(w.to_local().known_amax, amax_of(w)) for w in weights)
            step(model, dim=7)
    weight = model[0].up.weight
    for what, write in WRITES.items():
        weight._local_tensor.remember_shard(torch.ones(1, 1), weight._version)
        weight.grad = torch.randn_like(weight.detach())
        with torch.no_grad():
            write(weight)
        assert weight.to_local().amax_of_shard(weight) is None, what


def a_write_forgets_the_amax(rank):
    model = sharded_model(dims=(7, 5))
    weight = model[0].up.weight
    for what, write in WRITES.items():
        weight.grad = torch.randn_like(weight.detach())
        precompute_float8_dynamic_scale_for_fsdp(model)
        local = weight.to_local()
        before = local.known_amax
        assert torch.equal(before, amax_of(weight)), what
        with torch.no_grad():
            write(weight)
        assert weight.to_local().known_amax is None, what
    precompute_float8_dynamic_scale_for_fsdp(model)
    model.state_dict()["0.up.weight"].to_local().mul_(2)  # as a distributed checkpoint loads
    assert weight.to_local().known_amax is None


def a_compiled_step_forgets_the_amax(rank):
    """Inductor's code passes no dispatch; only the parameter's version changes."""
    model = sharded_model()
    weight = model[0].up.weight
    optimizer = torch.optim.SGD([weight], lr=0.5)
    # Inductor on one rank only: compiling takes long.
    compiled = torch.compile(optimizer.step, backend="inductor" if rank == 0 else "aot_eager")
    for number in range(2):
        step(model, number)
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert torch.equal(weight.to_local()._known.of(weight), amax_of(weight))
        compiled()
        assert weight.to_local()._known.of(weight) is None
        optimizer.zero_grad()


def amax_of(weight):
    return full(weight.detach()).abs().amax().reshape(1, 1)


def a_stale_scale_is_found(rank):
    """A planted fault: a write does not forget the amax. Bits then differ from one process."""
    kept = sharded_weight._forget
    sharded_weight._forget = lambda argument, value: None
    try:
        trains_like_one_process(rank)
    except AssertionError:
        return
    finally:
        sharded_weight._forget = kept
    raise RuntimeError("no check found a stale scale")


def a_missing_all_reduce_is_found(rank):
    kept = float8_gather.max_over_ranks
    float8_gather.max_over_ranks = lambda amax, group: amax
    try:
        trains_like_one_process(rank)
    except AssertionError:
        return
    finally:
        float8_gather.max_over_ranks = kept
    raise RuntimeError("no check found scales of single shards")


def the_gathered_weight_is_the_operand(rank):
    """It is in float8, freed after forward, and gathered again for backward."""
    model = sharded_model(reshard_after_forward=True)
    seen = []

    def hook(layer, args):
        seen.append((layer.weight, layer.weight.float8_data))
        assert (
            layer.weight.float8_data.untyped_storage().size() == layer.weight.numel()
        )  # one byte each

    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    for layer in layers:
        layer.register_forward_pre_hook(hook)
    out = model(data_of(0, rank, 32)[0])
    assert len(seen) == len(layers)
    for weight, data in seen:
        assert isinstance(weight, Float8Tensor)
        assert isinstance(weight, nn.Parameter)
        assert data.dtype == torch.float8_e4m3fn
    assert seen[0][1].untyped_storage().size() == 0  # resharded
    assert isinstance(layers[0].weight, DTensor)
    out.backward(torch.randn_like(out))
    assert layers[0].weight.grad.dtype == torch.float32


def losses_do_not_depend_on_the_gather(rank, recipe):
    """Losses are equal, bit for bit, whether weights travel in float8 or in bfloat16.

    They would differ if the precomputed scale were that of the float32 weight, and the other scale
    that of the weight rounded to bfloat16 (ao#4300).
    """
    curves = []
    for gathers, precompute in ((False, False), (True, False), (True, True)):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = shard(convert(model_of(), recipe, gathers), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        curve = []
        for number in range(5):
            x, target = data_of(number, rank, 32)
            loss = nn.functional.mse_loss(model(x).float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync_float8_amax_and_scale_history(model)
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == curves[1] == curves[2], curves
    assert len(set(curves[0])) == len(curves[0]), curves


def accumulates(rank, recipe):
    single = convert(model_of(), recipe, gathers=False)
    model = sharded_model(recipe)
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        step(model, number)
        for other in range(dist.get_world_size()):
            x, g = data_of(number, other, 32)
            single(x).backward(g)
    # Sums are in another order: FSDP2 adds microbatches first, one process adds ranks first.
    for p, q in zip(single.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad / dist.get_world_size(), full(q.grad))


def the_amax_is_reduced_over_shards_only(rank):
    """On a mesh of replicas and shards, over the ranks that share the weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, groups, kept = sharded_model(mesh=mesh), [], float8_gather.max_over_ranks

    def noted(amaxes, group):
        groups.append(dist.get_process_group_ranks(group))
        return kept(amaxes, group)

    for module in (float8_gather, gathered_weights):
        module.max_over_ranks = noted
    try:
        step(model)
        with torch.no_grad():
            model[0].up.weight.mul_(2)
        precompute_float8_dynamic_scale_for_fsdp(model)
    finally:
        for module in (float8_gather, gathered_weights):
            module.max_over_ranks = kept
    assert groups == [[0, 1] if rank < 2 else [2, 3]] * 5


class Tied(nn.Module):
    """Two layers share a weight, and an embedding shares one with the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head.weight, self.two.weight = self.embedding.weight, self.one.weight

    def forward(self, tokens):
        return self.head(self.two(self.one(self.embedding(tokens))))


def tied_weights_train(rank, recipe):
    torch.manual_seed(0)
    single = convert(Tied(), recipe, gathers=False)
    torch.manual_seed(0)
    model = convert(Tied(), recipe, gathers=True)
    assert set(model.float8_conversion.gathered_in_high_precision) == {"head"}
    assert model.one.weight is model.two.weight
    assert isinstance(model.one.weight, ShardedWeight)
    assert model.head.weight is model.embedding.weight
    fully_shard(model)
    tokens, g = torch.arange(16), torch.randn(16, 16)
    for number in range(2):
        for m in (single, model):
            m(tokens).backward(g)
            sync_float8_amax_and_scale_history(m)
        for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
            equal(p.grad, q.grad, (recipe, number, name))


def columns_can_be_sharded(rank):
    single = convert(model_of(), "tensorwise", gathers=False)
    model = sharded_model(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    outs = oracle_step(single, 0, range(dist.get_world_size()), 32, None)
    equal(step(model), outs[rank], "output")
    for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
        equal(p.grad, q.grad, name)


def checkpoints_are_plain(rank, recipe):
    model = sharded_model(recipe, dims=(7, 5))
    step(model, dim=7)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole.items():
        assert type(value) is torch.Tensor, name
    for values in (model.state_dict(), get_model_state_dict(model)):
        for name, value in values.items():
            assert type(getattr(value, "_local_tensor", value)) is torch.Tensor, name
            equal(value, whole[name], name)
    for assign in (False, True):
        other = sharded_model(recipe, dims=(7, 5))
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        if assign:
            other.load_state_dict(model.state_dict(), assign=True)
        else:
            set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
        assert isinstance(other[0].up.weight._local_tensor, ShardedWeight)
        equal(step(other, 1, dim=7), step(model, 1, dim=7), "output")
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            equal(p, q, "parameter")


def meta_models_load_checkpoints(rank):
    whole = convert(model_of(), "tensorwise", gathers=True).state_dict()
    model = convert(model_of().to("meta"), "tensorwise", gathers=True)
    shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if rank == 0 else {}, options=options)
    assert isinstance(model[0].up.weight._local_tensor, ShardedWeight)
    equal(step(model), step(sharded_model()), "output")


def evaluates(rank):
    """Without gradients; and in high precision, with the gathered weights."""
    plain = model_of()
    single, model = convert(copy.deepcopy(plain), "tensorwise", False), sharded_model()
    x = data_of(0, rank, 32)[0]
    with torch.no_grad():
        equal(model(x), single(x), "no_grad")
    with torch.inference_mode():
        equal(model(x), single(x), "inference")
    with high_precision(model):
        out = model(x)
        out.backward(torch.randn_like(out))
    for p in plain.parameters():
        if p.dim() == 2:
            p.data = Float8Tensor.from_high_precision(p.data, torch.float8_e4m3fn).dequantize()
    equal(out, plain(x), "high precision")
    equal(model.eval()(x), single.eval()(x), "after")


def refuses(rank, what, message):
    model = sharded_model()
    try:
        if what == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                step(model)
        elif what == "back":
            convert_from_float8_training(model)
        elif what == "back, gathered":
            single = fully_shard(convert(nn.Sequential(nn.Linear(8, 8)), "tensorwise", True))
            single(torch.randn(4, 8))  # the root is not resharded after forward
            convert_from_float8_training(single)
        elif what == "group":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for group in (mesh, mesh["replicate"]):
                fresh = sharded_model("delayed", mesh=mesh)
                sync_float8_amax_and_scale_history(fresh, group)
        elif what == "sharded":
            convert(shard(model_of()), "tensorwise", gathers=True)
        elif what == "integer":
            step(sharded_model(reshard_after_forward=2))
    except Exception as error:
        if message in f"{type(error).__name__}: {error}":
            return
        raise
    raise AssertionError(f"{what} was not refused")


def clips_and_steps(rank):
    single, model = convert(model_of(), "tensorwise", False), sharded_model()
    for foreach in (False, True):
        oracle_step(single, 0, range(dist.get_world_size()), 32, None)
        model.zero_grad()
        step(model)
        for m in (single, model):
            norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            assert 1 < full(norm) < 1e4
            torch.optim.AdamW(m.parameters(), lr=0.01, foreach=foreach).step()
        for (name, p), q in zip(single.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(p, full(q[1]), msg=name)


def an_unused_weight_gets_zeros(rank):
    model = sharded_model()
    fsdp = [m for m in model.modules() if hasattr(m, "set_reduce_scatter_unused_params")]
    for m in fsdp:
        m.set_reduce_scatter_unused_params(True)
    model[0].down.forward = lambda x: torch.zeros(*x.shape[:-1], 32)
    step(model)
    if fsdp:
        equal(model[0].down.weight.grad, torch.zeros(32, 48), "grad")
