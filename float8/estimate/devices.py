"""What a device can do: the figures of the cost model, each with its source; finding a device.

The time of a GEMM of F floating-point operations follows from three numbers (`GemmSpeed`)::

    efficiency(F) = best * F / (F + half_size)              a fraction of the peak
    seconds(F)    = F / (peak * efficiency(F)) = (F + half_size) / (peak * best)

``best`` is the fraction of the peak that very large GEMMs reach, at the clock that the board's
power limit leaves them. ``half_size`` is the number of operations at which half of that is reached:
filling and draining the pipeline costs as much time as ``half_size`` operations (Hockney and
Jesshope, "Parallel Computers 2", 1988, section 1.3.2, there r_inf and n_1/2).

Every number is a `Figure`: a value and its source. The source starts with one word that says how
reliable it is: ``datasheet``, ``measured``, ``fitted`` (to a result file), ``published`` (measured
by others), ``predicted`` (from a kernel's machine code), ``assumed``, or ``exact``. No row of
`DEVICES` has been measured by this project: all are datasheet peaks under efficiencies that others
published and cast rates that are predicted, and every printed prediction says so.

Rowwise GEMMs have two rows: ``rowwise`` is what torch built with CUDA 12.9 or later runs (cuBLASLt
on Hopper), ``rowwise by CUTLASS`` what older ones run; `Device.with_cutlass` takes the latter.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from float8.kernels.scaled_mm import BLOCKWISE, MX, ROWWISE, SUPPORT, TENSORWISE

BF16 = "bf16"
FLOAT8 = (TENSORWISE, ROWWISE, BLOCKWISE, MX)
ROWWISE_BY_CUTLASS = "rowwise by CUTLASS"
ANY_PASS = "any"
SOURCES = ("datasheet", "measured", "fitted", "published", "predicted", "assumed", "exact")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from.

    Args:
        value: the number, at least 0.
        source: starts with one word that says how reliable the number is: ``datasheet``,
            ``measured``, ``fitted`` (to a result file), ``published`` (measured by others),
            ``predicted`` (from machine code), ``assumed`` or ``exact``; then a colon and what the
            source is.
    """

    value: float
    source: str

    @property
    def kind(self) -> str:
        """How reliable it is: the first word of the source."""
        return self.source.partition(":")[0]


class MemoryPass(NamedTuple):
    """One pass over an operand's memory: its name, and the bytes it moves per element."""

    name: str
    bytes_per_element: float


@dataclass(frozen=True)
class GemmSpeed:
    """How fast a device runs one kind of GEMM.

    A GEMM of F operations takes ``(F + half_size) / (peak * best)`` seconds (Hockney and Jesshope,
    "Parallel Computers 2", 1988, section 1.3.2).

    Args:
        peak: operations per second (a multiplication and an addition are two).
        best: the fraction of the peak that very large GEMMs reach.
        half_size: the operations at which half of that is reached.
    """

    peak: Figure
    best: Figure
    half_size: Figure

    def seconds(self, flops: float) -> float:
        """Time of computing, as if memory were infinitely fast."""
        return (flops + self.half_size.value) / (self.peak.value * self.best.value)


