"""The predicted time of a launch, and how many of its programs a multiprocessor holds at once.

The rules and limits of the latter are those of the CUDA C++ Programming Guide ("Technical
Specifications per Compute Capability") and of NVIDIA's occupancy calculator: registers are given to
a warp in units of 256, shared memory in units of 128 bytes, with 1 KiB more for each program.
"""

from __future__ import annotations

import re
from functools import cache

from scripts.kernel_tools.forms import Variant, compile_for
from scripts.kernel_tools.predict.devices import DEVICES
from scripts.kernel_tools.predict.instructions import work_of
from scripts.kernel_tools.predict.model import Prediction, predict
from scripts.kernel_tools.predict.requests import program_of
from scripts.kernel_tools.predict.traffic import Launch, traffic_of
from scripts.kernel_tools.sass.tools import listing, resources

# Of a multiprocessor of sm_90 or sm_100.
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 228 << 10, 64, 32


def resident_programs(registers: int, shared: int, warps: int) -> int:
    """How many programs fit on a multiprocessor.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
    """
    of_warp = -(-32 * registers // 256) * 256
    of_program = -(-(shared + 1024) // 128) * 128
    # Registers belong to the four schedulers, among which the warps of a program are divided.
    by_registers = 4 * (REGISTERS // 4 // of_warp) // warps
    return max(1, min(PROGRAMS, WARPS // warps, by_registers, SHARED // of_program))


def predict_launch(variant: Variant, device: str) -> Prediction:
    """The predicted time of a launch, on a device of `DEVICES`."""
    figures = DEVICES[device]
    compiled = compile_for(variant, figures.arch)
    registers, code = _machine_code(compiled.asm["cubin"])
    warps = compiled.metadata.num_warps
    resident = resident_programs(registers, compiled.metadata.shared, warps)
    programs = variant.programs[0] * variant.programs[1]
    flops, group = _products(variant)
    at = variant.programs[0] // 2 | 1 if variant.programs[0] > 1 else 0
    program = program_of(
        compiled.asm["ttir"], list(variant.types), variant.arguments, variant.programs, at,
        _average_trips(variant),
    )  # fmt: skip
    work = work_of(code, program.loops)
    on_gpu = resident * figures.multiprocessors
    launch = Launch(program, variant.arguments, programs, on_gpu, figures.l2, group)
    stages = variant.options.get("num_stages", 1)
    return predict(figures, work, traffic_of(launch), programs, resident, warps, flops, stages)


@cache  # the same for many sizes
def _machine_code(cubin: bytes) -> tuple[int, str]:
    """Registers of a thread, and the listing."""
    return int(re.findall(r"\bREG:(\d+)", resources(cubin))[0]), listing(cubin)


def _products(variant: Variant) -> tuple[float, int]:
    """Of a GEMM (M, K) by (K, N): operations, where groups add up to the whole, and neighbours."""
    if "TILE_M" not in variant.constants:
        return 0, 0
    sizes = variant.arguments
    return 2.0 * sizes["M"] * sizes["N"] * sizes["K"], variant.constants["GROUP"]


def _average_trips(variant: Variant) -> float:
    """Of a loop over tokens in groups, of which the host knows the number alone."""
    if variant.constants.get("BY_TOKENS"):
        return -(-variant.arguments["K"] // variant.arguments["E"] // 128)
    if "partials_ptr" in variant.arguments and variant.arguments.get("offs_ptr") is not None:
        # All tokens belong to groups.
        M, K = variant.arguments["M"], variant.arguments["K"]
        tiles = -(-M // variant.constants["ROWS"]) * -(-K // variant.constants["COLS"])
        return -(-tiles // variant.constants["PARTIALS"])
    return 1
