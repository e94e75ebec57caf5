"""Bytes that a launch moves: between device memory and L2, and between L2 and multiprocessors.

An argument whose parts belong to one program each is read from device memory once. A second read by
the same program is a hit as far as L2 holds what the resident programs read in between. An argument
that several programs read, such as a weight or an operand of a GEMM, comes from L2 but for its
first read; the programs of a GEMM that run at the same time share what they read of both operands.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from scripts.kernel_tools.predict.requests import Access, Loop, Program

# Up to this many times its size, an argument's reads are tiles that reach over its edge, or over
# the end of a group of tokens.
_EDGE = 2.05


@dataclass
class Traffic:
    """Of a whole launch, in bytes.

    Args:
        needed: of device memory, if every byte were moved once.
        dram: of device memory.
        l2: of L2.
        active: the fraction of programs that have work.
        from_dram: loops -> the fraction of bytes read in them that come from device memory.
    """

    needed: float = 0
    dram: float = 0
    l2: float = 0
    active: float = 1
    from_dram: dict[tuple[Loop, ...], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """What a launch's traffic depends on.

    Args:
        program: one program's accesses.
        arguments: the launch's.
        programs: of the launch.
        resident: programs that run at the same time, on the whole GPU.
        l2: bytes of L2.
        group: of a GEMM, the tiles along M that are neighbours in the order of programs; or 0.
    """

    program: Program
    arguments: Mapping[str, Any]
    programs: int
    resident: int
    l2: float
    group: int = 0

    def size(self, name: str) -> float:
        """Bytes of an argument."""
        return float(self.arguments[name].numel() * self.arguments[name].element_size())


def traffic_of(launch: Launch) -> Traffic:
    """The traffic of a launch."""
    traffic, programs = Traffic(), launch.programs
    read: dict[tuple[Loop, ...], float] = defaultdict(float)
    new: dict[tuple[Loop, ...], float] = defaultdict(float)
    largest = 0.0
    for name, writes in dict.fromkeys((a.argument, a.writes) for a in launch.program.accesses):
        accesses = launch.program.accesses
        sites = [a for a in accesses if (a.argument, a.writes) == (name, writes)]
        size, asked = launch.size(name), sum(a.bytes for a in sites) * programs
        if size == 0:
            continue
        traffic.l2 += asked
        traffic.needed += min(asked, size)
        if writes:
            traffic.dram += min(asked, size)
            continue
        moved = _read(sites, size, launch)
        for site, dram in zip(sites, moved, strict=True):
            read[site.loops] += site.bytes * programs
            new[site.loops] += dram
        traffic.dram += sum(moved)
        of_first = sites[0].bytes * programs
        if size > largest and of_first <= _EDGE * size:
            largest = size
            traffic.active = min(1.0, size / max(size, of_first))
    traffic.from_dram = {loops: new[loops] / read[loops] for loops in read}
    if launch.group:
        traffic.dram += _shared_operands(launch)
    return traffic


def _read(sites: Sequence[Access], size: float, launch: Launch) -> list[float]:
    """Bytes of device memory that each load of an argument moves."""
    moved, covered = [], 0.0
    for site in sites:
        share = site.bytes * launch.programs / size
        if share > _EDGE:  # several programs read the same
            moved.append(max(0.0, 1 - covered) * size)
            covered = 1
            continue
        share = min(share, 1.0)
        dram = first = min(share, max(0.0, 1 - covered))
        again = share - first
        if again > 0.01:
            common = _common(sites[0].loops, site.loops)
            between = sites[0].bytes / math.prod(loop.trips for loop in common)
            hit = min(1.0, launch.l2 / (min(launch.resident, launch.programs) * between))
            dram += again * (1 - hit)
        covered += first
        moved.append(dram * size)
    return moved


def _common(a: tuple[Loop, ...], b: tuple[Loop, ...]) -> tuple[Loop, ...]:
    return tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _shared_operands(launch: Launch) -> float:
    """What a GEMM reads of its operands beyond once, in bytes.

    The resident programs form ``group`` rows of tiles by as many columns as they fill. They read
    each row and column once; with every such wave L2 starts anew.
    """
    by_argument: dict[str, float] = defaultdict(float)
    for access in launch.program.accesses:
        if not access.writes and access.loops and access.elements > 1:
            by_argument[access.argument] += access.bytes
    operands = sorted(by_argument.items(), key=lambda item: -item[1])[:2]
    size = sum(launch.size(name) for name, _ in operands)
    if len(operands) < 2 or size <= launch.l2:
        return 0.0
    rows = min(launch.group, launch.resident)
    (_, a), (_, b) = operands
    of_wave = rows * a + launch.resident / rows * b
    return max(0.0, of_wave * launch.programs / launch.resident - size)
