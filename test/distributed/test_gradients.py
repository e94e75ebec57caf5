"""Float8 gradients: the reductions, under DDP and under FSDP2.

The oracle of a reduction is the float64 mean of all ranks' gradients, which every rank can compute
because they are drawn from seeds. Bounds follow from the format: rounding to nearest even moves a
value by at most ``eps / 2`` of its binade's start, and by half a subnormal step near zero.
"""

import contextlib
import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from wire import Wire

from float8.distributed import gradient_reduction as reduction
from float8.distributed.gradients import Float8ReduceScatter, float8_gradients
from float8.formats import E4M3, E5M2

BF16, NAN, INF = torch.bfloat16, math.nan, math.inf


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


def bound(every, fmt, tile, casts=2):
    """How far each element of the mean may be off, (n,) float64."""
    half_ulp = torch.finfo(fmt.dtype).eps / 2
    step = tile_peaks(every, tile) / fmt.max * fmt.smallest_subnormal / 2
    before = torch.stack([g.double().abs() * half_ulp + step for g in every]).mean(0)
    mean = torch.stack([g.double() for g in every]).mean(0).abs()
    after = (mean + before) * half_ulp + step
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


def reduced(every, rank, fmt=E4M3, tile=reduction.TILE_SIZE):
    mine = every[rank].clone()
    reduction.all_reduce_mean(mine, dist.group.WORLD, fmt, tile)
    return mine


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3, torch.float32), (E5M2, BF16), (E4M3, torch.half), (E4M3, torch.float64)],
    ids=str,
)
def test_a_reduction_is_the_mean(rank, fmt, dtype):
    for n in (0, 1, 7, 31, 1000, 4099):
        every = gradients(n, dtype, seed=n)
        every = [g * (n != 7) for g in every]  # zeros stay zeros
        found = reduced(every, rank, fmt, tile=64)
        off = (found.double() - exact_mean(every)).abs()
        assert (off <= bound(every, fmt, 64)).all(), (n, off.max())
        assert same_on_all_ranks(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (999, BF16), (70, torch.half)])
def test_a_reduction_has_the_bits_of_the_simulation(rank, n, dtype):
    every = gradients(n, dtype, seed=n)
    for _ in range(2):
        found = reduced(every, rank, tile=64)
        assert torch.equal(found, simulated(every, tile=64)[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_value_on_one_rank_makes_all_ranks_nan(rank, bad):
    every = gradients(300)
    every[-1][7] = bad
    assert reduced(every, rank).isnan().all()
    plain = lambda amax, fmt: reduction.kernels.scale_from_amax(amax, fmt.max)  # noqa: E731
    with mock.patch.object(reduction, "scale_by_tile", plain):  # a planted fault
        assert not reduced(every, rank).isnan().all()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("n", "most"), [(1 << 16, 0.51), (4096, 0.55)])
def test_half_of_the_bytes_of_bfloat16_travel(rank, n, most):
    """At most ``most`` of the bytes of bfloat16's collectives."""
    every, world = gradients(n), dist.get_world_size()
    with Wire() as ours:
        reduced(every, rank)
    with Wire() as theirs:
        dist.all_reduce(every[rank].bfloat16())
    assert [e.kind for e in ours.sent] == ["all_reduce", "all_to_all", "all_gather"]
    assert {e.dtype for e in ours.sent[1:]} == {torch.uint8}
    assert 0 < sum(e.bytes for e in ours.sent) <= most * theirs.bytes("all_reduce")
    output, x_NC = torch.empty(n // world), every[rank].view(world, -1)
    with Wire() as ours:
        reduction.reduce_scatter(output, x_NC, dist.group.WORLD, E4M3, mean=True)
    share = (world - 1) / world  # gloo has no reduce_scatter of bfloat16 to count
    assert 0 < sum(e.bytes for e in ours.sent) <= most * 2 * n * share


@pytest.mark.ranks(2)
def test_no_value_moves_to_the_host(rank):
    """Between the backward and the optimizer."""
    mine = gradients(2000)[rank]
    reduction.all_reduce_mean(mine.clone(), dist.group.WORLD, E4M3)
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            asked = AssertionError(f"Tensor.{name}")
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=asked))
        reduction.all_reduce_mean(mine, dist.group.WORLD, E4M3)


