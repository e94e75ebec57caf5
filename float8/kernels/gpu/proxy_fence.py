"""What a GEMM needs where Triton leaves out the fence between copies and tensor cores.

In a pipelined GEMM, `cp.async` copies write the operands to shared memory through the generic
proxy. The tensor cores of sm_90 (`wgmma`) and sm_100 (`tcgen05.mma`) read them through the async
proxy. The PTX memory model orders the two only by a ``fence.proxy.async`` in between. Without it, a
product may use what was in shared memory before.

Triton inserts the fence from 3.7.1 on (triton#9610, triton#10537). Executing the PTX of 3.6.0 shows
that it is missing there; no GPU has shown a wrong product of this library. For such a version:

- on sm_90, a kernel calls `fence` after the loads of both operands and before their `tl.dot`. In
  Triton's pipeline it then follows the wait for the copies and the barrier behind it, because
  Triton and LLVM keep the order of instructions with side effects;
- on sm_100, the pipeline puts a `fence` of the source in another place. There `stages` makes the
  loop load through registers, without a pipeline: Triton fences such stores itself. This costs the
  overlap of loads and products.

``scripts.kernel_tools run`` checks each form (findings of the kind "proxy"). Tensor cores of sm_89
and sm_120 (`mma.sync`) read registers and need no such fence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch.torch_version import TorchVersion

# A kernel asks it first: with later versions it compiles exactly as without this file, and Triton's
# interpreter, which has no proxies, can call neither of the functions.
IS_LEFT_OUT = tl.constexpr(
    TorchVersion(triton.__version__) < TorchVersion("3.7.1") and not triton.knobs.runtime.interpret
)


@tl.core.builtin
def _architecture(_semantic=None):
    """What the kernel is compiled for, whatever device this process has."""
    return tl.constexpr(_semantic.builder.options.arch)


@tl.core.builtin
def stages(_semantic=None):
    """``num_stages`` of the loop over the contraction; None: those of the launch."""
    return tl.constexpr(1 if _semantic.builder.options.arch in ("sm100", "sm103") else None)


@triton.jit
def fence():
    """Let the tensor cores of sm_90 read what copies have written to shared memory."""
    if _architecture() == "sm90":
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, False, 1
        )
