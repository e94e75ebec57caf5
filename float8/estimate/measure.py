"""Measure the machine at hand, in less than a minute: a `Device` whose figures are its own.

Timed are the three products of a linear layer in bfloat16 and under each scale granularity, at
sizes from small to large, and a copy of memory; where float8 is emulated also every pass that finds
scales or casts, one by one, because there a cast takes far longer than its bytes. On a GPU casts
are taken to run at the bandwidth of a copy, as fused kernels do.

What is compared later takes turns on the clock, A B C A B C, and the fastest round of each counts:
a busy neighbour only ever adds time. How near predictions come on a machine is for
`float8.estimate.check` to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from float8 import kernels
from float8.config import RECIPES
from float8.estimate.casts import GIVEN, READ, WRITE, kind_of, pass_name
from float8.estimate.devices import BF16, FLOAT8, Device, Figure, Product, datasheet_of
from float8.estimate.fit import Timed, fitted, timed_product
from float8.estimate.least_squares import explain
from float8.formats import E4M3, on_device
from float8.granularity import WHOLE, Block
from float8.kernels.scaled_mm import architecture, refuses_device, scaled_mm
from float8.linear.scaling import bind_and_cast

Size = tuple[int, int, int]
Thunk = Callable[[], object]
# (M, K, N): small ones for half_size, large ones for the best efficiency.
CPU_SIZES = ((128, 256, 256), (256, 512, 512), (512, 512, 1024), (512, 1024, 1024))
CUDA_SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
CAST_SIZES = ((512, 1024), (2048, 1024), (2048, 2048))
BLOCKS: tuple[Block, ...] = ((WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128))
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
SAMPLE_S = 0.005  # calls fill this much of a sample, so that the clock's resolution does not count
GROUP_S = 1.0  # what takes turns stops after this, and two rounds


@dataclass(frozen=True)
class Clock:
    """Seconds per call, of things that take turns on one device."""

    device: torch.device
    rounds: int

    def __call__(self, *things: Thunk) -> list[float]:
        """The fastest of some rounds, for each of ``things``; a call of each warms up."""
        calls = [self._calls(thing) for thing in things]
        samples: list[list[float]] = []
        begin = time.perf_counter()
        while len(samples) < self.rounds:
            samples.append([self._sample(*each) for each in zip(things, calls, strict=True)])
            if len(samples) >= 2 and time.perf_counter() - begin > GROUP_S:
                break
        return [min(own) for own in zip(*samples, strict=True)]

    def _calls(self, thing: Thunk) -> int:
        thing()
        return max(1, min(1000, int(SAMPLE_S / max(self._sample(thing, 1), 1e-7))))

    def _sample(self, thing: Thunk, calls: int) -> float:
        if self.device.type == "cuda":
            return self._device_sample(thing, calls)
        begin = time.perf_counter()
        for _ in range(calls):
            thing()
        return (time.perf_counter() - begin) / calls

    def _device_sample(self, thing: Thunk, calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            thing()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls


def measure(
    device: str | torch.device | None = None,
    *,
    sizes: Sequence[Size] | None = None,
    rounds: int = 7,
) -> Device:
    """A `Device` measured here and now.

    Args:
        device: ``"cuda"`` or ``"cpu"``; by default the GPU if there is one.
        sizes: (M, K, N) of the layers whose products are timed; at least three, of different size.
        rounds: samples per figure, of which the fastest counts.

    Raises:
        ValueError: a device of another type, or fewer than three sizes.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in COPY_BYTES:
        known = ", ".join(COPY_BYTES)
        raise ValueError(f"device={str(where)!r} cannot be measured; known: {known}")
    sizes = sizes or (CUDA_SIZES if where.type == "cuda" else CPU_SIZES)
    if len({M * K * N for M, K, N in sizes}) < 3:
        raise ValueError(f"sizes={sizes} must be at least three, of different M * K * N")
    clock = Clock(where, rounds)
    with torch.no_grad():
        bare = _bare(where, clock)
        timed = _timed_products(bare, clock, sizes)
        passes = _passes(clock) if bare.emulates else {}
    return fitted(timed, replace(bare, passes=passes), _source(where))


def _source(where: torch.device) -> str:
    return f"measured: here, {where.type}, torch {torch.__version__}"