def _float8_sum(data):
    total = data[0]
    for x in data[1:]:
        total = (total.float() + x.float()).clamp(-448, 448).to(data.dtype)
    return total.float()


_cast_mean = reduction.cast_mean


def _own_data(mean, fmt):
    return _cast_mean(mean, torch.ones(()), fmt)[0]


FAULTS = {
    "scale not shared": ("max_over_ranks", lambda amax, group: amax),
    "own scale not sent": (
        "cast_mean",
        lambda mean, scale, fmt: (_own_data(mean, fmt), scale[None]),
    ),
    "shared scale left out": (
        "cast_mean",
        lambda mean, scale, fmt: _cast_mean(mean, scale**0, fmt),
    ),
    "no division by N": ("cast_mean", lambda mean, *how: _cast_mean(mean * 2, *how)),
    "sum in float8": ("summed", _float8_sum),
    "minimum instead of maximum": (
        "max_over_ranks",
        lambda amax, group: dist.all_reduce(amax, dist.ReduceOp.MIN, group=group) or amax,
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(rank, name):
    differing = gradients(3000)
    seen = torch.zeros(())
    for every in (differing, differing[:1] * 2):
        with mock.patch.object(reduction, *FAULTS[name]):
            found = reduced(every, rank)
        off = (found.double() - exact_mean(every)).abs()
        seen += ~(off <= bound(every, E4M3, reduction.TILE_SIZE)).all()  # NaN too
    dist.all_reduce(seen)
    assert seen > 0


# --- models


def model_of(dtype=torch.float32, width=48):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(13, width), nn.GELU(), nn.Linear(width, 7), nn.LayerNorm(7))
    return layers.to(dtype)


def ddp(dtype=torch.float32, **options):
    return DistributedDataParallel(model_of(dtype), **options)


def fsdp2(shape=(-1,), **options):
    model = model_of()
    names = ("replicate", "shard")[-len(shape) :]
    shape = [dist.get_world_size() if n == -1 else n for n in shape]
    options["mesh"] = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def loss_of(model, rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 13, generator=generator)
    target = torch.sin(x @ torch.linspace(-1, 1, 13 * 7).reshape(13, 7))
    return (model(x.to(dtype)) - target.to(dtype)).square().mean()


def close_to_the_mean(model, microbatches=1, dtype=torch.float32):
    """Norm-wise: each of at most two casts moves a value by at most a sixteenth of it."""
    locals_of_rank = []  # found in one process without communication
    for rank in range(dist.get_world_size()):
        alone = model_of(dtype)
        for step in range(microbatches):
            loss_of(alone, rank, step, dtype).backward()
        locals_of_rank.append([p.grad for p in alone.parameters()])
    parts = zip(*locals_of_rank, strict=True)
    for (name, p), every in zip(model.named_parameters(), parts, strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        norm = torch.stack([g.double().norm() for g in every]).mean()
        relative = (grad.double() - exact_mean(every)).norm() / norm
        assert relative < 2 / 16, (name, float(relative))
        assert relative > 0 or len(every) == 1, name  # FSDP2 reduces nothing on one rank


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "form",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}],
    ids=str,
)
def test_ddp_reduces_every_form(rank, form):
    model = ddp(**form)
    float8_gradients(model, tile=64)
    for _ in range(3):  # DDP rebuilds its buckets after the first
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        close_to_the_mean(model.module)
        assert all(same_on_all_ranks(p.grad) for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_compiled_ddp_accumulates_without_sync(rank, dtype):
    model = ddp(dtype)
    float8_gradients(torch.compile(model, backend="eager"), E4M3.dtype)
    with Wire() as wire, model.no_sync():
        loss_of(model, rank, 0, dtype).backward()
    assert wire.sent == []
    loss_of(model, rank, 1, dtype).backward()
    close_to_the_mean(model.module, microbatches=2, dtype=dtype)


@pytest.mark.ranks(2, 4)
def test_fsdp2_reduces_and_accumulates(rank):
    model = fsdp2(mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    float8_gradients(model)
    with Wire() as wire:
        loss_of(model, rank, 0).backward()
    close_to_the_mean(model)
    assert [e.dtype for e in wire.sent if e.kind == "all_to_all"] == 3 * [torch.uint8]
    assert wire.count("reduce_scatter") == 0
    model.set_requires_gradient_sync(False)
    with Wire() as wire:
        loss_of(model, rank, 1).backward()
    assert wire.count("all_to_all") == 0
    model.set_requires_gradient_sync(True)
    loss_of(model, rank, 2).backward()
    close_to_the_mean(model, microbatches=3)


@pytest.mark.ranks(1, 2)
def test_every_microbatch_may_be_reduced(rank):
    """Sums of microbatches count each once, on one rank too."""
    for model in (ddp(gradient_as_bucket_view=True), fsdp2()):
        float8_gradients(model)
        for step in range(4):
            loss_of(model, rank, step).backward()
        close_to_the_mean(getattr(model, "module", model), microbatches=4)


@pytest.mark.ranks(4)
def test_hsdp_and_divide_factors(rank):
    model = fsdp2((2, 2))
    float8_gradients(model)
    loss_of(model, rank, 0).backward()
    close_to_the_mean(model)
    model = fsdp2()
    float8_gradients(model)
    for unit in (model[0], model[2], model):
        unit.set_gradient_divide_factor(2.0 * dist.get_world_size())
        unit.set_force_sum_reduction_for_comms(True)
    loss_of(model, rank, 0).backward()
    for p in model.parameters():
        p.grad *= 2
    close_to_the_mean(model)


@pytest.mark.ranks(2)
def test_a_bad_gradient_on_one_rank_makes_all_shards_nan(rank):
    model = fsdp2()
    float8_gradients(model)
    (loss_of(model, rank, 0) * (NAN if rank == 1 else 1.0)).backward()
    assert all(p.grad.to_local().isnan().all() for p in model.parameters())


@pytest.mark.ranks(4)
def test_fsdp2_has_the_bits_of_the_simulation(rank):
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


@pytest.mark.ranks(2)
def test_a_gradient_scaler_skips_a_bad_gradient(rank):
    model = ddp()
    float8_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, rank, 0) * (INF if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    for p, q in zip(model.parameters(), model_of().parameters(), strict=True):
        assert torch.equal(p, q) and not p.grad.isfinite().any()
    assert scaler.get_scale() == 2.0


# --- refusals


def arguments_of_rank_1(**given):
    float8_gradients(ddp(), **(given if dist.get_rank() == 1 else {}))


def another_reduction():
    comm, x = Float8ReduceScatter(E4M3, 64), torch.zeros(8)
    comm(x[:4], x, dist.group.WORLD, dist.ReduceOp.MAX)


REFUSALS = [
    (lambda: float8_gradients(nn.Linear(4, 4)), TypeError, "wrap the Linear in Distributed"),
    (another_reduction, ValueError, "set_force_sum_reduction_for_comms"),
    (lambda: arguments_of_rank_1(fmt=E5M2), RuntimeError, "format is e4m3 on rank 0 and e5m2"),
    (lambda: arguments_of_rank_1(tile=32), RuntimeError, "tile is 1024 on rank 0 and 32 on rank 1"),
]


@pytest.mark.ranks(2)
def test_what_cannot_be_reduced_is_refused(rank):
    for call, kind, message in REFUSALS:
        with pytest.raises(kind, match=message):
            call()
