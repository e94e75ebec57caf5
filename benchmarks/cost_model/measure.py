"""Measures the figures of this machine, in less than a minute.

Timed are the three GEMMs of a linear layer in bfloat16 and under each scale granularity, at sizes
from small to large, and a copy of memory. Where float8 is emulated, every amax and cast pass is
timed too, because an emulated cast takes far longer than moving its bytes. On a GPU casts are
assumed to run at the bandwidth of a copy, as fused kernels do.

Candidates take turns, A B C A B C, and the fastest round of each counts: other load on the machine
only adds time. `check.py` says how accurate predictions from these figures are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.cost_model.fit import Timed, explain, fitted, timed_gemm
from benchmarks.cost_model.results import datasheet_of
from benchmarks.measuring.harness import Timer, timer_for
from float8 import kernels
from float8.config import RECIPES
from float8.estimate.cast_passes import GIVEN, READ, WRITE, kind_of_block, pass_name
from float8.estimate.devices import (
    BF16,
    FLOAT8,
    ROWWISE_BY_CUTLASS,
    Device,
    Figure,
    GemmSpeed,
)
from float8.formats import E4M3, ScaleFormat, on_device
from float8.granularity import WHOLE, Block
from float8.kernels.scaled_mm import MX, architecture, refuses_device, scaled_mm
from float8.linear.scaling import bind_and_cast

Size = tuple[int, int, int]
Candidate = Callable[[], object]
# (M, K, N): small ones for half_size, large ones for the best efficiency.
CPU_SIZES = ((128, 256, 256), (256, 512, 512), (512, 512, 1024), (512, 1024, 1024))
CUDA_SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
CAST_SIZES = ((512, 1024), (2048, 1024), (2048, 2048))
BLOCKS: tuple[Block, ...] = ((WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128), (1, 32))
RECIPE_OF = {kind: kind for kind in FLOAT8} | {MX: "mxfp8"}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
SAMPLE_S = 0.005  # a sample is as many calls as fill this, to exceed the clock's resolution
GROUP_S = 1.0  # a group of candidates stops after this, and two rounds


@dataclass(frozen=True)
class Clock:
    """Seconds per call of candidates that take turns on one device."""

    device: torch.device
    rounds: int

    def __call__(self, *candidates: Candidate) -> list[float]:
        """The fastest of some rounds, for each candidate; a call of each warms up."""
        timer = timer_for(str(self.device))
        calls = [self._calls(timer, candidate) for candidate in candidates]
        samples: list[list[float]] = []
        begin = time.perf_counter()
        while len(samples) < self.rounds:
            pairs = zip(candidates, calls, strict=True)
            samples.append([timer(candidate, count) / count for candidate, count in pairs])
            if len(samples) >= 2 and time.perf_counter() - begin > GROUP_S:
                break
        return [min(own) for own in zip(*samples, strict=True)]

    def _calls(self, timer: Timer, candidate: Candidate) -> int:
        candidate()
        return max(1, min(1000, int(SAMPLE_S / max(timer(candidate, 1), 1e-7))))


def measure(
    device: str | torch.device | None = None,
    *,
    sizes: Sequence[Size] | None = None,
    rounds: int = 7,
) -> Device:
    """Measure this machine as a `Device`.

    Args:
        device: ``"cuda"`` or ``"cpu"``; by default the GPU if there is one.
        sizes: (M, K, N) of the layers whose GEMMs are timed; at least three, of different size.
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
        timed = _timed_gemms(bare, clock, sizes)
        passes = _passes(clock) if bare.emulates else {}
    return fitted(timed, replace(bare, passes=passes), _source(where))


def _source(where: torch.device) -> str:
    return f"measured: here, {where.type}, torch {torch.__version__}"


