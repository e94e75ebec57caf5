"""How many programs a multiprocessor holds at once.

The rules and limits are those of the CUDA C++ Programming Guide ("Technical Specifications per
Compute Capability") and of NVIDIA's occupancy calculator: registers are given to a warp in units of
256, shared memory in units of 128 bytes, with 1 KiB more for each program.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor."""

    shared: int  # bytes
    warps: int
    programs: int
    registers: int = 65536


LIMITS = {
    "sm_89": Limits(100 << 10, 48, 24),
    "sm_90": Limits(228 << 10, 64, 32),
    "sm_100": Limits(228 << 10, 64, 32),
}


def resident_programs(arch: str, registers: int, shared: int, warps: int) -> int:
    """How many programs fit on a multiprocessor.

    Args:
        arch: such as ``"sm_90"``.
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
    """
    limits = LIMITS[arch]
    of_warp = -(-32 * registers // 256) * 256
    of_program = -(-(shared + 1024) // 128) * 128
    # Registers belong to the four schedulers, among which the warps of a program are divided.
    by_registers = 4 * (limits.registers // 4 // of_warp) // warps
    return max(
        1, min(limits.programs, limits.warps // warps, by_registers, limits.shared // of_program)
    )
