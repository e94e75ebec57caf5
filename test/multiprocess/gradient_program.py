"""Float8 gradients: the reductions on two processes, DDP on two, FSDP2 on four.

The oracle of a reduction is the float64 mean of all ranks' gradients, which every rank can compute
because they are drawn from seeds. Bounds follow from the format: rounding to nearest even moves a
value by at most ``eps / 2`` of its binade's start, and by half a subnormal step near zero.
`test_attach.py` starts the processes.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bench_gradients import simulated
from float8.distributed.gradients import (
    Float8Gradients,
    ScalingController,
    float8_gradients,
    reduction,
)
from float8.distributed.gradients.attach import Float8ReduceScatter
from float8.formats import E4M3, E5M2

COLLECTIVES = {  # name -> (where its payload is, how often each byte passes, per (N - 1) / N)
    "all_reduce": (0, 2),
    "all_to_all_single": (1, 1),
    "all_gather_single": (0, 1),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter_tensor": (1, 1),
    "reduce_scatter_single": (1, 1),
}


class Counter:
    """Count the bytes and calls of this rank's collectives of torch.distributed."""

    def __init__(self):
        self.bytes, self.calls = 0.0, []

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.stack.enter_context(mock.patch.object(dist, name, self._counting(name)))
        for name, function in (
            ("all_gather_single", "_all_gather"),
            ("all_reduce", "max_over_ranks"),
        ):
            counting = self._counting(name, getattr(reduction, function))
            self.stack.enter_context(mock.patch.object(reduction, function, counting))
        return self

    def __exit__(self, *error):
        self.stack.close()

    def _counting(self, name, function=None):
        function = function or getattr(dist, name)
        where, passes = COLLECTIVES[name]

        def call(*args, **kwargs):
            keyword = ("output", "input")[where]
            tensor = args[where] if len(args) > where else kwargs[keyword]
            self.bytes += passes * tensor.numel() * tensor.element_size()
            self.calls.append((name, tensor.dtype))
            return function(*args, **kwargs)

        return call


def gradients(n, dtype=torch.float32, seed=0, spread=3.0):
    """Every rank's gradient: magnitudes over many binades, another amax on each rank."""
    made = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        exponents = spread * torch.randn(n, generator=generator)
        g = torch.randn(n, generator=generator) * exponents.exp2() * (1 + 3 * rank)
        made.append(g.to(dtype))
    return made


