"""What a device can do, figure by figure, and where each figure comes from.

The time of a product of F floating-point operations follows from three numbers (`Product`)::

    efficiency(F) = best * F / (F + half_size)              a fraction of the peak
    seconds(F)    = F / (peak * efficiency(F)) = (F + half_size) / (peak * best)

``best`` is the fraction of the peak that very large products reach, and ``half_size`` the number of
operations at which half of that is reached: filling and draining the pipeline costs as much time as
``half_size`` operations (Hockney and Jesshope, "Parallel Computers 2", 1988, section 1.3.2, there
r_inf and n_1/2). Where float8 is emulated, decoding costs ``decode`` seconds per operand element.

Every number is a `Figure`: a value and its source, which starts with one word that says how far to
trust it: ``datasheet``, ``measured``, ``fitted`` (to a committed result file), ``assumed``, or
``exact``. Nothing here has been measured on a GPU yet: the rows of `DEVICES` are datasheet peaks
under assumed efficiencies, and whatever prints a prediction prints that beside it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from float8.kernels.scaled_mm import BLOCKWISE, ROWWISE, TENSORWISE

BF16 = "bf16"
FLOAT8 = (TENSORWISE, ROWWISE, BLOCKWISE)
ANY_PASS = "any"
SOURCES = ("datasheet", "measured", "fitted", "assumed", "exact")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from; ``source`` starts with a word of `SOURCES`.

    Raises:
        ValueError: a source of no known kind, or a value that is negative or not finite.
    """

    value: float
    source: str

    def __post_init__(self) -> None:
        if self.kind not in SOURCES:
            raise ValueError(
                f"source {self.source!r} must start with one of {', '.join(SOURCES)} and a colon"
            )
        if not 0 <= self.value <= sys.float_info.max:  # an int from a file may be larger
            raise ValueError(f"a figure must be finite and >= 0, got {self.value} ({self.source})")

    @property
    def kind(self) -> str:
        """How far to trust it: the first word of the source."""
        return self.source.partition(":")[0]


EXACT_ZERO = Figure(0.0, "exact: tensor cores read the codes themselves")


@dataclass(frozen=True)
class Product:
    """How fast a device runs one kind of product.

    Args:
        peak: operations per second (a multiplication and an addition are two).
        best: the fraction of the peak that very large products reach.
        half_size: the operations at which half of that is reached.
        decode: seconds per operand element on top, where float8 is emulated.
    """

    peak: Figure
    best: Figure
    half_size: Figure
    decode: Figure = EXACT_ZERO

    def __post_init__(self) -> None:
        if self.peak.value == 0 or self.best.value == 0:
            raise ValueError("a product needs a peak and a best efficiency above 0")

    def efficiency(self, flops: float) -> float:
        """The fraction of the peak that a product of this many operations reaches."""
        return self.best.value * flops / (flops + self.half_size.value)

    def seconds(self, flops: float, operand_elements: float) -> float:
        """Time in the multiplying units (and decoders), were memory infinitely fast."""
        work = (flops + self.half_size.value) / (self.peak.value * self.best.value)
        return work + self.decode.value * operand_elements


@dataclass(frozen=True)
class Device:
    """What the cost model knows of a device; see the top of this file.

    Args:
        name: for the table.
        arch: as `float8.kernels.scaled_mm.SUPPORT` names it; ``"cpu"`` where float8 is emulated.
        bandwidth: bytes per second between chip and memory.
        bandwidth_best: the fraction of it that a large copy reaches.
        launch: seconds that every kernel costs beside its work.
        products: kind of product (`BF16`, or one of `FLOAT8`) -> its speed.
        passes: kind of pass (`float8.estimate.casts.Pass.name`, or `ANY_PASS`) -> bytes per second.
            A pass that is not listed runs at the bandwidth, as a fused kernel on a GPU does.
    """

    name: str
    arch: str
    bandwidth: Figure
    bandwidth_best: Figure
    launch: Figure
    products: Mapping[str, Product]
    passes: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if BF16 not in self.products:
            raise ValueError(f"{self.name}: products lacks {BF16!r}, which all else compares with")
        if unknown := set(self.products) - {BF16, *FLOAT8}:
            raise ValueError(
                f"{self.name}: unknown products {sorted(unknown)}; known: {', '.join(FLOAT8)}"
            )
        rates = {"bandwidth": self.bandwidth, "bandwidth_best": self.bandwidth_best, **self.passes}
        if zero := [name for name, figure in rates.items() if figure.value == 0]:
            raise ValueError(f"{self.name}: {', '.join(zero)} must be above 0")

    @property
    def emulates(self) -> bool:
        """Whether float8 runs in plain PyTorch here."""
        return self.arch == "cpu"

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth that a large copy reaches."""
        return self.bandwidth.value * self.bandwidth_best.value

    def pass_seconds(self, name: str, moved: float) -> float:
        """Time of one pass over memory that moves this many bytes."""
        rate = self.passes.get(name) or self.passes.get(ANY_PASS)
        return moved / (rate.value if rate else self.bytes_per_second) + self.launch.value

    def figures(self) -> dict[str, Figure]:
        """Every figure under a readable name, such as ``bf16 peak`` or ``launch``."""
        own = {f: getattr(self, f) for f in ("bandwidth", "bandwidth_best", "launch")}
        for kind, product in self.products.items():
            for part in dataclasses.fields(product):
                own[f"{kind} {part.name}"] = getattr(product, part.name)
        return own | dict(self.passes)

    def provenance(self) -> list[str]:
        """One line per source: what comes from it."""
        by_source: dict[str, list[str]] = {}
        for name, figure in self.figures().items():
            if figure.kind != "exact":
                by_source.setdefault(figure.source, []).append(name)
        ranked = sorted(by_source, key=lambda source: SOURCES.index(source.partition(":")[0]))
        return [f"{source}: {_shortened(by_source[source])}" for source in ranked]

    def save(self, path: str | Path) -> None:
        """Write the device as JSON, sources included; `load` reads it.

        The directory is made where it is missing.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """The device that `save` wrote.

        Raises:
            ValueError: the file is not such a file; the message says what is wrong with it.
        """
        try:
            return _from_fields(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a device as Device.save writes it "
                f"({type(error).__name__}: {error}); make one with --device measured --save"
            ) from error


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])}, {len(names) - 5} more"