def _bare(where: torch.device, clock: Clock) -> Device:
    """The device without its GEMMs: the bandwidth of a copy, and the time of a launch."""
    source, one = _source(where), torch.zeros(1, device=where)
    memory = torch.zeros(COPY_BYTES[where.type], dtype=torch.uint8, device=where)
    target = torch.empty_like(memory)
    (copy_s,), (launch_s,) = clock(lambda: target.copy_(memory)), clock(lambda: one.add_(1))
    on_cuda = where.type == "cuda"
    name = torch.cuda.get_device_name(where) if on_cuda else "this CPU"
    arch = architecture(where.index) if on_cuda else "cpu"
    full, bandwidth = Figure(1.0, "exact: of a copy"), Figure(2 * memory.numel() / copy_s, source)
    sheet = datasheet_of(name)
    unset = GemmSpeed(Figure(1.0, source), full, Figure(0.0, source))
    known = dict(sheet.products) if sheet else {BF16: unset}
    known.pop(ROWWISE_BY_CUTLASS, None)  # whatever runs here is timed as rowwise
    processors = None
    if on_cuda:
        count = torch.cuda.get_device_properties(where).multi_processor_count
        processors = Figure(count, f"exact: multiprocessors of {name}")
    launch = Figure(launch_s, source)
    return Device(name, arch, bandwidth, full, launch, known, processors=processors)


def _timed_gemms(device: Device, clock: Clock, sizes: Sequence[Size]) -> list[Timed | None]:
    """Every kind of GEMM that the device runs, at every size."""
    timed: list[Timed | None] = []
    for size in sizes:
        for gemm_name, a, b in _operands(size, clock.device):
            calls = {kind: _call(kind, gemm_name, device, a, b) for kind in (BF16, *FLOAT8)}
            able = {kind: call for kind, call in calls.items() if call is not None}
            shape = (a.shape[0], b.shape[0], a.shape[1])
            for kind, seconds in zip(able, clock(*able.values()), strict=True):
                timed.append(timed_gemm(kind, *shape, seconds, device))
    return timed


def _operands(size: Size, where: torch.device) -> list[tuple[str, Tensor, Tensor]]:
    """The three GEMMs of a layer: name, ``a`` and ``b`` of ``a @ b.T``."""
    M, K, N = size
    x, w, g = (
        torch.randn(rows, columns, device=where, dtype=torch.bfloat16)
        for rows, columns in ((M, K), (N, K), (M, N))
    )
    return [("output", x, w), ("grad_input", g, w.t()), ("grad_weight", g.t(), x.t())]


def _call(kind: str, gemm_name: str, device: Device, a: Tensor, b: Tensor) -> Candidate | None:
    """The GEMM, with operands cast as by the recipe of the kind; None if refused."""
    if kind == BF16:
        return lambda: a @ b.t()
    gemm = getattr(RECIPES[RECIPE_OF[kind]].plan, gemm_name)
    blocks = (gemm.a.block, gemm.b.block)
    if not device.emulates and refuses_device(device.arch, *blocks, torch.bfloat16):
        return None
    (a8, a_scale), (b8, b_scale) = bind_and_cast(a, gemm.a), bind_and_cast(b, gemm.b)
    if not device.emulates:  # as fused casts write them; the reference reads views
        a8, b8 = a8.contiguous(), b8.contiguous()
    return lambda: scaled_mm(
        a8, a_scale, b8, b_scale, *blocks,
        out_dtype=torch.bfloat16, use_fast_accum=gemm.use_fast_accum,
    )  # fmt: skip


def _passes(clock: Clock) -> dict[str, Figure]:
    """The rate of every pass of the reference, in the bytes that `MemoryPass` counts."""
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
    """Name, bytes per element and seconds per view: amax, cast, and cast with a given scale."""
    names = [
        pass_name("amax", kind_of_block(block), transposed),
        pass_name("cast", kind_of_block(block), transposed),
        pass_name("cast", GIVEN, transposed),
    ]
    seconds = zip(*(clock(*_passes_over(x, block)) for x in views), strict=True)
    moved = (READ, READ + WRITE, READ + WRITE)
    return [(n, b, list(s)) for n, b, s in zip(names, moved, seconds, strict=True)]


def _passes_over(x: Tensor, block: Block) -> list[Candidate]:
    fmt = on_device(E4M3, x.device)
    scale_format = ScaleFormat.E8M0 if block == (1, 32) else ScaleFormat.FLOAT32
    scale = kernels.scale_from_amax(kernels.amax(x, block), fmt.max, scale_format.value)
    return [
        lambda: kernels.amax(x, block),
        lambda: kernels.cast(x, scale, block, fmt.dtype, True),
        lambda: kernels.cast(x, scale, block, fmt.dtype, False),
    ]