def tile_peaks(every, tile):
    """The largest magnitude over ranks in each element's tile, without `reduction.in_tiles`."""
    world, n = len(every), every[0].numel()
    tiles, extent = reduction.extents(-(-n // world), tile)
    peak = torch.stack([g.double().abs() for g in every]).amax(0)
    index = torch.arange(n) // extent
    found = torch.zeros(world * tiles, dtype=torch.float64)
    return found.scatter_reduce(0, index, peak, "amax")[index]


def bound(every, fmt, tile, mu=1.0, casts=2):
    """How far each element of the mean may be off, (n,) float64."""
    half_ulp = torch.finfo(fmt.dtype).eps / 2
    step = tile_peaks(every, tile) / fmt.max * fmt.smallest_subnormal / 2
    before = torch.stack([g.double().abs() * half_ulp + step for g in every]).mean(0)
    mean = torch.stack([g.double() for g in every]).mean(0).abs()
    after = (mean + before) * half_ulp + step / mu
    rounding = torch.finfo(every[0].dtype).eps * (mean + before + after)
    return before + (after if casts == 2 else 0) + rounding


def exact_mean(every):
    return torch.stack([g.double() for g in every]).mean(0)


def same_on_all_ranks(x):
    x = x.detach().contiguous()
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    return all(torch.equal(x, y) for y in gathered)


# --- the collectives


def reduced(every, rank, fmt=E4M3, mu=1.0, tile=reduction.TILE):
    mine = every[rank].clone()
    counts = reduction.all_reduce_mean(mine, torch.tensor(mu), dist.group.WORLD, fmt, tile)
    return mine, reduction.Counts(*counts.tolist())


def is_the_mean(rank, fmt_name, dtype_name, sizes):
    fmt, dtype = {"e4m3": E4M3, "e5m2": E5M2}[fmt_name], getattr(torch, dtype_name)
    for n in sizes:
        every = gradients(n, dtype, seed=n)
        found, counts = reduced(every, rank, fmt, tile=64)
        off = (found.double() - exact_mean(every)).abs()
        assert (off <= bound(every, fmt, 64)).all(), (n, off.max())
        assert counts.saturated == 0 and counts.nonfinite == 0
        assert same_on_all_ranks(found), n


def has_the_bits_of_the_simulation(rank):
    for n, dtype, mu in (
        (1, torch.float32, 1.0),
        (999, torch.bfloat16, 1.3),
        (70, torch.half, 4.0),
    ):
        every = gradients(n, dtype, seed=n)
        found, _ = reduced(every, rank, mu=mu, tile=64)
        again, _ = reduced(every, rank, mu=mu, tile=64)
        assert torch.equal(found, simulated(every, mu=mu, tile=64)[0]), n
        assert torch.equal(found, again), "not deterministic"


def a_bad_value_on_one_rank_makes_all_ranks_nan(rank, bad):
    every = gradients(300)
    every[-1][7] = bad
    found, counts = reduced(every, rank)
    assert found.isnan().all()
    assert counts.nonfinite == 1
    assert counts.saturated == 0


def zeros_stay_zeros(rank):
    found, counts = reduced([torch.zeros(50)] * dist.get_world_size(), rank)
    assert torch.equal(found, torch.zeros(50))
    assert counts == (0, 0, 0, 0)


def an_empty_gradient_is_reduced(rank):
    found, _ = reduced([torch.zeros(0)] * dist.get_world_size(), rank)
    assert found.shape == (0,)


def saturation_is_counted(rank):
    world = dist.get_world_size()
    every = [torch.linspace(-1, 1, 256)] * world  # all agree, so the mean is as large as the parts
    found, counts = reduced(every, rank, mu=4.0)
    limit = reduction.saturates_above(E4M3) / E4M3.max / 4
    edge = (every[0].abs() / limit - 1).abs() < 0.07  # rounding before the sum may cross it
    clipped = every[0].abs() > limit
    assert (clipped & ~edge).sum() <= counts.saturated <= (clipped | edge).sum()
    peaks = tile_peaks(every, reduction.TILE)
    assert (found.abs() <= peaks.float() / 4 * 1.001).all()
    assert reduced(every, rank, mu=1.0)[1].saturated == 0


def underflow_is_counted(rank):
    world = dist.get_world_size()
    tiny = E4M3.smallest_subnormal / E4M3.max / 4  # of the amax: a quarter of the smallest code
    mine = torch.full((64 * world,), tiny)
    mine[::64] = 1.0  # one in each tile
    found, counts = reduced([mine] * world, rank, tile=64)
    assert counts.flushed_before == 63 * world
    assert counts.flushed == 0, "what is flushed before the sum is not flushed again"
    assert (found == 0).sum() == 63 * world
    # Survives the first cast on one rank, and not the mean.
    every = [torch.zeros(64 * world) for _ in range(world)]
    every[0] += 4 * tiny
    for g in every:
        g[::64] = 1.0
    _, counts = reduced(every, rank, tile=64)
    assert counts.flushed_before == 0
    assert counts.flushed == 63 * world


def half_of_the_bytes_of_bfloat16_travel(rank, n, most):
    """At most ``most`` of the bytes of bfloat16's collectives, in three calls."""
    every = gradients(n)
    with Counter() as ours:
        reduced(every, rank)
    with Counter() as theirs:
        dist.all_reduce(every[rank].bfloat16())
    assert [name for name, _ in ours.calls] == [
        "all_reduce",
        "all_to_all_single",
        "all_gather_single",
    ]
    assert {dtype for _, dtype in ours.calls[1:]} == {torch.uint8}
    assert 0 < ours.bytes <= most * theirs.bytes, ours.bytes / theirs.bytes
    world = dist.get_world_size()
    output, x_NC = torch.empty(n // world), every[rank].view(world, -1)
    with Counter() as ours:
        reduction.reduce_scatter(output, x_NC, dist.group.WORLD, E4M3, mean=True)
    their_bytes = 2 * n  # of bfloat16, each passing once; gloo has no such collective to count
    assert 0 < ours.bytes <= most * their_bytes, ours.bytes / their_bytes


def no_value_moves_to_the_host(rank):
    """Between the backward and the optimizer."""
    controller = ScalingController()
    controller.prepare(torch.device("cpu"), dist.get_world_size())
    mine = gradients(2000)[rank]
    reduction.all_reduce_mean(mine.clone(), controller.mu, dist.group.WORLD, E4M3)
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            asked = AssertionError(f"Tensor.{name}")
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=asked))
        counts = reduction.all_reduce_mean(mine, controller.mu, dist.group.WORLD, E4M3)
        controller.update(counts[0], counts[3], 2000)


def _float8_sum(data):
    total = data[0]
    for x in data[1:]:
        total = (total.float() + x.float()).clamp(-448, 448).to(data.dtype)
    return total.float()


FAULTS = {
    "scale not shared": ("max_over_ranks", lambda amax, group: amax),
    "no pre-scaling": ("prescaled", lambda total, mu, world: total),
    "no division by N": ("prescaled", lambda total, mu, world: total * mu),
    "sum in float8": ("summed", _float8_sum),
    "minimum instead of maximum": (
        "max_over_ranks",
        lambda amax, group: dist.all_reduce(amax, dist.ReduceOp.MIN, group=group) or amax,
    ),
}


def a_planted_fault_is_found(rank, name):
    differing = gradients(3000)
    agreeing = differing[:1] * dist.get_world_size()
    seen = torch.zeros(())
    for every in (differing, agreeing):
        with mock.patch.object(reduction, *FAULTS[name]):
            found, _ = reduced(every, rank)
        off = (found.double() - exact_mean(every)).abs()
        seen += ~(off <= bound(every, E4M3, reduction.TILE)).all()  # NaN too
    dist.all_reduce(seen)
    assert seen > 0


def a_bad_value_would_be_lost_without_nan_scales(rank):
    every = gradients(5000)
    every[-1][7] = float("inf")
    plain = lambda amax, fmt: reduction.kernels.scale_from_amax(amax, fmt.max)  # noqa: E731
    with mock.patch.object(reduction, "shared_scale", plain):
        found, _ = reduced(every, rank)
    assert not found.isnan().all()


# --- DDP


def model_of(dtype=torch.float32, width=48):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(13, width), nn.GELU(), nn.Linear(width, 7), nn.LayerNorm(7))
    return layers.to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 13, generator=generator)
    target = torch.sin(x @ torch.linspace(-1, 1, 13 * 7).reshape(13, 7))
    return x.to(dtype), target.to(dtype)


