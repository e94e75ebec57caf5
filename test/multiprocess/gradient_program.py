"""What float8 gradients must do on each of a few gloo processes.

The tests in test/distributed/gradients start them; a file of its own, because spawned processes
import it by name.

The oracle is the float64 mean of all ranks' gradients, which every rank can compute because they
are drawn from seeds. Bounds follow from the format: nearest even moves a value by at most
``eps / 2`` of its binade's start, and by half a subnormal step near zero.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from float8.distributed.gradients import ScalingController, reduce, wire
from float8.distributed.gradients.measure import simulated
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
    """Bytes and calls that this rank gives to torch.distributed's collectives."""

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
            counting = self._counting(name, getattr(reduce, function))
            self.stack.enter_context(mock.patch.object(reduce, function, counting))
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
    """The largest magnitude over ranks in each element's tile, found without `wire`'s folding."""
    world, n = len(every), every[0].numel()
    tiles, extent = wire.extents(-(-n // world), tile)
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


def reduced(every, rank, fmt=E4M3, mu=1.0, tile=wire.TILE):
    mine = every[rank].clone()
    counts = reduce.all_reduce_mean(mine, torch.tensor(mu), dist.group.WORLD, fmt, tile)
    return mine, wire.Counts(*counts.tolist())


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


def a_bad_value_on_one_rank_is_seen_by_all(rank, bad):
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


def nothing_is_empty_handed(rank):
    found, _ = reduced([torch.zeros(0)] * dist.get_world_size(), rank)
    assert found.shape == (0,)


def saturation_is_counted(rank):
    world = dist.get_world_size()
    every = [torch.linspace(-1, 1, 256)] * world  # all agree, so the mean is as large as the parts
    found, counts = reduced(every, rank, mu=4.0)
    limit = wire.saturates_above(E4M3) / E4M3.max / 4
    edge = (every[0].abs() / limit - 1).abs() < 0.07  # rounding before the sum may cross it
    clipped = every[0].abs() > limit
    assert (clipped & ~edge).sum() <= counts.saturated <= (clipped | edge).sum()
    peaks = tile_peaks(every, wire.TILE)
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


def float8_travels(rank, n, most):
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
        reduce.reduce_scatter(output, x_NC, dist.group.WORLD, E4M3, mean=True)
    their_bytes = 2 * n  # of bfloat16, each passing once; gloo has no such collective to count
    assert 0 < ours.bytes <= most * their_bytes, ours.bytes / their_bytes


def the_device_is_never_asked(rank):
    """No value moves to the host between the backward and the optimizer."""

    controller = ScalingController()
    controller.prepare(torch.device("cpu"), dist.get_world_size())
    mine = gradients(2000)[rank]
    reduce.all_reduce_mean(mine.clone(), controller.mu, dist.group.WORLD, E4M3)
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            asked = AssertionError(f"Tensor.{name}")
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=asked))
        counts = reduce.all_reduce_mean(mine, controller.mu, dist.group.WORLD, E4M3)
        controller.update(counts[0], counts[3], 2000)


@contextlib.contextmanager
def planted(name, fault):
    with mock.patch.object(wire if hasattr(wire, name) else reduce, name, fault):
        yield


def _float8_sum(codes):
    total = codes[0]
    for c in codes[1:]:
        total = (total.float() + c.float()).clamp(-448, 448).to(codes.dtype)
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


def a_planted_fault_is_seen(rank, name):
    differing = gradients(3000)
    agreeing = differing[:1] * dist.get_world_size()
    seen = torch.zeros(())
    for every in (differing, agreeing):
        with planted(*FAULTS[name]):
            found, _ = reduced(every, rank)
        off = (found.double() - exact_mean(every)).abs()
        seen += ~(off <= bound(every, E4M3, wire.TILE)).all()  # NaN too
    dist.all_reduce(seen)
    assert seen > 0


def a_bad_value_would_hide_without_the_poison(rank):
    every = gradients(5000)
    every[-1][7] = float("inf")
    plain = lambda amax, fmt: wire.kernels.scale_from_amax(amax, fmt.max)  # noqa: E731
    with planted("shared_scale", plain):
        found, _ = reduced(every, rank)
    assert not found.isnan().all()