def _from_fields(fields: dict[str, Any]) -> Device:
    products = {
        kind: Product(**{part: Figure(**figure) for part, figure in parts.items()})
        for kind, parts in fields["products"].items()
    }
    passes = {name: Figure(**figure) for name, figure in fields["passes"].items()}
    bandwidth, best, launch = (
        Figure(**fields[key]) for key in ("bandwidth", "bandwidth_best", "launch")
    )
    name, arch = str(fields["name"]), str(fields["arch"])
    return Device(name, arch, bandwidth, best, launch, products, passes)


# What is assumed of every GPU until `benchmarks/results/` holds a file to fit. The first three
# figures are those of torchao's cost model (torchao/testing/training/roofline_utils.py), found on
# H100s there and carried over to the others, there as here; the fourth is a guess of ours. That
# every float8 granularity runs alike flatters blockwise products, which scale as they accumulate.
BEST = Figure(0.78, "assumed: as torchao's roofline_utils.py has it")
BANDWIDTH_BEST = Figure(0.92, BEST.source)
LAUNCH = Figure(2e-6, BEST.source)
RAMP_S = 5e-6  # seconds to fill and drain, the same in every precision; half_size follows


def _gpu(name: str, arch: str, bf16: float, float8: float, terabytes: float, sheet: str) -> Device:
    """A row of `DEVICES`: dense peaks in 10^12 operations per second, bandwidth in 10^12 bytes."""

    def product(tera: float) -> Product:
        half_size = tera * 1e12 * BEST.value * RAMP_S
        ramp = Figure(half_size, f"assumed: {RAMP_S * 1e6:g} us to fill and drain")
        return Product(Figure(tera * 1e12, sheet), BEST, ramp)

    products = {BF16: product(bf16)} | {kind: product(float8) for kind in FLOAT8}
    return Device(name, arch, Figure(terabytes * 1e12, sheet), BANDWIDTH_BEST, LAUNCH, products)


# Dense peaks: half of what NVIDIA's sheets print "with sparsity"; AMD's sheet prints both.
DEVICES: dict[str, Device] = {
    "H100": _gpu("H100 SXM", "sm_90", 989.4, 1978.9, 3.35, "datasheet: NVIDIA H100 (SXM)"),
    "H200": _gpu("H200 SXM", "sm_90", 989.4, 1978.9, 4.8, "datasheet: NVIDIA H200 (SXM)"),
    "B200": _gpu("B200", "sm_100", 2250, 4500, 8.0, "datasheet: NVIDIA Blackwell (HGX B200)"),
    "MI300X": _gpu("MI300X", "gfx94", 1307.4, 2614.9, 5.3, "datasheet: AMD Instinct MI300X"),
}


def datasheet_of(hardware: str) -> Device | None:
    """The row of `DEVICES` for a name such as ``NVIDIA H100 80GB HBM3``, or None.

    PCIe and NVL boards are other devices with the same chip: their peaks are not in the table.
    """
    if re.search(r"\b(PCIe|NVL)\b", hardware):
        return None
    names = [name for name in DEVICES if re.search(rf"\b{name}\b", hardware)]
    return DEVICES[names[0]] if names else None