def loss_of(model, rank, step, dtype=torch.float32):
    x, target = batch(rank, step, dtype)
    return (model(x) - target).square().mean()


def local_gradients(microbatches=1, dtype=torch.float32):
    """Every rank's gradient in one process without communication: rank -> list of gradients."""
    found = []
    for rank in range(dist.get_world_size()):
        model = model_of(dtype)
        for step in range(microbatches):
            loss_of(model, rank, step, dtype).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def close_to_the_mean(model, microbatches=1, dtype=torch.float32):
    """Norm-wise: each of at most two casts moves a value by at most a sixteenth of it."""
    locals_of_parameter = zip(*local_gradients(microbatches, dtype), strict=True)
    for (name, p), every in zip(model.named_parameters(), locals_of_parameter, strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        norm = torch.stack([g.double().norm() for g in every]).mean()
        relative = (grad.double() - exact_mean(every)).norm() / norm
        assert relative < 2 / 16, (name, float(relative))
        assert relative > 0 or len(every) == 1, name  # FSDP2 reduces nothing on one rank


def ddp_reduces_every_form(rank):
    forms = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.001},
    ]
    for form in forms:
        model = DistributedDataParallel(model_of(), **form)
        state = float8_gradients(model, tile=64)
        for step in range(3):  # DDP rebuilds its buckets after the first
            model.zero_grad()
            loss_of(model, rank, 0).backward()
            close_to_the_mean(model.module)
            assert all(same_on_all_ranks(p.grad) for p in model.parameters()), (form, step)
        report = state.report()
        assert report.steps == 3
        assert report.elements == 3 * sum(p.numel() for p in model.parameters())
        assert report.saturated == 0 or report.mu < 1


