"""The launches that ship, at a size, and the predicted time of each."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import triton
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from float8.kernels import gpu
from float8.kernels.gpu.launch import Variant
from scripts.kernel_time.devices import DEVICES
from scripts.kernel_time.instructions import work_of
from scripts.kernel_time.model import Prediction, predict
from scripts.kernel_time.occupancy import resident_programs
from scripts.kernel_time.requests import program_of
from scripts.kernel_time.traffic import traffic_of
from scripts.sass.tools import listing, resources

# In a launch's key: with Triton 3.6, only those that are strings.
_CONSTANTS_HAVE_ATTRIBUTES = TorchVersion(triton.__version__) >= TorchVersion("3.7")

# The files that hold kernels: those that list their `shipped` variants.
FILES = tuple(
    path.stem
    for path in sorted(Path(gpu.__file__).parent.glob("*.py"))
    if "\ndef shipped(" in path.read_text()
)


def variants(files: Sequence[str] = FILES, M: int = 4096, K: int = 4096) -> list[Variant]:
    """The shipped variants for matrices (M, K), in the order of ``float8/kernels/gpu/``."""
    return [
        variant
        for name in files
        for variant in importlib.import_module(f"float8.kernels.gpu.{name}").shipped(M, K)
    ]


def compile_for(variant: Variant, arch: str) -> Any:
    """Triton's compiled kernel; sizes and pointers are multiples of 16, as in training.

    Its key in Triton's cache is that of a launch, so that the two share one compilation.
    """
    signature = {n: variant.types.get(n, "constexpr") for n in variant.kernel.arg_names}
    attributes: dict[tuple[int], list[Any]] = {}
    for i, parameter in enumerate(variant.kernel.params):
        if parameter.name not in variant.types:
            if _CONSTANTS_HAVE_ATTRIBUTES or isinstance(variant.constants[parameter.name], str):
                attributes[(i,)] = []
        elif variant.types[parameter.name] != "fp32" and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=dict(variant.options))


def predict_launch(variant: Variant, device: str) -> Prediction:
    """The predicted time of a launch, on a device of `DEVICES`."""
    return predict_compiled(variant, device, compile_for(variant, DEVICES[device].arch))


def predict_compiled(
    variant: Variant,
    device: str,
    compiled: Any,
    cached: Mapping[str, float] | None = None,
    products: tuple[float, int] | None = None,
) -> Prediction:
    """`predict_launch` of what Triton compiled.

    Args:
        variant: the launch.
        device: of `DEVICES`.
        compiled: by `compile_for`.
        cached: argument -> bytes of it that L2 holds before the launch.
        products: of a GEMM, its operations, and the tiles along M that are neighbours in the order
            of programs; None for a kernel of this library, which names them.
    """
    figures = DEVICES[device]
    registers, code = _machine_code(compiled.asm["cubin"])
    warps = compiled.metadata.num_warps
    resident = resident_programs(figures.arch, registers, compiled.metadata.shared, warps)
    programs = variant.programs[0] * variant.programs[1]
    flops, group = products or _products(variant)
    at = variant.programs[0] // 2 | 1 if variant.programs[0] > 1 else 0
    program = program_of(
        compiled.asm["ttir"], list(variant.types), variant.arguments, variant.programs, at,
        _average_trips(variant),
    )  # fmt: skip
    work = work_of(code, program.loops)
    traffic = traffic_of(
        program, variant.arguments, programs, resident * figures.multiprocessors, figures.l2,
        group, cached or {},
    )  # fmt: skip
    return predict(
        figures, work, traffic, programs, resident, warps,
        flops, variant.options.get("num_stages", 1),
    )  # fmt: skip


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
    if variant.constants.get("LIMITED"):  # all tokens belong to groups
        M, K = variant.arguments["M"], variant.arguments["K"]
        tiles = -(-M // variant.constants["ROWS"]) * -(-K // variant.constants["COLS"])
        return -(-tiles // variant.constants["PARTIALS"])
    return 1
