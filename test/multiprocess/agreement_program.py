"""What sync must do on each of a few gloo processes: agree, or say on every rank why not.

A file of its own, because spawned processes import it by name.
"""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist
from tensor_parallel_program import EXACT, Wire, make_model, parallelized, sequence_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from float8 import (
    DelayedScalingConfig,
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.linear import delayed
from float8.linear.scaling import max_over_ranks

DELAYED = RECIPES["delayed"]
SHORTER = Float8LinearConfig(
    DELAYED.cast_config_input,
    DELAYED.cast_config_weight,
    DELAYED.cast_config_grad_output,
    delayed_scaling=DelayedScalingConfig(history_len=4),
)


def model_of(*names, config=DELAYED, width=32):
    torch.manual_seed(0)
    layers = {name: nn.Linear(32, width if name == "wide" else 32) for name in names}
    return convert_to_float8_training(nn.ModuleDict(layers), config=config)


def seen(model, rank):
    """A backward through each layer, of values that differ from rank to rank."""
    torch.manual_seed(rank)
    for layer in model.values():
        layer(torch.randn(16, 32) * (rank + 1)).backward(torch.randn(16, layer.out_features))


def buffers(model):
    return torch.cat([b.reshape(-1) for b in model.buffers()])


def gathered(x, group=None):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group)
    return parts


# On rank 1, in place of the layers "a" and "b" with recipe delayed; and what the message says.
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


def disagreement_is_told_on_every_rank(rank):
    for what, (make, expected) in OTHERS.items():
        model = make() if rank == 1 else model_of("a", "b")
        began = time.monotonic()
        message = error_of(lambda model=model: sync_float8_amax_and_scale_history(model))
        assert expected in message, (what, message)
        assert "group=" in message, (what, message)
        assert time.monotonic() - began < 10, what
        dist.barrier()


def orders_of_registration_may_differ(rank):
    """Histories are reduced in the order of the names, which every rank knows."""
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


def error_of(act, kind=RuntimeError):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def one_collective_for_all_histories(rank):
    """And none but it, after the first call; a model without delayed casts needs none at all."""
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
            seen(model, rank)
            sync_float8_amax_and_scale_history(model, group)
        parts = gathered(buffers(model))
        assert all(torch.equal(part, parts[0]) for part in parts), group
        assert all(cast.history_ready for layer in model.values() for cast in layer.casts)
        found.append(parts[0])
    assert all(torch.equal(each, found[0]) for each in found)


def stages_share_with_their_own_ranks_only(rank):
    """Four ranks, two stages of two: each stage's layers are its own, and so are its scales."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    for group in (mesh["dp"], mesh["dp"].get_group()):
        model = model_of("first") if stage == 0 else model_of("second", "third")
        message = error_of(lambda model=model: sync_float8_amax_and_scale_history(model))
        assert "first: rank 0 has such a float8 layer, and rank" in message
        seen(model, rank)
        sync_float8_amax_and_scale_history(model, group)
        parts = gathered(buffers(model), mesh["dp"].get_group())
        assert torch.equal(*parts)
        # The peak of a stage is that of its later rank, whose values are the larger ones.
        alone = model_of("first") if stage == 0 else model_of("second", "third")
        seen(alone, 2 * stage + 1)
        name = next(iter(model))
        peak = alone[name].cast_input.current_amax
        assert model[name].cast_input.amax_history[0] == peak


def a_rank_outside_of_the_group_is_told(rank):
    group = dist.new_group([0])
    model = model_of("a")
    if rank == 0:
        sync_float8_amax_and_scale_history(model, group)
        return
    act = lambda: sync_float8_amax_and_scale_history(model, group)  # noqa: E731
    assert "not in the group" in error_of(act, ValueError)


def tensor_parallel_ranks_must_be_in_the_group(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(make_model(), mesh["tp"], sequence_parallel(), EXACT["delayed"], False)
    act = lambda: sync_float8_amax_and_scale_history(model, mesh["dp"])  # noqa: E731
    message = error_of(act)
    assert message.startswith("gate: ranks ["), message
    sync_float8_amax_and_scale_history(model, mesh["tp"])
    sync_float8_amax_and_scale_history(model, mesh)


def amaxes_of_two_devices_meet(rank):
    """Histories on the CPU and on another device (here a stand-in) still take one collective."""
    from float8 import sync

    model = model_of("a", "b")
    seen(model, rank)
    with contextlib.ExitStack() as stack:
        real = sync._reduced_over_ranks
        stack.callback(setattr, sync, "_reduced_over_ranks", real)

        def in_two_parts(currents, groups):
            (all_,) = currents
            halves = list(all_.split([2, len(all_) - 2]))
            counts = []
            result = real(halves, groups)
            counts.append(len(result))
            assert counts == [2]
            return [torch.cat(result)]

        sync._reduced_over_ranks = in_two_parts
        sync_float8_amax_and_scale_history(model)
    expected = model_of("a", "b")
    seen(expected, rank)
    sync_float8_amax_and_scale_history(expected)
    assert torch.equal(buffers(model), buffers(expected))


def amaxes_are_reduced_over_the_given_group_only(rank):
    """On a mesh of replicas and tensor parallelism, where every rank has an amax of its own.

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
    seen(model, rank)
    casts = [cast for layer in model.values() for cast in layer.casts]
    own = gathered(torch.stack([cast.current_amax for cast in casts]))
    assert len({part[0].item() for part in own}) == len(own)
    expected = torch.stack([own[member] for member in members]).amax(0)
    sync_float8_amax_and_scale_history(model, group)
    found = torch.stack([cast.amax_history[0] for cast in casts])
    assert torch.equal(found.reshape(-1), expected.reshape(-1)), what


def a_wrong_group_is_seen(rank):
    """A planted fault: every reduction is over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    everywhere = lambda amax, group: max_over_ranks(amax, dist.group.WORLD)  # noqa: E731
    members = [rank % 2, rank % 2 + 2]
    with mock.patch.object(delayed, "max_over_ranks", everywhere):
        act = lambda: amaxes_are_those_of(members, mesh["dp"], rank, "wrong")  # noqa: E731
        assert error_of(act, AssertionError) == "wrong"