def _bare(where: torch.device, clock: Clock) -> Device:
    """The device without its products: bandwidth of a copy, and the price of a launch."""
    source, one = _source(where), torch.zeros(1, device=where)
    memory = torch.zeros(COPY_BYTES[where.type], dtype=torch.uint8, device=where)
    target = torch.empty_like(memory)
    (copy_s,), (launch_s,) = clock(lambda: target.copy_(memory)), clock(lambda: one.add_(1))
    on_cuda = where.type == "cuda"
    name = torch.cuda.get_device_name(where) if on_cuda else "this CPU"
    arch = architecture(where.index) if on_cuda else "cpu"
    full, bandwidth = Figure(1.0, "exact: of a copy"), Figure(2 * memory.numel() / copy_s, source)
    sheet = datasheet_of(name)
    unset = Product(Figure(1.0, source), full, Figure(0.0, source))
    known = dict(sheet.products) if sheet else {BF16: unset}
    return Device(name, arch, bandwidth, full, Figure(launch_s, source), known)


def _timed_products(device: Device, clock: Clock, sizes: Sequence[Size]) -> list[Timed | None]:
    """Every kind of product that the device runs, at every size."""
    timed: list[Timed | None] = []
    for size in sizes:
        for gemm_name, a, b in _operands(size, clock.device):
            calls = {kind: _call(kind, gemm_name, device, a, b) for kind in (BF16, *FLOAT8)}
            able = {kind: call for kind, call in calls.items() if call is not None}
            shape = (a.shape[0], b.shape[0], a.shape[1])
            for kind, seconds in zip(able, clock(*able.values()), strict=True):
                timed.append(timed_product(kind, *shape, seconds, device))
    return timed


def _operands(size: Size, where: torch.device) -> list[tuple[str, Tensor, Tensor]]:
    """The three products of a layer: GEMM, ``a`` and ``b`` of ``a @ b.T``."""
    M, K, N = size
    x, w, g = (
        torch.randn(rows, columns, device=where, dtype=torch.bfloat16)
        for rows, columns in ((M, K), (N, K), (M, N))
    )
    return [("output", x, w), ("grad_input", g, w.t()), ("grad_weight", g.t(), x.t())]


def _call(kind: str, gemm_name: str, device: Device, a: Tensor, b: Tensor) -> Thunk | None:
    """The product, its operands cast as the recipe named like the kind does; None if refused."""
    if kind == BF16:
        return lambda: a @ b.t()
    gemm = getattr(RECIPES[kind].plan, gemm_name)
    blocks = (gemm.a.block, gemm.b.block)
    if not device.emulates and refuses_device(device.arch, *blocks, torch.bfloat16):
        return None
    (a8, a_scale), (b8, b_scale) = bind_and_cast(a, gemm.a), bind_and_cast(b, gemm.b)
    if not device.emulates:  # what fused casts hand over; the reference reads views
        a8, b8 = a8.contiguous(), b8.contiguous()
    return lambda: scaled_mm(
        a8, a_scale, b8, b_scale, *blocks,
        out_dtype=torch.bfloat16, use_fast_accum=gemm.use_fast_accum,
    )  # fmt: skip


def _passes(clock: Clock) -> dict[str, Figure]:
    """The rate of every pass of the reference, in the bytes that `casts.Pass` counts."""
    matrices = [torch.randn(*size, device=clock.device).bfloat16() for size in CAST_SIZES]
    found: dict[str, Figure] = {}
    for transposed in (False, True):
        views = [x.t() if transposed else x for x in matrices]
        for block in BLOCKS:
            for name, bytes_per_element, seconds in _timed_passes(clock, views, block, transposed):
                moved = [float(bytes_per_element * x.numel()) for x in views]
                rate = 1 / explain([[each] for each in moved], seconds)[0]
                found.setdefault(name, Figure(rate, _source(clock.device)))
    return found


def _timed_passes(
    clock: Clock, views: Sequence[Tensor], block: Block, transposed: bool
) -> list[tuple[str, int, list[float]]]:
    """Name, bytes per element and seconds for each view: search, cast, and cast by given scale."""
    names = [
        pass_name("amax", kind_of(block), transposed),
        pass_name("cast", kind_of(block), transposed),
        pass_name("cast", GIVEN, transposed),
    ]
    seconds = zip(*(clock(*_passes_over(x, block)) for x in views), strict=True)
    moved = (READ, READ + WRITE, READ + WRITE)
    return [(n, b, list(s)) for n, b, s in zip(names, moved, seconds, strict=True)]


def _passes_over(x: Tensor, block: Block) -> list[Thunk]:
    fmt = on_device(E4M3, x.device)
    scale = kernels.scale_from_amax(kernels.amax(x, block), fmt.max)
    return [
        lambda: kernels.amax(x, block),
        lambda: kernels.cast(x, scale, block, fmt.dtype, True),
        lambda: kernels.cast(x, scale, block, fmt.dtype, False),
    ]