@dataclass(frozen=True)
class Device:
    """The figures of one device, each with its source.

    Args:
        name: as the table shows it.
        arch: such as ``"sm_90"`` or ``"gfx94"``.
        bandwidth: bytes per second between chip and memory.
        bandwidth_best: the fraction of it that a large copy reaches.
        launch: seconds that every kernel costs in addition to its work.
        processors: that each compute one tile of a GEMM's result at a time.
        products: kind of GEMM ("bf16", "tensorwise", "rowwise", "blockwise" or "mx") -> its speed.
        passes: name of a pass over memory, or "any" -> bytes per second. A pass that is not listed
            runs at the bandwidth, as a fused kernel does.
    """

    name: str
    arch: str
    bandwidth: Figure
    bandwidth_best: Figure
    launch: Figure
    processors: Figure
    products: Mapping[str, GemmSpeed]
    passes: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth that a large copy reaches."""
        return self.bandwidth.value * self.bandwidth_best.value

    def with_cutlass(self) -> Device:
        """The device with rowwise GEMMs by CUTLASS, as torch runs them with cuBLAS before 12.9."""
        rowwise = {ROWWISE: self.products[ROWWISE_BY_CUTLASS]}
        return dataclasses.replace(self, products={**self.products, **rowwise})

    def seconds_of(self, passes: Iterable[MemoryPass], elements: int) -> float:
        """Time of passes over the memory of an operand with so many elements."""
        return sum(self.pass_seconds(name, moved * elements) for name, moved in passes)

    def pass_seconds(self, name: str, moved: float) -> float:
        """Time of one pass over memory that moves this many bytes."""
        rate = self.passes.get(name) or self.passes.get(ANY_PASS)
        return moved / (rate.value if rate else self.bytes_per_second) + self.launch.value

    def figures(self) -> dict[str, Figure]:
        """Every figure under a readable name, such as ``bf16 peak`` or ``launch``."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Figure)}
        for kind, product in self.products.items():
            own |= {f"{kind} {part}": figure for part, figure in vars(product).items()}
        return own | dict(self.passes)

    def provenance(self) -> list[str]:
        """One line per source, with the figures that come from it."""
        by_source: dict[str, list[str]] = {}
        for name, figure in self.figures().items():
            if figure.kind != "exact":
                by_source.setdefault(figure.source, []).append(name)
        ranked = sorted(by_source, key=lambda source: SOURCES.index(source.partition(":")[0]))
        return [f"{source}: {', '.join(by_source[source])}" for source in ranked]

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
        """
        device: Device = cls(**json.loads(Path(path).read_text(), object_hook=_from_json))
        return device


def _from_json(fields: dict[str, Any]) -> Any:
    """Figures and speeds of their fields; the device, and its mappings, stay as they are."""
    if fields.keys() == {"value", "source"}:
        return Figure(**fields)
    return GemmSpeed(**fields) if "half_size" in fields else fields


# What GEMMs reach of the peaks: published measurements of large GEMMs on random numbers, at the
# clock that the board's power limit leaves (stas00/ml-engineering, compute/accelerator/README.md,
# "Maximum Achievable Matmul FLOPS"). Other kinds of GEMM follow by the ratios below.
# `benchmarks/published.json` holds what each ratio was read from, and what else it predicts.
MAMF = "published: ml-engineering, maximum achievable matmul FLOPS"
LAUNCH = Figure(2e-6, "published: torchao's roofline_utils.py, a kernel of one element")
BANDWIDTH_BEST = 0.92  # pointwise kernels on an H100 by torchao's roofline_utils.py
CAST_RATE = 0.83  # torchao's blockwise casts on an H100 with HBM3 reach 0.79 to 0.87 of the peak
# The parts of the bandwidth at which this library's kernels are predicted to run, from their
# machine code: python -m scripts.kernel_tools report --predict H100 H200 B200 --sizes 16384,8192
# (Triton 3.9). Published casts of other libraries reach similar ones. Others run at CAST_RATE.
KERNEL_RATES = {
    # pass: (H100, H200, B200)
    "amax tensorwise": (0.87, 0.81, 0.71),
    "amax tensorwise transposed": (0.87, 0.81, 0.71),
    "amax rowwise": (0.85, 0.76, 0.73),
    "amax rowwise transposed": (0.87, 0.83, 0.80),
    "cast tensorwise": (0.90, 0.86, 0.83),
    "cast tensorwise transposed": (0.88, 0.83, 0.77),
    "cast given": (0.88, 0.82, 0.75),
    "cast given transposed": (0.88, 0.83, 0.77),
    "cast rowwise": (0.87, 0.80, 0.72),
    "cast rowwise transposed": (0.89, 0.86, 0.85),
    "cast 1x128": (0.73, 0.62, 0.55),
    "cast 128x128": (0.82, 0.74, 0.68),
    "cast 128x128 transposed": (0.84, 0.76, 0.68),
    "cast 1x32": (0.78, 0.67, 0.56),
    "cast 1x32 transposed": (0.79, 0.67, 0.56),
}
RAMP_S = 2e-6  # a GEMM of 256 by 256 by 256 takes 4 us on an H100, of which a launch is 2

# Speed of a kind of GEMM as a fraction of the tensorwise one by cuBLASLt.
CUBLAS_ROWWISE = Figure(0.99, "published: NVIDIA, cuBLAS 12.9 on Hopper: 1.75x of bfloat16")
CUTLASS_ROWWISE = Figure(
    0.773, "published: torchao pull request 940 on an H100, rowwise against tensorwise"
)
BLOCKS = Figure(
    0.803, "published: TransformerEngine on an H200 NVL, ratio of blocks and tensorwise"
)
MX_BLOCKS = Figure(0.95, "published: TransformerEngine on a B300, mxfp8 against tensorwise")


# Dense peaks: half of what NVIDIA's sheets print "with sparsity"; AMD's sheet prints both. NVIDIA
# prints HGX B200's bandwidth for eight GPUs, 62 TB/s. A row is: name, arch; peaks of bf16 and of
# float8 in 10^12 operations, and the parts of them that bf16 and tensorwise GEMMs reach (0: as
# bf16); bandwidth in 10^12 bytes, and the part of it that large copies reach; processors; the
# column of `KERNEL_RATES`; the data sheet.
_SHEETS = {
    "H100": ("H100 SXM", "sm_90", (989.4, 1978.9), (0.803, 0.709), (3.35, BANDWIDTH_BEST), 132, 0,
             "NVIDIA H100 (SXM)"),
    "H200": ("H200 SXM", "sm_90", (989.4, 1978.9), (0.803, 0.734), (4.8, BANDWIDTH_BEST), 132, 1,
             "NVIDIA H200 (SXM)"),
    "B200": ("B200", "sm_100", (2250, 4500), (0.776, 0.763), (7.7, BANDWIDTH_BEST), 148, 2,
             "NVIDIA Blackwell (HGX B200)"),
    "B300": ("B300", "sm_103", (2250, 4500), (0.786, 0.745), (8.0, 0.84), 148, 2,
             "NVIDIA Blackwell Ultra (HGX B300)"),
    "MI300X": ("MI300X", "gfx94", (1307.4, 2614.9), (0.511, 0), (5.3, BANDWIDTH_BEST), 304, None,
               "AMD Instinct MI300X"),
}  # fmt: skip


def _device(row: tuple[Any, ...]) -> Device:
    name, arch, peaks, parts, (terabytes, copied), processors, column, sheet = row
    sheet, bandwidth = f"datasheet: {sheet}", terabytes * 1e12
    ramp = f"published: torchao pull request 940 on an H100, {RAMP_S * 1e6:g} us to fill, drain"
    float8 = Figure(parts[1] or parts[0], MAMF if parts[1] else "assumed: as bfloat16")
    parts_of_kinds = {BF16: Figure(parts[0], MAMF), TENSORWISE: float8}
    for kind, ratio in {
        ROWWISE: CUBLAS_ROWWISE if arch == "sm_90" else CUTLASS_ROWWISE,
        ROWWISE_BY_CUTLASS: CUTLASS_ROWWISE,
        BLOCKWISE: BLOCKS,
        **({MX: MX_BLOCKS} if SUPPORT[arch][MX] is None else {}),
    }.items():
        parts_of_kinds[kind] = Figure(float8.value * ratio.value, ratio.source)
    products = {}
    for kind, best in parts_of_kinds.items():
        peak = peaks[kind != BF16] * 1e12
        ramped = Figure(peak * best.value * RAMP_S, ramp)
        products[kind] = GemmSpeed(Figure(peak, sheet), best, ramped)
    any_cast = f"published: torchao's blockwise casts on an H100, {CAST_RATE:g} of the bandwidth"
    casts = {ANY_PASS: Figure(CAST_RATE * bandwidth, any_cast)}
    predicted = "predicted: the kernels' machine code, scripts.kernel_tools report --predict"
    for each, rates in KERNEL_RATES.items() if column is not None else ():
        casts[each] = Figure(rates[column] * bandwidth, predicted)
    copies = Figure(copied, "published: torchao's roofline_utils.py, pointwise kernels")
    rest = copies, LAUNCH, Figure(processors, sheet), products, casts
    return Device(name, arch, Figure(bandwidth, sheet), *rest)


DEVICES: dict[str, Device] = {name: _device(row) for name, row in _SHEETS.items()}
"""Devices by name: peaks from datasheets, the parts of them that others measured."""


def find_device(device: str | Path | Device) -> Device:
    """The `Device` that a user means.

    Args:
        device: a `Device`; a name of `DEVICES`, in any case; or the path of a file that
            `Device.save` wrote.

    Raises:
        ValueError: an unknown name, listing the known ones.
    """
    if isinstance(device, Device):
        return device
    if str(device).upper() in DEVICES:
        return DEVICES[str(device).upper()]
    if os.path.isfile(device):
        return Device.load(device)
    raise ValueError(
        f"unknown device {str(device)!r}; known: {', '.join(DEVICES)}, or a JSON file that "
        "Device.save wrote: python benchmarks/measure_device.py --save FILE writes one"
    )
