"""What a device can do: the rates of the cost model, with their sources; finding a device.

The time of a GEMM of F floating-point operations follows from two numbers (`GemmSpeed`)::

    seconds(F) = F / rate + ramp_s

``rate`` is what very large GEMMs reach at the clock that the board's power limit leaves them.
``ramp_s`` is the time of filling and draining the pipeline (Hockney and Jesshope, "Parallel
Computers 2", 1988, section 1.3.2, there n_1/2 / r_inf).

`Device.sources` says where all numbers are from. Each line starts with one word that says how
reliable they are: ``datasheet``, ``measured`` (on the machine at hand), ``published`` (measured by
others, or by this project in ``benchmarks/results/``), ``predicted`` (from a kernel's machine code)
or ``assumed``. Every printed prediction says whether any of them was measured.
`benchmarks/published.json` holds the measurements from which numbers were read, and those that
test them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from float8.kernels.products import (
    BLOCKWISE_PRODUCT,
    MX_PRODUCT,
    ROWWISE_PRODUCT,
    SUPPORT,
    TENSORWISE_PRODUCT,
)

BF16 = "bf16"
FLOAT8_GEMMS = (TENSORWISE_PRODUCT, ROWWISE_PRODUCT, BLOCKWISE_PRODUCT, MX_PRODUCT)
ANY_PASS = "any"


class MemoryPass(NamedTuple):
    """One pass over an operand's memory: its name, and the bytes it moves per element."""

    name: str
    bytes_per_element: float


class GemmSpeed(NamedTuple):
    """How fast a device runs one kind of GEMM: F operations take ``F / rate + ramp_s`` seconds.

    Args:
        rate: operations per second (a multiplication and an addition are two) of large GEMMs.
        ramp_s: seconds of filling and draining the pipeline.
    """

    rate: float
    ramp_s: float


@dataclass(frozen=True)
class Device:
    """The rates of one device.

    Args:
        name: as the table shows it.
        arch: such as ``"sm_90"`` or ``"gfx94"``.
        bandwidth: bytes per second that a large copy moves between chip and memory.
        launch: seconds that every kernel costs in addition to its work.
        processors: that each compute one tile of a GEMM's result at a time.
        products: kind of GEMM ("bf16", "tensorwise", "rowwise", "blockwise" or "mx") -> its speed.
        grouped: kind of GEMM, and the kind with " fast" behind it where fast sums have another
            speed -> the parts of ``rate`` that its grouped GEMMs reach: tokens by experts with
            groups of `SMALL` and of `LARGE` tokens, then tokens by tokens with such groups. A
            grouped GEMM of a kind that is not listed is as fast as a dense one.
        passes: name of a pass over memory, or "any" -> bytes per second. A pass that is not listed
            runs at the bandwidth.
        sources: lines ``"kind: source: which numbers"``.
    """

    name: str
    arch: str
    bandwidth: float
    launch: float
    processors: int
    products: Mapping[str, GemmSpeed]
    grouped: Mapping[str, Sequence[float]] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def seconds_of(self, passes: Iterable[MemoryPass], elements: float) -> float:
        """Time of passes over the memory of an operand with so many elements."""
        return sum(self.pass_seconds(name, moved * elements) for name, moved in passes)

    def pass_seconds(self, name: str, moved: float) -> float:
        """Time of one pass over memory that moves this many bytes."""
        any_rate = self.passes.get(ANY_PASS, self.bandwidth)
        return moved / self.passes.get(name, any_rate) + self.launch

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
        fields = json.loads(Path(path).read_text())
        fields["products"] = {kind: GemmSpeed(*of) for kind, of in fields["products"].items()}
        fields["grouped"] = {kind: tuple(of) for kind, of in fields["grouped"].items()}
        return cls(**fields | {"sources": tuple(fields["sources"])})


LAUNCH_S = 2e-6  # a kernel of one element by torchao's roofline_utils.py
RAMP_S = 2e-6  # a GEMM of 256 by 256 by 256 takes 4 us on an H100, of which a launch is 2
COPY = 0.92  # of the bandwidth: pointwise kernels on an H100 by torchao's roofline_utils.py
CAST_RATE = 0.83  # torchao's blockwise casts on an H100 with HBM3 reach 0.79 to 0.87 of the peak
# The parts of the bandwidth at which this library's kernels are predicted to run, from their
# machine code: python -m scripts.kernel_tools report --predict H100 H200 B200 --sizes 16384,8192
# (Triton 3.9). Those measured on an H100 are 1 to 12 % lower. Others run at CAST_RATE.
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

