"""Fits a device's figures to measured times of GEMMs and of whole layers.

Every time is a sum of counted operations, each with its cost::

    seconds - launches - writes = flops * a + gemms * b + elements * c    for each kind of GEMM
                                  + bytes of the casts * d                of a layer

    peak * best = 1 / a,   half_size = b / a,   decode = c,   rate of the casts = 1 / d

so that all figures follow from one non-negative least-squares problem (times cannot be made of
negative costs), whichever benchmark the times are from. Errors count relative to the time itself.
``b`` is fitted only where GEMMs are small enough to determine it, ``c`` only where float8 is
emulated. Single GEMMs bounded by memory do not determine the compute rate and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cost_model.results import LINEAR, MATMUL, ResultFile, datasheet_of, read_result
from float8.config import RECIPES, LinearPlan
from float8.estimate.cast_passes import passes_of_layer
from float8.estimate.devices import (
    ANY_PASS,
    BF16,
    EXACT_ZERO,
    Device,
    Figure,
    GemmSpeed,
)
from float8.estimate.gemms import busy, gemm_bytes, gemm_sizes, kinds_of_plan, unoverlapped_bytes
from float8.estimate.shapes import Shape, Use

LARGE = 20  # times half_size: from here on a GEMM is within 5 % of its best
_TOLERANCE = 1e-10
FLOPS, GEMMS, ELEMENTS = "flops", "gemms", "elements"
CASTS = ("casts", "bytes")
Counts = Mapping[tuple[str, str], float]  # (kind of GEMM, what is counted) -> how many


@dataclass(frozen=True)
class Timed:
    """One measurement: what was counted, and the seconds without launches."""

    counts: Counts
    seconds: float


def timed_gemm(
    kind: str, rows: int, columns: int, contraction: int, seconds: float, device: Device
) -> Timed | None:
    """A single GEMM; None where memory bounds it, or it took no longer than a launch."""
    own = seconds - device.launch.value
    moving = gemm_bytes(kind, rows, columns, contraction) / device.bytes_per_second
    if moving >= 0.9 * own:
        return None
    own -= _writing_seconds(rows, columns, device)
    return Timed(_counts(kind, rows, columns, contraction, device), own) if own > 0 else None


def timed_layer(
    shape: Shape, plan: LinearPlan | None, seconds: float, device: Device
) -> Timed | None:
    """A training step of a layer; a plan of None is ``nn.Linear``. None as `timed_gemm`."""
    counts: dict[tuple[str, str], float] = defaultdict(float)
    use, launches, writing = Use(), 0.0, 0.0
    kinds = kinds_of_plan(plan, use)
    for name, sizes in gemm_sizes(shape, use).items():
        for key, count in _counts(kinds[name], *sizes, device).items():
            counts[key] += count
        launches += 1
        writing += _writing_seconds(*sizes[:2], device)
    if plan is not None:
        x, w, g, _ = passes_of_layer(plan, use, device.emulates, device.compiled_casts)
        sizes_of = ((shape.M * shape.K, x), (shape.N * shape.K, w), (shape.M * shape.N, g))
        for elements, passes in sizes_of:
            counts[CASTS] += elements * sum(each.bytes_per_element for each in passes)
            launches += len(passes)
    own = seconds - launches * device.launch.value - writing
    return Timed(counts, own) if own > 0 else None


def _writing_seconds(rows: int, columns: int, device: Device) -> float:
    """The time of writing a result after its last product."""
    return unoverlapped_bytes(rows * columns, device.tiled_processors) / device.bytes_per_second


def _counts(
    kind: str, rows: int, columns: int, contraction: int, device: Device
) -> dict[tuple[str, str], float]:
    part = busy(rows, columns, device.tiled_processors)
    return {
        (kind, FLOPS): 2 * rows * columns * contraction / part,
        (kind, GEMMS): 1,
        (kind, ELEMENTS): (rows + columns) * contraction,
    }


def fitted(timed: Iterable[Timed | None], device: Device, source: str) -> Device:
    """``device`` with the figures that these times determine; the others stay.

    Args:
        timed: GEMMs and layers; None is skipped.
        device: its peaks stay where it has them; fitted is the fraction of them that is reached.
        source: of the fitted figures; its first word is one of `SOURCES`.

    Raises:
        ValueError: nothing was timed.
    """
    used = [each for each in timed if each is not None]
    known = {} if device.emulates else device.products
    costs = _costs(used, known, device.emulates)
    products, passes = dict(device.products), dict(device.passes)
    for kind in [kind for (kind, what), cost in costs.items() if what == FLOPS and cost > 0]:
        products[kind] = _speed(kind, costs, known.get(kind), source)
    if costs.get(CASTS, 0) > 0:
        passes = {ANY_PASS: Figure(1 / costs[CASTS], source)}
    return replace(device, products=products, passes=passes)


def _costs(
    timed: Sequence[Timed], known: Mapping[str, GemmSpeed], emulates: bool
) -> dict[tuple[str, str], float]:
    """The cost of every counted operation, in seconds."""
    unknowns = _unknowns(timed, known, emulates)
    while True:
        counts = [
            [_count(each.counts, name, unknowns, known) for name in unknowns] for each in timed
        ]
        costs = dict(zip(unknowns, explain(counts, [each.seconds for each in timed]), strict=True))
        # With few or noisy times the operations of a kind may come out free: drop its other costs.
        free = {kind for (kind, what), cost in costs.items() if what == FLOPS and cost == 0}
        fewer = [name for name in unknowns if name[0] not in free or name[1] == FLOPS]
        if fewer == unknowns:
            return costs
        unknowns = fewer


def _unknowns(
    timed: Sequence[Timed], known: Mapping[str, GemmSpeed], emulates: bool
) -> list[tuple[str, str]]:
    """The unknowns: what was counted, without what the times cannot determine or need not."""
    seen = dict.fromkeys(name for each in timed for name in each.counts)
    return [
        (kind, what)
        for kind, what in seen
        if (what != GEMMS or _determines_half_size(timed, kind, known))
        and (what != ELEMENTS or (emulates and kind != BF16))
    ]


def _determines_half_size(
    timed: Sequence[Timed], kind: str, known: Mapping[str, GemmSpeed]
) -> bool:
    flops = {
        each.counts[kind, FLOPS] / each.counts[kind, GEMMS]
        for each in timed
        if each.counts.get((kind, GEMMS))
    }
    return len(flops) > 2 and (
        kind not in known or min(flops) < LARGE * known[kind].half_size.value
    )


def _count(
    counts: Counts, name: tuple[str, str], unknowns: Sequence[tuple[str, str]],
    known: Mapping[str, GemmSpeed],
) -> float:  # fmt: skip
    kind, what = name
    count = counts.get(name, 0)
    if what == FLOPS and (kind, GEMMS) not in unknowns and kind in known:
        count += counts.get((kind, GEMMS), 0) * known[kind].half_size.value
    return count


def _speed(
    kind: str, costs: Mapping[tuple[str, str], float], known: GemmSpeed | None, source: str
) -> GemmSpeed:
    rate = 1 / costs[kind, FLOPS]
    peak = known.peak if known else Figure(rate, source)
    best = Figure(rate / peak.value, source if known else "exact: the peak is what was reached")
    half = known.half_size if known else Figure(0.0, "assumed: the sizes timed do not determine it")
    if (kind, GEMMS) in costs:
        half = Figure(costs[kind, GEMMS] * rate, source)
    decode = costs.get((kind, ELEMENTS))
    return GemmSpeed(peak, best, half, EXACT_ZERO if decode is None else Figure(decode, source))


# --- result files


def fit(*files: str | Path, base: Device | None = None) -> Device:
    """A device whose figures are fitted to result files, such as those in ``benchmarks/results/``.

    Files of ``bench_matmul.py`` time GEMMs, files of ``bench_linear.py`` whole layers with their
    casts; both together separate the two best.

    Args:
        files: JSON files as the two benchmarks write them with ``-o``, all of one device.
        base: figures that the files lack (bandwidth, launch, GEMMs that were not timed); by
            default the datasheet row of the device that the files name.

    Returns:
        The fitted device; each fitted figure names its files.

    Raises:
        ValueError: a file of another benchmark, files of different devices, or a device that has
            no datasheet row and no ``base``.
    """
    results = [read_result(path) for path in files]
    if others := sorted({r.benchmark for r in results} - {MATMUL, LINEAR}):
        raise ValueError(f"fit needs files of {MATMUL} and {LINEAR}, not of {', '.join(others)}")
    hardware = sorted({result.hardware for result in results})
    if len(hardware) != 1:
        raise ValueError(f"fit needs files of one device, got {len(hardware)}: {hardware}")
    device = replace(base or base_of(results[0]), name=hardware[0])
    timed = [each for result in results for each in _timed(result, device)]
    return fitted(timed, device, f"fitted: {', '.join(result.file for result in results)}")


def _timed(result: ResultFile, device: Device) -> list[Timed | None]:
    if result.benchmark == MATMUL:
        return [
            timed_gemm(t.kind, t.shape.M, t.shape.N, t.shape.K, t.seconds, device)
            for t in result.gemms()
        ]
    assert result.benchmark == LINEAR
    layers = result.layers_on(device.emulates)
    timed = [timed_layer(t.shape, RECIPES[t.recipe].plan, t.seconds, device) for t in layers]
    plain = {(t.shape, t.mode): t.seconds / t.ratio for t in layers}
    return timed + [timed_layer(shape, None, s, device) for (shape, _), s in plain.items()]


def base_of(result: ResultFile) -> Device:
    """The datasheet row of a result's device; for a CPU a device with assumed figures.

    Raises:
        ValueError: there is no such row.
    """
    if result.on_cpu:
        return _cpu(result.hardware)
    if (device := datasheet_of(result.hardware)) is None:
        raise ValueError(
            f"there is no datasheet row for {result.hardware!r}; give the device (base=, --device)"
        )
    return device


def _cpu(name: str) -> Device:
    assumed = "assumed: so that memory never bounds a GEMM"
    full, nothing = Figure(1.0, "exact: of that"), Figure(0.0, "exact: of that")
    bound = GemmSpeed(Figure(1e12, assumed), full, nothing)
    launch = Figure(1e-5, "assumed: one call into torch")
    return Device(name, "cpu", Figure(1e12, assumed), full, launch, {BF16: bound})


# --- non-negative least squares


def explain(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The cost of each count that explains the times with the least relative error.

    ::

        seconds[i] ~ sum_j counts[i][j] * cost[j],   cost >= 0

    Args:
        counts: one row per time; of any magnitude, columns may be all zero.
        seconds: the times to explain, above 0. An error of 10 % counts alike for all of them.

    Returns:
        one cost per column; 0 where the times are better explained without it.
    """
    if not counts:
        raise ValueError("there is nothing to fit: no time was given")
    times = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(counts, dtype=torch.float64) / times.unsqueeze(1)
    sizes = matrix.amax(0)
    scaled = matrix / sizes.where(sizes > 0, 1.0)  # counts of 10^12 and of 1 then weigh alike
    costs = nonnegative(scaled, torch.ones(len(seconds), dtype=torch.float64))
    return [float(cost) for cost in costs / sizes.where(sizes > 0, 1.0)]


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """The x >= 0 of least ``|a @ x - b|``: a (rows, unknowns), b (rows,), float64.

    The active-set method of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23):
    unknowns enter one at a time, first the one along which the error falls fastest; those that a
    free solution would make negative leave at 0.
    """
    x = torch.zeros(a.shape[1], dtype=a.dtype)
    free = torch.zeros(a.shape[1], dtype=torch.bool)
    for _ in range(3 * a.shape[1] + 1):
        downhill = (a.t() @ (b - a @ x)).masked_fill(free, 0.0)
        if float(downhill.max()) <= _TOLERANCE:
            break
        free[int(downhill.argmax())] = True
        x = _settle(a, b, x, free)
    return x


def _settle(a: Tensor, b: Tensor, x: Tensor, free: Tensor) -> Tensor:
    """The best x in which only ``free`` unknowns differ from 0; negative ones leave."""
    while bool(free.any()):
        target = torch.zeros_like(x)
        target[free] = torch.linalg.lstsq(a[:, free], b.unsqueeze(1)).solution.squeeze(1)
        negative = free & (target <= 0)
        if not bool(negative.any()):
            return target
        step = (x[negative] / (x[negative] - target[negative])).min()
        x = x + step * (target - x)
        free &= x > _TOLERANCE
        x = x.where(free, 0.0)
    return x
