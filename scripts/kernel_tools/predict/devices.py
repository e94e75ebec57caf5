"""The constants of each GPU, with their sources.

``datasheet``: NVIDIA's. ``published``: measured by others, with the address. ``seen``: on a machine
of this kind, not a file of this repository. ``assumed``: no source was found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_BENCHES = "https://github.com/RRZE-HPC/gpu-benches/blob/master/"


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        arch: what kernels are compiled for.
        multiprocessors: how many.
        clock: per second, at which the datasheet's peaks hold.
        copy: bytes per second of a large copy, reads and writes together.
        l2: bytes of the L2 cache.
        l2_bandwidth: bytes per second from L2.
        latency: seconds from a load of device memory to its result, idle.
        l2_latency: the same from L2.
        turnover: seconds that a program takes to start and end.
        launch: seconds between two kernels.
        float8: operations per second of the tensor cores, sustained.
        sources: field -> source.
    """

    arch: str
    multiprocessors: int
    clock: float
    copy: float
    l2: float
    l2_bandwidth: float
    latency: float
    l2_latency: float
    turnover: float
    launch: float
    float8: float
    sources: dict[str, str]


_HOPPER = {
    "multiprocessors": "datasheet: NVIDIA H100 (SXM)",
    "clock": "datasheet: 989.4 TFLOPS of bfloat16 by 132 multiprocessors of 4096 a clock",
    "l2_bandwidth": f"published: {_BENCHES}gpu-l2-cache/h200.txt, about 25 MB",
    "latency": f"published: {_BENCHES}gpu-latency/gh200.txt, 680 clocks at 1.98 GHz",
    "l2_latency": f"published: {_BENCHES}gpu-latency/gh200.txt, 280 clocks at 1.98 GHz",
    # 16 threads a multiprocessor store 8 bytes each, and 132 of them 77 GB/s: 219 ns for a program.
    "turnover": f"published: {_BENCHES}gpu-stream/gh200.txt, stores by blocks of 16 threads",
    "launch": "assumed: as torchao's roofline_utils.py has it",
    "float8": "seen: 0.8 of the datasheet's peak, as bfloat16 GEMMs of 790 of 989 TFLOPS",
}
_H200 = Device(
    "sm_90", 132, 1.83e9, 4.3e12, 60e6, 9.6e12, 344e-9, 142e-9, 219e-9, 2e-6, 0.8 * 1978.9e12,
    _HOPPER | {"copy": "seen: 4.3 TB/s of a large copy", "l2": "seen: 60 MB"},
)  # fmt: skip
_COPY = "assumed: 0.92 of the datasheet's {} TB/s, as in torchao's roofline_utils.py"
_H100_SOURCES = {"copy": _COPY.format(3.35), "l2": "datasheet: NVIDIA H100 (SXM)"}
DEVICES = {
    "H200": _H200,
    "H100": replace(_H200, copy=0.92 * 3.35e12, l2=50e6, sources=_HOPPER | _H100_SOURCES),
    "B200": Device(
        "sm_100", 148, 1.855e9, 0.92 * 7.7e12, 126e6, 13e12, 344e-9, 142e-9, 219e-9, 2e-6,
        0.8 * 4500e12,
        {
            "multiprocessors": "datasheet: NVIDIA Blackwell (HGX B200)",
            "clock": "datasheet: 2250 TFLOPS of bfloat16 by 148 multiprocessors of 8192 a clock",
            "copy": _COPY.format(7.7),
            "l2": "assumed: 126 MB",
            "l2_bandwidth": "assumed: an H200's times the clocks and multiprocessors",
            **dict.fromkeys(("latency", "l2_latency", "turnover"), "assumed: as on Hopper"),
            "launch": _HOPPER["launch"],
            "float8": "assumed: 0.8 of the datasheet's 4500 TFLOPS, as on Hopper",
        },
    ),
}  # fmt: skip
