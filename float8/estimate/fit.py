"""Fit a device's figures to times, of products and of whole layers alike.

Every time is a sum of what was done, each thing counted and each with its cost::

    seconds - launches = flops * a + products * b + elements * c          for each kind of product
                         + bytes of the casts * d                         of a layer

    peak * best = 1 / a,   half_size = b / a,   decode = c,   rate of the casts = 1 / d

so that all figures follow from one non-negative least-squares problem, whichever benchmark the
times are from. Errors count relative to the time itself. Not everything is asked of every file:
``b`` only where products are small enough to tell, ``c`` only where float8 is emulated. Single
products that memory bounds say nothing about the multiplying units and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from float8.config import RECIPES, LinearPlan
from float8.estimate.casts import Use, passes_of_layer
from float8.estimate.devices import (
    ANY_PASS,
    BF16,
    EXACT_ZERO,
    Device,
    Figure,
    Product,
    datasheet_of,
)
from float8.estimate.least_squares import explain
from float8.estimate.results import LINEAR, MATMUL, Report, read_report
from float8.estimate.roofline import Shape, gemm_bytes, gemm_sizes, kinds_of_plan

LARGE = 20  # times half_size: from here on a product is within 5 % of its best
FLOPS, PRODUCTS, ELEMENTS = "flops", "products", "elements"
CASTS = ("casts", "bytes")
Counts = Mapping[tuple[str, str], float]  # (kind of product, what is counted) -> how many


@dataclass(frozen=True)
class Timed:
    """Something that was timed: what it did, and the seconds that it took without launches."""

    counts: Counts
    seconds: float


def timed_product(
    kind: str, rows: int, columns: int, contraction: int, seconds: float, device: Device
) -> Timed | None:
    """A single product; None where memory bounds it, or it took no longer than a launch."""
    own = seconds - device.launch.value
    moving = gemm_bytes(kind, rows, columns, contraction) / device.bytes_per_second
    if own <= 0 or moving >= 0.9 * own:
        return None
    return Timed(_counts(kind, rows, columns, contraction), own)


def timed_layer(
    shape: Shape, plan: LinearPlan | None, seconds: float, device: Device
) -> Timed | None:
    """A training step of a layer; a plan of None is ``nn.Linear``; None as `timed_product`."""
    counts: Counter[tuple[str, str]] = Counter()
    use, launches = Use(), 0.0
    kinds = kinds_of_plan(plan, use)
    for name, sizes in gemm_sizes(shape, use).items():
        counts.update(_counts(kinds[name], *sizes))
        launches += 1
    if plan is not None:
        x, w, g, _ = passes_of_layer(plan, use, device.emulates)
        sizes_of = ((shape.M * shape.K, x), (shape.N * shape.K, w), (shape.M * shape.N, g))
        for elements, passes in sizes_of:
            counts[CASTS] += elements * sum(each.bytes_per_element for each in passes)
            launches += len(passes)
    own = seconds - launches * device.launch.value
    return Timed(counts, own) if own > 0 else None


def _counts(kind: str, rows: int, columns: int, contraction: int) -> dict[tuple[str, str], int]:
    return {
        (kind, FLOPS): 2 * rows * columns * contraction,
        (kind, PRODUCTS): 1,
        (kind, ELEMENTS): (rows + columns) * contraction,
    }


def fitted(timed: Iterable[Timed | None], device: Device, source: str) -> Device:
    """``device`` with the figures that these times tell; the others stay.

    Args:
        timed: products and layers; None is skipped.
        device: its peaks stay where it has them: what is fitted is the fraction that is reached.
        source: of the fitted figures; its first word is one of `SOURCES`.

    Raises:
        ValueError: nothing was timed.
    """
    used = [each for each in timed if each is not None]
    known = {} if device.emulates else device.products
    costs = _costs(used, known, device.emulates)
    products, passes = dict(device.products), dict(device.passes)
    for kind in [kind for (kind, what), cost in costs.items() if what == FLOPS and cost > 0]:
        products[kind] = _product(kind, costs, known.get(kind), source)
    if costs.get(CASTS, 0) > 0:
        passes = {ANY_PASS: Figure(1 / costs[CASTS], source)}
    return replace(device, products=products, passes=passes)


def _costs(
    timed: Sequence[Timed], known: Mapping[str, Product], emulates: bool
) -> dict[tuple[str, str], float]:
    """What each thing that was counted costs, in seconds."""
    asked = _asked(timed, known, emulates)
    while True:
        counts = [[_count(each.counts, name, asked, known) for name in asked] for each in timed]
        costs = dict(zip(asked, explain(counts, [each.seconds for each in timed]), strict=True))
        # Operations that come out free, as in few or noisy times: then they are to explain all.
        free = {kind for (kind, what), cost in costs.items() if what == FLOPS and cost == 0}
        fewer = [name for name in asked if name[0] not in free or name[1] == FLOPS]
        if fewer == asked:
            return costs
        asked = fewer


def _asked(
    timed: Sequence[Timed], known: Mapping[str, Product], emulates: bool
) -> list[tuple[str, str]]:
    """The unknowns: what was counted, less what the times cannot tell or need not."""
    seen = dict.fromkeys(name for each in timed for name in each.counts)
    return [
        (kind, what)
        for kind, what in seen
        if (what != PRODUCTS or _tells_half_size(timed, kind, known))
        and (what != ELEMENTS or (emulates and kind != BF16))
    ]


def _tells_half_size(timed: Sequence[Timed], kind: str, known: Mapping[str, Product]) -> bool:
    flops = {
        each.counts[kind, FLOPS] / each.counts[kind, PRODUCTS]
        for each in timed
        if each.counts.get((kind, PRODUCTS))
    }
    return len(flops) > 2 and (
        kind not in known or min(flops) < LARGE * known[kind].half_size.value
    )


def _count(
    counts: Counts, name: tuple[str, str], asked: Sequence[tuple[str, str]],
    known: Mapping[str, Product],
) -> float:  # fmt: skip
    kind, what = name
    count = counts.get(name, 0)
    if what == FLOPS and (kind, PRODUCTS) not in asked and kind in known:
        count += counts.get((kind, PRODUCTS), 0) * known[kind].half_size.value
    return count


def _product(
    kind: str, costs: Mapping[tuple[str, str], float], known: Product | None, source: str
) -> Product:
    rate = 1 / costs[kind, FLOPS]
    peak = known.peak if known else Figure(rate, source)
    best = Figure(rate / peak.value, source if known else "exact: the peak is what was reached")
    half = known.half_size if known else Figure(0.0, "assumed: the sizes timed do not tell")
    if (kind, PRODUCTS) in costs:
        half = Figure(costs[kind, PRODUCTS] * rate, source)
    decode = costs.get((kind, ELEMENTS))
    return Product(peak, best, half, EXACT_ZERO if decode is None else Figure(decode, source))


def fit(*files: str | Path, base: Device | None = None) -> Device:
    """A device whose figures are fitted to result files, such as those in ``benchmarks/results/``.

    Files of ``bench_matmul.py`` tell products, files of ``bench_linear.py`` whole layers, casts
    included; both together tell the two apart best.

    Args:
        files: JSON files as the two benchmarks write them with ``-o``, all of one device.
        base: what the files do not say (bandwidth, launch, products that were not timed); by
            default the datasheet row of the device that the files name.

    Returns:
        The fitted device; each fitted figure names its files.

    Raises:
        ValueError: a file of another benchmark, files of different devices, or a device that has
            no datasheet row and no ``base``.
    """
    reports = [read_report(path) for path in files]
    hardware = sorted({report.hardware for report in reports})
    if len(hardware) != 1:
        raise ValueError(f"fit needs files of one device, got {len(hardware)}: {hardware}")
    device = replace(base or base_of(reports[0]), name=hardware[0])
    timed = [each for report in reports for each in _timed(report, device)]
    return fitted(timed, device, f"fitted: {', '.join(report.file for report in reports)}")


def _timed(report: Report, device: Device) -> list[Timed | None]:
    if report.benchmark == MATMUL:
        return [
            timed_product(t.kind, t.shape.M, t.shape.N, t.shape.K, t.seconds, device)
            for t in report.products()
        ]
    assert report.benchmark == LINEAR
    layers = report.layers_on(device.emulates)
    timed = [timed_layer(t.shape, RECIPES[t.recipe].plan, t.seconds, device) for t in layers]
    plain = {(t.shape, t.mode): t.seconds / t.ratio for t in layers}
    return timed + [timed_layer(shape, None, s, device) for (shape, _), s in plain.items()]


def base_of(report: Report) -> Device:
    """The datasheet row of a report's device; for a CPU one of which nothing is known.

    Raises:
        ValueError: there is no such row.
    """
    if report.on_cpu:
        return _cpu(report.hardware)
    if (device := datasheet_of(report.hardware)) is None:
        raise ValueError(
            f"there is no datasheet row for {report.hardware!r}; give the device (base=, --device)"
        )
    return device


def _cpu(name: str) -> Device:
    assumed = "assumed: so that memory never bounds a product"
    full, nothing = Figure(1.0, "exact: of that"), Figure(0.0, "exact: of that")
    bound = Product(Figure(1e12, assumed), full, nothing)
    launch = Figure(1e-5, "assumed: one call into torch")
    return Device(name, "cpu", Figure(1e12, assumed), full, launch, {BF16: bound})