def ddp_accumulates_without_sync(rank):
    model = DistributedDataParallel(model_of())
    state = float8_gradients(model)
    with Counter() as traffic, model.no_sync():
        loss_of(model, rank, 0).backward()
    assert traffic.calls == []
    loss_of(model, rank, 1).backward()
    close_to_the_mean(model.module, microbatches=2)
    assert state.report().steps == 1


def ddp_takes_bfloat16(rank):
    model = DistributedDataParallel(model_of(torch.bfloat16))
    float8_gradients(model, E4M3.dtype)
    loss_of(model, rank, 0, torch.bfloat16).backward()
    close_to_the_mean(model.module, dtype=torch.bfloat16)


def ddp_refuses_float64(rank):
    model = DistributedDataParallel(model_of(torch.float64))
    with pytest.raises(TypeError, match=r"'0.weight'.*float64"):
        float8_gradients(model)


def parameters_that_ddp_ignores_may_have_any_dtype(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    ignored = ["1.weight", "1.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    float8_gradients(DistributedDataParallel(model))


def a_compiled_ddp_reduces(rank):
    model = DistributedDataParallel(model_of())
    state = float8_gradients(torch.compile(model, backend="eager"))
    loss_of(model, rank, 0).backward()
    close_to_the_mean(model.module)
    assert state.report().steps == 1


def _losses(rank, hook, steps=40):
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.001)
    if hook is not None:
        hook(model)
    losses = _train(model, rank, steps)
    assert all(same_on_all_ranks(p) for p in model.parameters())
    return losses


def _train(model, rank, steps):
    """The loss of each step, averaged over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def _bfloat16_all_reduce(model):
    def hook(state, bucket):
        gradient = bucket.buffer()
        sent = (gradient / dist.get_world_size()).bfloat16()
        dist.all_reduce(sent)
        future = torch.futures.Future()
        future.set_result(gradient.copy_(sent))
        return future

    model.register_comm_hook(None, hook)


def _difference(rank, exact, hook):
    return float(((_losses(rank, hook, len(exact)) - exact).abs() / exact).max())


def ddp_training_follows_float32(rank):
    """The losses of 40 AdamW steps differ from a float32 all-reduce's by rounding only.

    The bound is 32 times the difference of a bfloat16 all-reduce: E4M3 has 4 mantissa bits less, so
    16 times its rounding error, in two casts rather than one cast and a sum.
    """
    exact = _losses(rank, None)
    assert exact[-1] < 0.7 * exact[0], "the loss did not fall"
    ours, bfloat16 = (
        _difference(rank, exact, float8_gradients),
        _difference(rank, exact, _bfloat16_all_reduce),
    )
    assert 0 < ours < 32 * bfloat16 < 0.02, (ours, bfloat16)


def ddp_training_fails_with(rank, name):
    exact = _losses(rank, None)
    with mock.patch.object(reduction, *FAULTS[name]):
        try:
            off = _difference(rank, exact, float8_gradients)
        except AssertionError:  # ranks have different parameters
            return
    assert not off < 32 * _difference(rank, exact, _bfloat16_all_reduce)


def fsdp_training_follows_ddp(rank):
    """As `ddp_training_follows_float32`, with one cast."""
    exact = _losses(rank, None, steps=10)
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    float8_gradients(model)
    off = (_train(model, rank, steps=10) - exact).abs() / exact
    assert 0 < off.max() < 16 * _difference(rank, exact, _bfloat16_all_reduce), float(off.max())


def a_restart_restores_mu_and_the_counts(rank):
    def train(model, state, steps):
        for step in steps:
            model.zero_grad()
            loss_of(model, rank, step).backward()
        return state.state_dict()

    def fresh():
        model = DistributedDataParallel(model_of())
        return model, float8_gradients(model, controller=ScalingController(1.3, ceiling=2.0))

    model, state = fresh()
    train(model, state, range(3))
    saved = copy.deepcopy(state.state_dict())
    through = train(model, state, range(3, 6))
    model, state = fresh()
    state.load_state_dict(saved)
    resumed = train(model, state, range(3, 6))
    assert through.keys() == resumed.keys() == {"mu", "lost", "counts"}
    assert all(torch.equal(through[key], resumed[key]) for key in through)
    assert all(same_on_all_ranks(value) for value in through.values())
    assert through["counts"][0] == 6


def a_distributed_checkpoint_has_the_state(rank):
    def fresh(mu):
        model = DistributedDataParallel(model_of())
        return model, float8_gradients(model, controller=ScalingController(mu))

    model, state = fresh(1.2)
    loss_of(model, rank, 0).backward()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"gradients": state}, checkpoint_id=folder[0])
    _, other = fresh(1.0)
    dcp.load({"gradients": other}, checkpoint_id=folder[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    assert other.report() == state.report() and other.report().mu > 1.19


def mu_is_halved_on_saturation_on_all_ranks(rank):
    """All ranks have the same gradient, so mu = 8 clips until it is halved to 1."""
    model = DistributedDataParallel(model_of())
    state = float8_gradients(model, controller=ScalingController(8.0))
    seen = []
    for _ in range(6):
        model.zero_grad()
        loss_of(model, 0, 0).backward()
        seen.append(state.report().mu)
    assert seen[:3] == [4.0, 2.0, 1.0]
    assert all(0.5 <= mu < 1.1 for mu in seen[3:])
    assert state.report().saturated > 0
    assert same_on_all_ranks(state.controller.mu)


def a_gradient_scaler_skips_a_bad_gradient(rank):
    model = DistributedDataParallel(model_of())
    state = float8_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, mu = model_of().state_dict(), state.report().mu
    loss = loss_of(model, rank, 0) * (float("inf") if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = model.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before), "it stepped"
    assert scaler.get_scale() == 2.0
    assert not any(p.grad.isfinite().any() for p in model.parameters())
    assert not torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).isfinite()
    report = state.report()
    assert report.nonfinite > 0 and report.mu == mu


def different_arguments_of_ranks_are_an_error(rank):
    for one, other in (
        ({}, {"fmt": E5M2}),
        ({"tile": 32}, {}),
        ({}, {"controller": ScalingController(2)}),
        ({}, {"controller": ScalingController(1.00001)}),
    ):
        model = DistributedDataParallel(model_of())
        with pytest.raises(RuntimeError, match=r"rank 0 and .* on rank 1.* same arguments on all"):
            float8_gradients(model, **(one if rank == 0 else other))


# --- FSDP2


def _sharded(mesh, policy=None, dtype=torch.float32):
    model = model_of(dtype)
    policy = policy or MixedPrecisionPolicy()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_reduces(rank):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = _sharded(mesh)
    state = float8_gradients(model)
    with Counter() as traffic:
        loss_of(model, rank, 0).backward()
    close_to_the_mean(model)
    assert [dtype for name, dtype in traffic.calls if name == "all_to_all_single"] == 3 * [
        torch.uint8
    ]
    assert not any("reduce_scatter" in name for name, _ in traffic.calls)
    report = state.report()
    assert report.steps == 3 and report.mu is None and report.saturated == 0
    assert report.sampled * world == report.elements
    loss_of(model, rank, 1).backward()  # accumulates
    close_to_the_mean(model, microbatches=2)


def fsdp_accumulates_without_sync(rank):
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    state = float8_gradients(model)
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 0).backward()
    assert state.report().steps == 0
    model.set_requires_gradient_sync(True)
    loss_of(model, rank, 1).backward()
    close_to_the_mean(model, microbatches=2)


def every_microbatch_may_be_reduced(rank):
    """Sums of microbatches count each once, on one rank too."""
    ddp = DistributedDataParallel(model_of(), gradient_as_bucket_view=True)
    fsdp = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    for model in (ddp, fsdp):
        float8_gradients(model)
        for step in range(4):
            loss_of(model, rank, step).backward()
        close_to_the_mean(getattr(model, "module", model), microbatches=4)


def fsdp_takes_mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)), policy)
    float8_gradients(model, E5M2)
    loss_of(model, rank, 0).backward()
    for p in model.parameters():
        assert p.grad.dtype == torch.float32 and p.grad.full_tensor().isfinite().all()


def fsdp_takes_a_divide_factor(rank):
    world = dist.get_world_size()
    model = _sharded(init_device_mesh("cpu", (world,)))
    float8_gradients(model)
    for unit in (model[0], model[2], model):
        unit.set_gradient_divide_factor(2.0 * world)
        unit.set_force_sum_reduction_for_comms(True)
    loss_of(model, rank, 0).backward()
    for p in model.parameters():
        p.grad *= 2
    close_to_the_mean(model)


def a_bad_gradient_on_one_rank_makes_all_shards_nan(rank):
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    float8_gradients(model)
    loss = loss_of(model, rank, 0) * (float("nan") if rank == dist.get_world_size() - 1 else 1.0)
    loss.backward()
    for p in model.parameters():
        local = p.grad.to_local()
        assert local.isnan().all(), "a shard of this rank is finite"


def hsdp_reduces(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh)
    float8_gradients(model)
    loss_of(model, rank, 0).backward()
    close_to_the_mean(model)


def fsdp_has_the_bits_of_the_simulation(rank):
    """One layer without bias: its flat gradient is that of the unit, so it can be simulated."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    layer = nn.Linear(24, 8 * world, bias=False)
    sharded = fully_shard(copy.deepcopy(layer), mesh=init_device_mesh("cpu", (world,)))
    float8_gradients(sharded, tile=48)
    x = [torch.randn(5, 24) for _ in range(world)]
    g = [torch.randn(5, 8 * world) for _ in range(world)]
    sharded(x[rank]).backward(g[rank])
    every = [(g[r].t() @ x[r]).flatten() for r in range(world)]
    expected = simulated(every, tile=48)[1].view(8 * world, 24)
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), expected, rtol=1e-6, atol=1e-7)


def fsdp_refuses_a_controller(rank):
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError, match="cannot saturate"):
        float8_gradients(model, controller=ScalingController())


def a_replicated_model_is_refused(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "shard"))
    with pytest.raises(ValueError, match="replicated, not sharded"):
        float8_gradients(_sharded(mesh))


def fsdp_refuses_another_reduction(rank):
    comm = Float8ReduceScatter(Float8Gradients(), "2")
    x = torch.zeros(4 * dist.get_world_size())
    with pytest.raises(ValueError, match=r"unit '2'.*set_force_sum_reduction_for_comms"):
        comm(x[:4], x, dist.group.WORLD, dist.ReduceOp.MAX)
