"""The kind of unit of a multiprocessor that executes an instruction of PTX.

The kinds follow the pipelines that Nsight Compute's documentation describes: `fma` (float32, packed
float16, integer products), `alu` (integer sums, logic, comparisons, selections), `fp64`, `special`
(transcendental functions), `conversion`, `memory` (loads, stores, atomics, asynchronous copies),
`exchange` (shuffles, votes), `tensor`, `control` (branches and barriers), `move`.

ptxas decides what the machine issues in the end: it drops most moves, fuses products with sums, and
writes one division as twenty instructions. These counts are of PTX. They tell kernels and loops
apart, and say how often each line runs; the machine code says what a line costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_BY_NAME = {
    "tensor": "mma wgmma tcgen05",
    "memory": "ld st atom red ldmatrix stmatrix cp mbarrier fence membar prefetch createpolicy",
    "exchange": "shfl redux vote elect match activemask",
    "control": "bra ret exit bar barrier trap nanosleep griddepcontrol",
    "special": "ex2 lg2 sin cos tanh sqrt rsqrt rcp popc brev clz",
    "conversion": "cvt",
    "move": "mov cvta",
    "alu": "and or xor not cnot shl shr shf bfe bfi prmt lop3 setp set selp min max abs neg",
}
_KIND = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}
PIPES = (*_BY_NAME, "fma", "fp64")


def pipe_of(opcode: str) -> str:
    """One of `PIPES`."""
    name, *modifiers = opcode.split(".")
    type_ = modifiers[-1] if modifiers else ""
    if name == "ld" and "param" in modifiers:
        return "move"  # an operand from the constant bank
    if name == "cvt" and "f" not in "".join(modifiers[-2:]):
        return "alu"  # between integers
    if name in _KIND:
        return _KIND[name]
    if type_ == "f64":
        return "fp64"
    if name in ("div", "rem"):
        return "special"
    return "alu" if name in ("add", "sub") and "f" not in type_ else "fma"


def by_pipe(instructions: Mapping[str, int]) -> Counter[str]:
    """Opcode -> issues, summed over the opcodes of each pipe."""
    found: Counter[str] = Counter()
    for opcode, count in instructions.items():
        found[pipe_of(opcode)] += count
    return found
