"""What a device can do: the figures of the cost model, each with its source; finding a device.

The time of a GEMM of F floating-point operations follows from three numbers (`GemmSpeed`)::

    efficiency(F) = best * F / (F + half_size)              a fraction of the peak
    seconds(F)    = F / (peak * efficiency(F)) = (F + half_size) / (peak * best)

``best`` is the fraction of the peak that very large GEMMs reach, ``half_size`` the number of
operations at which half of that is reached: filling and draining the pipeline costs as much time as
``half_size`` operations (Hockney and Jesshope, "Parallel Computers 2", 1988, section 1.3.2, there
r_inf and n_1/2). Where float8 is emulated, dequantising costs ``decode`` seconds per operand
element.

Every number is a `Figure`: a value and its source. The source starts with one word that says how
reliable it is: ``datasheet``, ``measured``, ``fitted`` (to a result file), ``assumed``, or
``exact``. No row of `DEVICES` has been measured: all are datasheet peaks under assumed
efficiencies, and every printed prediction says so.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from float8.kernels.scaled_mm import BLOCKWISE, MX, ROWWISE, SUPPORT, TENSORWISE

BF16 = "bf16"
FLOAT8 = (TENSORWISE, ROWWISE, BLOCKWISE, MX)
ANY_PASS = "any"
SOURCES = ("datasheet", "measured", "fitted", "assumed", "exact")
MEASURE = "python benchmarks/measure_device.py --save FILE"


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from.

    Args:
        value: the number, at least 0.
        source: starts with one word that says how reliable the number is: ``datasheet``,
            ``measured``, ``fitted`` (to a result file), ``assumed`` or ``exact``; then a colon and
            what the source is.

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
        """How reliable it is: the first word of the source."""
        return self.source.partition(":")[0]


EXACT_ZERO = Figure(0.0, "exact: tensor cores multiply float8 directly")


@dataclass(frozen=True)
class GemmSpeed:
    """How fast a device runs one kind of GEMM.

    A GEMM of F operations takes ``(F + half_size) / (peak * best)`` seconds (Hockney and Jesshope,
    "Parallel Computers 2", 1988, section 1.3.2).

    Args:
        peak: operations per second (a multiplication and an addition are two).
        best: the fraction of the peak that very large GEMMs reach.
        half_size: the operations at which half of that is reached.
        decode: seconds per operand element on top, where float8 is emulated.
    """

    peak: Figure
    best: Figure
    half_size: Figure
    decode: Figure = EXACT_ZERO

    def __post_init__(self) -> None:
        if self.peak.value == 0 or self.best.value == 0:
            raise ValueError("a GEMM needs a peak and a best efficiency above 0")

    def seconds(self, flops: float, operand_elements: float) -> float:
        """Time of computing, dequantising included, as if memory were infinitely fast."""
        work = (flops + self.half_size.value) / (self.peak.value * self.best.value)
        return work + self.decode.value * operand_elements


Product = GemmSpeed  # its name up to version 0.7, which pickles contain


@dataclass(frozen=True)
class Device:
    """The figures of one device, each with its source.

    Args:
        name: as the table shows it.
        arch: such as ``"sm_90"`` or ``"gfx94"``; ``"cpu"`` where float8 is emulated.
        bandwidth: bytes per second between chip and memory.
        bandwidth_best: the fraction of it that a large copy reaches.
        launch: seconds that every kernel costs in addition to its work.
        products: kind of GEMM ("bf16", "tensorwise", "rowwise", "blockwise" or "mx") -> its speed.
        passes: name of a pass over memory, or "any" -> bytes per second.
            A pass that is not listed runs at the bandwidth, as a fused kernel on a GPU does.
    """

    name: str
    arch: str
    bandwidth: Figure
    bandwidth_best: Figure
    launch: Figure
    products: Mapping[str, GemmSpeed]
    passes: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if BF16 not in self.products:
            raise ValueError(
                f"{self.name}: products lacks {BF16!r}, the baseline of every comparison"
            )
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
        """One line per source, with the figures that come from it."""
        by_source: dict[str, list[str]] = {}
        for name, figure in self.figures().items():
            if figure.kind != "exact":
                by_source.setdefault(figure.source, []).append(name)
        ranked = sorted(by_source, key=lambda source: SOURCES.index(source.partition(":")[0]))
        return [f"{source}: {_shortened(by_source[source])}" for source in ranked]

    def save(self, path: str | Path) -> None:
        """Write the device as JSON, sources included; `load` reads it.

        Args:
            path: of the file; directories that are missing are made.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """The device that `save` wrote.

        Args:
            path: of the file.

        Raises:
            ValueError: the file is not such a file; the message says what is wrong with it.
        """
        try:
            return _from_fields(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a device as Device.save writes it "
                f"({type(error).__name__}: {error}); {MEASURE} writes one"
            ) from error


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])}, {len(names) - 5} more"


