"""Global and shared memory, and what an access to them can do wrong.

*Global memory* is one array of bytes. Each buffer of a launch is copied into it, with guards around
it; an access may only touch bytes of a buffer.

*Shared memory* of all programs of a batch is one array too. For each byte, the last thread that
wrote it is known, and the last that read it, with the number of barriers that their program and
their warp had passed. Two accesses by different threads, of which one writes, race unless a barrier
of their program lies between them, or, for threads of one warp, a ``bar.warp.sync``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.program import Instruction
from scripts.kernel_tools.ptx.report import Report

Lanes = npt.NDArray[Any]

BASE = 0x7F0000000000  # the address of the first byte of global memory
GUARD = 4096

# Who accessed a byte: a lane, or one of these; _WARP - w: several lanes of warp w.
_NOBODY, _SEVERAL, _WARP = -1, -2, -3


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

    def places(
        self, report: Report, ins: Instruction, address: Lanes, width: int
    ) -> tuple[Lanes, Lanes]:
        """Check accesses of ``width`` bytes.

        Returns:
            which of them are allowed, and the offsets of those into `data`.
        """
        offset = address.astype(np.int64) - BASE
        allowed = np.ones(offset.shape, bool)
        crooked = offset % width != 0
        if crooked.any():
            at = int(address[crooked][0])
            detail = f"{width} bytes at address {at:#x}"
            report.find("misaligned", ins, detail, int(crooked.sum()))
            allowed &= ~crooked
        inside = (offset >= 0) & (offset + width <= self.data.size)
        inner = np.where(inside, offset, 0)
        inside &= self.valid[inner] & self.valid[inner + width - 1]
        if not inside.all():
            detail = self._neighbour(int(offset[~inside][0]), width)
            report.find("out of bounds", ins, detail, int((~inside).sum()))
            allowed &= inside
        return allowed, offset if allowed.all() else offset[allowed]

    def _neighbour(self, offset: int, width: int) -> str:
        """Where an access lies that is in no buffer."""
        if not self._buffers:
            return f"{width} bytes at {offset + BASE:#x}; there are no buffers"

        def distance(place: tuple[npt.NDArray[np.uint8], int]) -> int:
            return max(place[1] - offset, offset - place[1] - place[0].size)

        number, (buffer, start) = min(enumerate(self._buffers), key=lambda nb: distance(nb[1]))
        return f"{width} bytes at byte {offset - start} of buffer {number}, of {buffer.size} bytes"

    def note_reads(
        self, report: Report, ins: Instruction, offset: Lanes, width: int, program: Lanes
    ) -> None:
        """Find reads of what another program of this launch wrote."""
        writer = self.writer[offset]
        other = (writer != _NOBODY) & (writer != program)
        if other.any():
            first = int(np.flatnonzero(other)[0])
            detail = f"program {program[first]} reads what program {writer[first]} wrote"
            report.find("program order", ins, detail, int(other.sum()))


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

    def places(
        self, report: Report, ins: Instruction, address: Lanes, width: int, lanes: Lanes
    ) -> tuple[Lanes, Lanes]:
        """Check accesses of ``width`` bytes by ``lanes``.

        Returns:
            which of them are allowed, and the offsets of those into `data`.
        """
        address = address.astype(np.int64)
        allowed = np.ones(address.shape, bool)
        crooked = address % width != 0
        if crooked.any():
            detail = f"{width} bytes at shared address {int(address[crooked][0])}"
            report.find("misaligned", ins, detail, int(crooked.sum()))
            allowed &= ~crooked
        inside = (address >= 0) & (address + width <= self.size)
        if not inside.all():
            detail = f"shared address {int(address[~inside][0])} of {self.size}"
            report.find("out of bounds", ins, detail, int((~inside).sum()))
            allowed &= inside
        offset = address + lanes // self.threads * self.size
        return allowed, offset if allowed.all() else offset[allowed]

    def note(
        self,
        report: Report,
        ins: Instruction,
        offset: Lanes,
        width: int,
        lanes: Lanes,
        is_write: bool,
    ) -> None:
        """Find races and uninitialised reads, and remember an access."""
        at = offset[:, None] + np.arange(width)
        lane = lanes.astype(np.int32)[:, None]
        self._find_unfinished(report, ins, at, lanes, is_write)
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
                report.find("uninitialised shared memory", ins, detail, count)
            self._note_readers(at, lane, now)
        raced = (before != _NOBODY) & (before != lane)
        if raced.any():
            row, column = np.argwhere(raced)[0]
            other = before[row, column]
            detail = (
                f"thread {lanes[row] % self.threads} {'writes' if is_write else 'reads'} "
                f"shared address {at[row, column] % self.size}; no barrier lies between this and "
                f"{f'thread {other % self.threads}' if other >= 0 else 'several threads'}"
            )
            report.find("race", ins, detail, int(raced.any(1).sum()))

    def _find_unfinished(
        self, report: Report, ins: Instruction, at: Lanes, lanes: Lanes, is_write: bool
    ) -> None:
        """Find accesses to what an asynchronous instruction still uses."""
        busy = self.arriving[at] | self.departing[at] if is_write else self.arriving[at]
        if busy.any():
            row, column = np.argwhere(busy)[0]
            user = "copy writes" if self.arriving[at[row, column]] else "product reads"
            detail = (
                f"thread {lanes[row] % self.threads} {'writes' if is_write else 'reads'} shared "
                f"address {at[row, column] % self.size} before the wait for what {user} it"
            )
            report.find("unfinished", ins, detail, int(busy.any(1).sum()))

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
