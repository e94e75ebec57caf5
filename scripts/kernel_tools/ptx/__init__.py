"""An interpreter of PTX: runs what Triton compiled for an NVIDIA GPU, in numpy.

- `program`: the text of a kernel -> its instructions.
- `machine`: the lanes of a launch, their registers, and the order in which they run. Functions
  registered by ``@instruction(name)`` execute the instructions.
- `memory`: global memory with guards between tensors, shared memory with a history of each byte.
- `arithmetic`, `conversions`, `accesses`, `exchange`: the instructions.
- `tensor_cores`, `tensor_memory`, `async_copies`, `mbarriers`: those of matrix products;
  `fragments` and `descriptors` say where an element lies.
- `launch`: Triton's launches, rerouted here.
- `report`: what a run found, and what it counted.

A run finds accesses out of bounds or misaligned, races between barriers, reads of what was never
written, and barriers that some threads miss. It cannot see what follows PTX: ptxas and timing.
It runs programs in lockstep, so it shows one order of their accesses to global memory, not all.
Approximate instructions (``ex2.approx``) are computed in float64 and rounded: a GPU's result may
differ in the last bits. `arithmetic` says by how much.
"""

# ruff: noqa: F401
from scripts.kernel_tools.ptx import (
    accesses,
    arithmetic,
    async_copies,
    conversions,
    exchange,
    mbarriers,
    tensor_cores,
    tensor_memory,
)
from scripts.kernel_tools.ptx.machine import execute as execute
from scripts.kernel_tools.ptx.memory import GlobalMemory as GlobalMemory
from scripts.kernel_tools.ptx.program import PtxError as PtxError
from scripts.kernel_tools.ptx.program import fusible as fusible
from scripts.kernel_tools.ptx.program import parse as parse
from scripts.kernel_tools.ptx.report import Report as Report
