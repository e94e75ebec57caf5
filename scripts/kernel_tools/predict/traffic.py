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
        hit: of re-reads, the fraction that L2 serves; 1 where there are none.
        from_dram: loops -> the fraction of bytes read in them that come from device memory.
    """

    needed: float = 0
    dram: float = 0
    l2: float = 0
    active: float = 1
    hit: float = 1
    from_dram: dict[tuple[Loop, ...], float] = field(default_factory=dict)


def bytes_of(argument: Any) -> float:
    """Of a tensor."""
    return float(argument.numel() * argument.element_size())


def traffic_of(
    program: Program,
    arguments: Mapping[str, Any],
    programs: int,
    resident: int,
    l2: float,
    group: int,
) -> Traffic:
    """The traffic of a launch.

    Args:
        program: one program's accesses.
        arguments: the launch's.
        programs: of the launch.
        resident: programs that run at the same time, on the whole GPU.
        l2: bytes of L2.
        group: of a GEMM, the tiles along M that are neighbours in the order of programs; or 0.
    """
    traffic = Traffic()
    read: dict[tuple[Loop, ...], float] = defaultdict(float)
    new: dict[tuple[Loop, ...], float] = defaultdict(float)
    largest = 0.0
    for name in dict.fromkeys(a.argument for a in program.accesses):
        size = bytes_of(arguments[name])
        for writes in (False, True):
            sites = [a for a in program.accesses if a.argument == name and a.writes == writes]
            asked = sum(a.bytes for a in sites) * programs
            if not sites or size == 0:
                continue
            traffic.l2 += asked
            traffic.needed += min(asked, size)
            if writes:
                traffic.dram += min(asked, size)
                continue
            moved = _read(sites, size, programs, resident, l2, traffic)
            for site, dram in zip(sites, moved, strict=True):
                read[site.loops] += site.bytes * programs
                new[site.loops] += dram
            traffic.dram += sum(moved)
            if size > largest and sites and sites[0].bytes * programs <= _EDGE * size:
                largest = size
                traffic.active = min(1.0, size / max(size, sites[0].bytes * programs))
    traffic.from_dram = {loops: new[loops] / read[loops] for loops in read}
    if group:
        traffic.dram += _shared_operands(program, arguments, programs, resident, l2, group)
    return traffic


def _read(
    sites: Sequence[Access], size: float, programs: int, resident: int, l2: float, traffic: Traffic
) -> list[float]:
    """Bytes of device memory that each load of an argument moves."""
    moved, covered = [], 0.0
    for site in sites:
        share = site.bytes * programs / size
        if share > _EDGE:  # several programs read the same
            first = max(0.0, 1 - covered)
            moved.append(first * size)
            covered = 1
            continue
        share = min(share, 1.0)
        first = min(share, max(0.0, 1 - covered))
        again = share - first
        dram = first
        if again > 0.01:
            common = _common(sites[0].loops, site.loops)
            between = sites[0].bytes / math.prod(loop.trips for loop in common)
            hit = min(1.0, l2 / (min(resident, programs) * between))
            traffic.hit = min(traffic.hit, hit)
            dram += again * (1 - hit)
        covered += first
        moved.append(dram * size)
    return moved


def _common(a: tuple[Loop, ...], b: tuple[Loop, ...]) -> tuple[Loop, ...]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _shared_operands(
    program: Program,
    arguments: Mapping[str, Any],
    programs: int,
    resident: int,
    l2: float,
    group: int,
) -> float:
    """What a GEMM reads of its operands beyond once, in bytes.

    The resident programs form ``group`` rows of tiles by as many columns as they fill. They read
    each row and column once; with every such wave L2 starts anew.
    """
    reads = [a for a in program.accesses if not a.writes and a.loops and a.elements > 1]
    by_argument: dict[str, float] = defaultdict(float)
    for access in reads:
        by_argument[access.argument] += access.bytes
    operands = sorted(by_argument.items(), key=lambda item: -item[1])[:2]
    sizes = [bytes_of(arguments[name]) for name, _ in operands]
    if len(operands) < 2 or sum(sizes) <= l2:
        return 0.0
    rows = min(group, resident)
    (_, a), (_, b) = operands
    of_wave = rows * a + resident / rows * b
    return max(0.0, of_wave * programs / resident - sum(sizes))