def _from_fields(fields: dict[str, Any]) -> Device:
    products = {
        kind: GemmSpeed(**{part: Figure(**figure) for part, figure in parts.items()})
        for kind, parts in fields["products"].items()
    }
    passes = {name: Figure(**figure) for name, figure in fields["passes"].items()}
    bandwidth, best, launch = (
        Figure(**fields[key]) for key in ("bandwidth", "bandwidth_best", "launch")
    )
    name, arch = str(fields["name"]), str(fields["arch"])
    return Device(name, arch, bandwidth, best, launch, products, passes)


# Assumptions for every GPU until `benchmarks/results/` holds a file to fit. The first three figures
# are those of torchao's cost model (torchao/testing/training/roofline_utils.py), measured there on
# H100s, and on a B300 for its row; the fourth is a guess. All float8 granularities are assumed to
# be equally fast, which is optimistic for blockwise GEMMs: they scale while they accumulate. On a
# B200 torchao's mxfp8 grouped GEMMs reach 0.75 and 0.57 of the peak, its casts 0.72 to 0.83 of the
# bandwidth (torchao/prototype/moe_training/README.md, "MXFP8 Kernel Breakdown by Pass").
ROOFLINE_UTILS = "assumed: as torchao's roofline_utils.py has it"
BEST = Figure(0.78, ROOFLINE_UTILS)
BANDWIDTH_BEST = Figure(0.92, ROOFLINE_UTILS)
LAUNCH = Figure(2e-6, ROOFLINE_UTILS)
RAMP_S = 5e-6  # seconds to fill and drain, the same in every precision; half_size follows


def _gpu(
    name: str,
    arch: str,
    bf16: float,
    float8: float,
    terabytes: float,
    sheet: str,
    best: Figure = BEST,
    bandwidth_best: Figure = BANDWIDTH_BEST,
) -> Device:
    """A row of `DEVICES`: dense peaks in 10^12 operations per second, bandwidth in 10^12 bytes."""

    def speed(tera: float) -> GemmSpeed:
        half_size = tera * 1e12 * best.value * RAMP_S
        ramp = Figure(half_size, f"assumed: {RAMP_S * 1e6:g} us to fill and drain")
        return GemmSpeed(Figure(tera * 1e12, sheet), best, ramp)

    kinds = [kind for kind in FLOAT8 if kind != MX or SUPPORT[arch][MX] is None]
    products = {BF16: speed(bf16)} | {kind: speed(float8) for kind in kinds}
    return Device(name, arch, Figure(terabytes * 1e12, sheet), bandwidth_best, LAUNCH, products)


# Dense peaks: half of what NVIDIA's sheets print "with sparsity"; AMD's sheet prints both. NVIDIA
# prints HGX B200's bandwidth for eight GPUs, 62 TB/s.
DEVICES: dict[str, Device] = {
    "H100": _gpu("H100 SXM", "sm_90", 989.4, 1978.9, 3.35, "datasheet: NVIDIA H100 (SXM)"),
    "H200": _gpu("H200 SXM", "sm_90", 989.4, 1978.9, 4.8, "datasheet: NVIDIA H200 (SXM)"),
    "B200": _gpu("B200", "sm_100", 2250, 4500, 7.7, "datasheet: NVIDIA Blackwell (HGX B200)"),
    "B300": _gpu(
        "B300", "sm_103", 2250, 4500, 8.0, "datasheet: NVIDIA Blackwell Ultra (HGX B300)",
        Figure(0.82, ROOFLINE_UTILS), Figure(0.84, ROOFLINE_UTILS),
    ),
    "MI300X": _gpu("MI300X", "gfx94", 1307.4, 2614.9, 5.3, "datasheet: AMD Instinct MI300X"),
}  # fmt: skip
"""Devices by name: peaks from datasheets, efficiencies assumed; none has been measured."""


def find_device(device: str | Path | Device) -> Device:
    """The `Device` that a user means.

    Args:
        device: a `Device`; a name of `DEVICES`, in any case; or the path of a file that
            `Device.save` wrote.

    Raises:
        TypeError: neither a name, nor a path, nor a `Device`.
        ValueError: an unknown name, listing the known ones, or a file that is no device.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, (str, Path)):
        raise TypeError(
            f"device={device!r} is a {type(device).__name__}; needed is the name of a device to "
            f"predict for ({', '.join(DEVICES)}), the path of a file that Device.save wrote, or a "
            "float8.estimate.Device"
        )
    name = str(device)
    if name.upper() in DEVICES:
        return DEVICES[name.upper()]
    if _is_file(name):
        return Device.load(name)
    raise ValueError(
        f"unknown device {name!r}; known: {', '.join(DEVICES)}, or the path of a JSON file that "
        f"Device.save wrote; {MEASURE} writes one of this machine. NVIDIA GPUs older than Ada and "
        "Hopper, such as A100, have no float8 tensor cores"
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # such as a name that is too long
        return False
