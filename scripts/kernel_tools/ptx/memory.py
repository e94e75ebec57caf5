"""Global and shared memory, and what an access to them can do wrong.

*Global memory* is one array of bytes. Each buffer of a launch is copied into it, with guards around
it; an access may only touch bytes of a buffer.

*Shared memory* of all programs of a batch is one array too. For each byte, the last thread that
wrote it is known, and the last that read it, with the number of barriers that their program and
their warp had passed. Two accesses by different threads, of which one writes, race unless a barrier
of their program lies between them, or, for threads of one warp, a ``bar.warp.sync``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]
Find = Callable[[str, str, int], None]  # reports a kind, a detail, and how often
Memory: TypeAlias = "GlobalMemory | SharedMemory"

BASE = 0x7F0000000000  # the address of the first byte of global memory
GUARD = 4096

# Who accessed a byte: a lane, or one of these; _WARP - w: several lanes of warp w.
_NOBODY, _SEVERAL, _WARP = -1, -2, -3


def _allowed(
    find: Find, address: Lanes, width: int, inside: Lanes,
    shown: Callable[[int], str], outside: Callable[[int, int], str],
) -> Lanes:  # fmt: skip
    """Which accesses are neither misaligned nor out of bounds; the others are reported."""
    crooked = address % width != 0
    if crooked.any():
        detail = f"{width} bytes at {shown(int(address[crooked][0]))}"
        find("misaligned", detail, int(crooked.sum()))
    if not inside.all():
        detail = outside(int(address[~inside][0]), width)
        find("out of bounds", detail, int((~inside).sum()))
    return inside & ~crooked


class GlobalMemory:
    """The buffers of a launch.

    `add` each buffer, then `upload`; run; `download` copies them back.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[npt.NDArray[np.uint8], int]] = []
        self._size = GUARD
        self.data = np.zeros(0, np.uint8)
        self.valid = np.zeros(0, bool)
        self.writer = np.zeros(0, np.int32)  # the program that wrote a byte, or _NOBODY

    def add(self, buffer: npt.NDArray[np.uint8], alignment: int = 512) -> int:
        """The address of a copy of ``buffer``: bytes, of one dimension, to be written back."""
        offset = self._size
        self._buffers.append((buffer, offset))
        self._size = -(-(offset + buffer.size + GUARD) // alignment) * alignment
        return BASE + offset

    def upload(self) -> None:
        """Copy the buffers in."""
        self.data = np.zeros(self._size, np.uint8)
        self.valid = np.zeros(self._size, bool)
        self.writer = np.full(self._size, _NOBODY, np.int32)
        for buffer, offset in self._buffers:
            self.data[offset : offset + buffer.size] = buffer
            self.valid[offset : offset + buffer.size] = True

    def download(self) -> None:
        """Copy the buffers back."""
        for buffer, offset in self._buffers:
            buffer[...] = self.data[offset : offset + buffer.size]

    def places(self, find: Find, address: Lanes, width: int, lanes: Lanes) -> tuple[Lanes, Lanes]:
        """Check accesses of ``width`` bytes.

        Returns:
            which of them are allowed, and the offsets of those into `data`.
        """
        offset = address - BASE
        inside = (offset >= 0) & (offset + width <= self.data.size)
        inner = np.where(inside, offset, 0)
        inside &= self.valid[inner] & self.valid[inner + width - 1]
        allowed = _allowed(find, address, width, inside, "address {:#x}".format, self._neighbour)
        return allowed, offset[allowed]

    def _neighbour(self, address: int, width: int) -> str:
        """Where an access lies that is in no buffer."""
        if not self._buffers:
            return f"{width} bytes at {address:#x}; there are no buffers"
        offset = address - BASE

        def distance(place: tuple[npt.NDArray[np.uint8], int]) -> int:
            return max(place[1] - offset, offset - place[1] - place[0].size)

        number, (buffer, start) = min(enumerate(self._buffers), key=lambda nb: distance(nb[1]))
        return f"{width} bytes at byte {offset - start} of buffer {number}, of {buffer.size} bytes"

    def note(self, find: Find, offset: Lanes, width: int, by: Lanes, is_write: bool) -> None:
        """Find reads of what another program of this launch wrote; ``by``: programs."""
        if is_write:
            self.writer[offset[:, None] + np.arange(width)] = by.astype(np.int32)[:, None]
            return
        writer = self.writer[offset]
        other = (writer != _NOBODY) & (writer != by)
        if other.any():
            first = int(np.flatnonzero(other)[0])
            detail = f"program {by[first]} reads what program {writer[first]} wrote"
            find("program order", detail, int(other.sum()))


class SharedMemory:
    """The shared memory of the programs of a batch; addresses are a program's own."""

    def __init__(self, programs: int, threads: int, size: int) -> None:
        self.size = max(16, -(-size // 128) * 128)
        self.threads = threads
        count = programs * self.size
        self.data = np.full(count, 0xCB, np.uint8)
        self._writer = np.full(count, _NOBODY, np.int32)  # a lane
        self._write_time = np.zeros((2, count), np.int32)  # of its program, of its warp
        self._reader = np.full(count, _NOBODY, np.int32)
        self._read_time = np.zeros((2, count), np.int32)
        self.program_time = np.zeros(programs, np.int32)  # barriers passed
        # What asynchronous instructions, which their threads wait for later, do to each byte.
        self.arriving = np.zeros(count, bool)  # a copy will write it
        self.departing = np.zeros(count, bool)  # a tensor core will read it
        self.unfenced = np.zeros(count, bool)  # written since its program's fence.proxy.async
        self.warp_time = np.zeros(programs * -(-threads // 32), np.int32)

    def places(self, find: Find, address: Lanes, width: int, lanes: Lanes) -> tuple[Lanes, Lanes]:
        """As `GlobalMemory.places`, of accesses by ``lanes``."""
        inside = (address >= 0) & (address + width <= self.size)

        def outside(at: int, _: int) -> str:
            return f"shared address {at} of {self.size}"

        allowed = _allowed(find, address, width, inside, "shared address {}".format, outside)
        return allowed, (address + lanes // self.threads * self.size)[allowed]

    def note(self, find: Find, offset: Lanes, width: int, by: Lanes, is_write: bool) -> None:
        """Find races and uninitialised reads, and remember an access by lanes."""
        at, lane = offset[:, None] + np.arange(width), by.astype(np.int32)[:, None]

        def access(row: int, column: int) -> str:
            verb, thread = "writes" if is_write else "reads", by[row] % self.threads
            return f"thread {thread} {verb} shared address {at[row, column] % self.size}"

        busy = self.arriving[at] | self.departing[at] if is_write else self.arriving[at]
        if busy.any():
            row, column = np.argwhere(busy)[0]
            user = "copy writes" if self.arriving[at[row, column]] else "product reads"
            detail = f"{access(row, column)} before the wait for what {user} it"
            find("unfinished", detail, int(busy.any(1).sum()))
        now = self.program_time[lane // self.threads], self.warp_time[lane // 32]
        before = self._concurrent(self._writer, self._write_time, at, lane, now)
        if is_write:
            read = self._concurrent(self._reader, self._read_time, at, lane, now)
            before = np.where(before == _NOBODY, read, before)
            self._writer[at] = lane
            self.unfenced[at] = True
            self._write_time[0][at], self._write_time[1][at] = now
        else:
            unwritten = self._writer[at] == _NOBODY
            if unwritten.any():
                detail = f"shared address {int(at[unwritten][0]) % self.size}"
                count = int(unwritten.any(1).sum())
                find("uninitialised shared memory", detail, count)
            self._note_readers(at, lane, now)
        raced = (before != _NOBODY) & (before != lane)
        if raced.any():
            row, column = np.argwhere(raced)[0]
            other = before[row, column]
            who = f"thread {other % self.threads}" if other >= 0 else "several threads"
            detail = f"{access(row, column)}; no barrier lies between this and {who}"
            find("race", detail, int(raced.any(1).sum()))

    def fence(self, programs: Lanes) -> None:
        """Make what was written visible to asynchronous instructions (``fence.proxy.async``)."""
        self.unfenced.reshape(-1, self.size)[programs] = False

    def _concurrent(
        self, who: Lanes, when: Lanes, at: Lanes, lane: Lanes, now: tuple[Lanes, Lanes]
    ) -> Lanes:
        """Who accessed bytes since the last barrier that they share with ``lane``, or _NOBODY."""
        before = who[at]
        same_time = when[0][at] == now[0]
        ordered = (_warp_of(before) == lane // 32) & (when[1][at] < now[1])
        return np.where(same_time & ~ordered, before, _NOBODY)

    def _note_readers(self, at: Lanes, lane: Lanes, now: tuple[Lanes, Lanes]) -> None:
        before = self._concurrent(self._reader, self._read_time, at, lane, now)
        new = np.where(before == _NOBODY, lane, _together(before, lane))
        self._reader[at] = new
        self._read_time[0][at], self._read_time[1][at] = now
        # Lanes of one instruction that read one byte: the last assignment has replaced the others.
        different = self._reader[at] != new
        if different.any():
            bytes_, mine = at[different], new[different]
            joined = _together(self._reader[bytes_], mine)
            self._reader[bytes_] = joined
            several = joined == _SEVERAL
            self._reader[bytes_[several]] = _SEVERAL


def _warp_of(who: Lanes) -> Lanes:
    """The warp of who accessed a byte; -1 if nobody, or threads of several warps."""
    return np.where(who >= 0, who // 32, np.where(who <= _WARP, _WARP - who, -1))


def _together(a: Lanes, b: Lanes) -> Lanes:
    """Who: both a and b, neither of them _NOBODY."""
    warp = _warp_of(a)
    one_warp = (warp >= 0) & (warp == _warp_of(b))
    return np.where(a == b, a, np.where(one_warp, _WARP - warp, _SEVERAL))