# Speed of a kind of GEMM as a part of the tensorwise one by cuBLASLt. Rowwise GEMMs on Hopper:
# NVIDIA's 1.75x of bfloat16 (cuBLAS 12.9); the three of a layer took 0.97 to 1.04 times as long as
# predicted on this project's H100, and CUTLASS is about as fast (pytorch#157905). On other GPUs:
# torchao pull request 940, CUTLASS of October 2024 on an H100. Blocks and MX: TransformerEngine on
# an H200 NVL and a B300.
RATIOS = {"sm_90": 0.99, ROWWISE_PRODUCT: 0.773, BLOCKWISE_PRODUCT: 0.803, MX_PRODUCT: 0.95}
# The parts of `Device.grouped`, of the fastest candidate that runs each product, on the H100: 128
# experts of 512 tokens and 8 of 4,096 (benchmarks/results/h100_2026-11-27/gemms.txt); of bfloat16,
# by what the steps of bench_grouped_mm*.json took. They are assumed elsewhere. MX, and bfloat16 on
# Blackwell: medians of torchao's table for a B200 (torchao/prototype/moe_training/README.md).
SMALL, LARGE = 512, 4096
GROUPED = {
    BF16: (0.97, 0.92, 0.97, 0.92),
    TENSORWISE_PRODUCT: (0.57, 0.56, 0.35, 0.45),
    f"{TENSORWISE_PRODUCT} fast": (0.89, 1.04, 0.60, 0.73),
    ROWWISE_PRODUCT: (0.57, 0.76, 0.35, 0.75),
    f"{ROWWISE_PRODUCT} fast": (0.90, 1.05, 0.70, 0.95),
    BLOCKWISE_PRODUCT: (0.68, 0.74, 0.37, 0.45),
    MX_PRODUCT: (0.45,) * 4,
}

# Dense peaks from data sheets: half of what NVIDIA prints "with sparsity"; AMD prints both. NVIDIA
# prints HGX B200's bandwidth for eight GPUs, 62 TB/s. A row is: name, arch; peaks of bf16 and of
# float8 in 10^12 operations, and the parts of them that large bf16 and tensorwise GEMMs reach with
# random numbers (stas00/ml-engineering, compute/accelerator/README.md, "Maximum Achievable Matmul
# FLOPS"; of MI300X's float8: assumed as bf16); bandwidth in 10^12 bytes, and the part of it that
# large copies reach; processors; the column of `KERNEL_RATES`.
SHEETS = {
    "H100": ("H100 SXM", "sm_90", (989.4, 1978.9), (0.803, 0.709), 3.35, COPY, 132, 0),
    "H200": ("H200 SXM", "sm_90", (989.4, 1978.9), (0.803, 0.734), 4.8, COPY, 132, 1),
    "B200": ("B200", "sm_100", (2250, 4500), (0.776, 0.763), 7.7, COPY, 148, 2),
    "B300": ("B300", "sm_103", (2250, 4500), (0.786, 0.745), 8.0, 0.84, 148, 2),
    "MI300X": ("MI300X", "gfx94", (1307.4, 2614.9), (0.511, 0.511), 5.3, COPY, 304, None),
}


SOURCES = (
    "published: ml-engineering, maximum achievable matmul FLOPS: bf16 and tensorwise GEMMs",
    "published: NVIDIA, cuBLAS 12.9: rowwise GEMMs on Hopper",
    "published: TransformerEngine, GEMM profiling: blockwise and mx GEMMs",
    "published: torchao, pull request 940: other rowwise GEMMs, seconds to fill and drain",
    "published: torchao, roofline_utils.py and blockwise casts: launches, copies, other casts",
    "published: this project's H100 (gemms.txt, steps), torchao's moe_training: grouped GEMMs",
)
KERNELS_SOURCE = "predicted: machine code of cast kernels, scripts.kernel_tools report --predict"
AMD_SOURCE = (
    "assumed: float8 GEMMs reach bf16's part of the peak; the bytes of plain casts are counted"
)


def _device(
    name: str, arch: str, peaks: tuple[float, float], parts: tuple[float, float],
    terabytes: float, copied: float, processors: int, column: int | None,
) -> Device:  # fmt: skip
    bandwidth = terabytes * 1e12
    best = [peak * part * 1e12 for peak, part in zip(peaks, parts, strict=True)]
    rates = dict(zip((BF16, TENSORWISE_PRODUCT), best, strict=True))
    rates[ROWWISE_PRODUCT] = rates[TENSORWISE_PRODUCT] * RATIOS.get(arch, RATIOS[ROWWISE_PRODUCT])
    for kind in (BLOCKWISE_PRODUCT, MX_PRODUCT):
        if kind == BLOCKWISE_PRODUCT or SUPPORT[arch][kind] is None:
            rates[kind] = rates[TENSORWISE_PRODUCT] * RATIOS[kind]
    grouped = GROUPED | ({BF16: GROUPED[MX_PRODUCT]} if arch.startswith("sm_10") else {})
    casts = {each: of[column] for each, of in KERNEL_RATES.items() if column is not None}
    return Device(
        name, arch, bandwidth * copied, LAUNCH_S, processors,
        {kind: GemmSpeed(rate, RAMP_S) for kind, rate in rates.items()}, grouped,
        {each: part * bandwidth for each, part in (casts | {ANY_PASS: CAST_RATE}).items()},
        (f"datasheet: {name}", *SOURCES, AMD_SOURCE if column is None else KERNELS_SOURCE),
    )  # fmt: skip


DEVICES: dict[str, Device] = {key: _device(*row) for key, row in SHEETS.items()}
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
