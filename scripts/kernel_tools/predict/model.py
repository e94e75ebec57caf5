"""The time of a launch.

A multiprocessor holds P programs. Each alternates between *queues* and *delays*. It queues for
memory and for the instruction pipes, which serve one program at a time; it waits for latencies,
which any number of programs may do at once. With, per program,

    D   its bytes of device memory over the multiprocessor's share of the copy bandwidth, or its
        bytes of L2 over that of L2's, whichever is longer
    I   the clocks that its instructions keep the busiest pipe
    T   the clocks of its tensor core instructions
    Z   its start and end, a latency for each group of loads that it waits for, and the clocks that
        dependent instructions of one warp take beyond I

the rate of a multiprocessor with n programs, X(n), follows by mean value analysis (Reiser and
Lavenberg, "Mean-Value Analysis of Closed Multichain Queuing Networks", JACM 27, 1980)::

    R_q(n) = S_q * (1 + Q_q(n - 1))      for the queues q, with S = D, I, T
    X(n) = n / (Z + sum of R_q(n));  Q_q(n) = X(n) * R_q(n)

One program reaches 1 / (Z + D + I + T), many reach 1 / max(D, I, T): Little's law and the roofline
are its two ends. A grid of G programs on S multiprocessors then takes, with g = G / S,

    launch + (g - P) / X(P) + 1 / X(1) + ... + 1 / X(P)    where g > P: the last ones run alone
    launch + n / X(n), n = ceil(g)                         where all are resident at once

A GEMM whose operands are copied to shared memory ahead of their use does not queue for memory: D
only bounds its rate. Z counts 2 clocks for an instruction of a warp that runs alone: an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scripts.kernel_tools.predict.devices import Device
from scripts.kernel_tools.predict.instructions import Work
from scripts.kernel_tools.predict.traffic import Traffic

DEPENDENT = 2  # clocks between two instructions of a warp that runs alone


@dataclass(frozen=True)
class Prediction:
    """The parts of a prediction; times in seconds.

    Args:
        seconds: of the launch.
        of_limit: the time of a copy of the bytes that are needed, over ``seconds``; for a GEMM, the
            time of its tensor cores, if that is longer.
        memory, issue, tensor: of all programs, if nothing else took time.
        latency: of one program's delays.
        pipe: the busiest.
        resident: programs that a multiprocessor holds.
        waves: the grid over all resident programs.
        in_flight: bytes per multiprocessor on their way at a wait; ``needed_in_flight`` covers the
            latency at full bandwidth.
        limit: what takes the longest: "memory", "L2", "tensor", a pipe, or "latency".
    """

    seconds: float
    of_limit: float
    memory: float
    issue: float
    tensor: float
    latency: float
    pipe: str
    resident: int
    waves: float
    in_flight: float
    needed_in_flight: float
    limit: str

    def as_row(self) -> dict[str, float | int | str]:
        """For JSON."""
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def rates(programs: int, delay: float, queues: Sequence[float]) -> list[float]:
    """X(1), ..., X(programs): programs per second by mean value analysis."""
    waiting, found = [0.0] * len(queues), []
    for n in range(1, programs + 1):
        response = [s * (1 + q) for s, q in zip(queues, waiting, strict=True)]
        rate = n / (delay + sum(response))
        waiting = [rate * r for r in response]
        found.append(rate)
    return found


def predict(
    device: Device,
    work: Work,
    traffic: Traffic,
    programs: int,
    resident: int,
    warps: int,
    flops: float = 0,
    stages: int = 1,
) -> Prediction:
    """The time of a launch.

    Args:
        device: the GPU.
        work: of one program.
        traffic: of the launch.
        programs: of the grid.
        resident: on one multiprocessor.
        warps: of a program.
        flops: of the launch, on tensor cores.
        stages: of loads that are issued ahead of their use, by copies to shared memory.
    """
    active = max(1.0, programs * traffic.active)
    g = active / device.multiprocessors
    n = min(resident, math.ceil(g))
    # Where some multiprocessors have a program less, the others have their share of the bandwidth.
    share = device.multiprocessors * (g / n if g < n else 1)
    by_dram, by_l2 = traffic.dram / device.copy, traffic.l2 / device.l2_bandwidth
    memory = max(by_dram, by_l2) / active * share
    clocks = work.clocks(warps)
    pipe = max(clocks, key=lambda p: clocks[p])
    issue = clocks[pipe] / device.clock
    tensor = flops / device.float8 / active * device.multiprocessors
    is_pipelined = flops > 0 and stages > 1
    # Programs without work start and end too, in the same places.
    delay = device.turnover + (programs / active - 1) * (device.turnover + device.l2_latency)
    alone = max(issue, DEPENDENT * work.issued / device.clock)
    delay += alone - issue
    if is_pipelined:
        delay += device.latency + _exposed(device, work, stages, tensor + issue)
        found = [min(x, 1 / memory) for x in rates(n, delay, [issue, tensor])]
    else:
        delay += _latency(device, work, traffic)
        found = rates(n, delay, [memory, issue, tensor])
    seconds = device.launch
    if g <= resident:
        seconds += n / found[-1]
    else:
        seconds += (g - n) / found[-1] + sum(1 / x for x in found)
    in_flight = max((wait.bytes for wait in work.waits), default=0) * 32 * warps * n
    limits = {
        "memory" if by_dram >= by_l2 else "L2": memory, pipe: issue, "tensor": tensor,
        "latency": (delay + memory + issue + tensor) / n,
    }  # fmt: skip
    return Prediction(
        seconds=seconds,
        of_limit=max(traffic.needed / device.copy, flops / device.float8) / seconds,
        memory=max(by_dram, by_l2),
        issue=issue * g,
        tensor=tensor * g,
        latency=delay,
        pipe=pipe,
        resident=resident,
        waves=active / (device.multiprocessors * resident),
        in_flight=in_flight,
        needed_in_flight=device.copy * device.latency / device.multiprocessors,
        limit=max(limits, key=lambda name: limits[name]),
    )


def _exposed(device: Device, work: Work, stages: int, seconds: float) -> float:
    """What a program waits in the loop of a GEMM, whose copies are stages - 1 steps ahead.

    Other loads, of scales, are issued in the step that uses them, before its products.
    """
    steps = max((wait.times for wait in work.waits), default=1.0)
    each = seconds / steps
    waits = sum(1 for wait in work.waits if wait.loops)
    scales = waits * max(0.0, device.l2_latency - each)
    return steps * max(scales, device.latency / (stages - 1) - each, 0.0)


def _latency(device: Device, work: Work, traffic: Traffic) -> float:
    """Seconds that a program waits for loads, idle."""
    most = max((wait.bytes for wait in work.waits), default=0)
    total = 0.0
    for wait in work.waits:
        share = traffic.from_dram.get(wait.loops, 0.0) if wait.bytes * 8 >= most else 0.0
        total += wait.times * (device.l2_latency + share * (device.latency - device.l2_latency))
    return total
