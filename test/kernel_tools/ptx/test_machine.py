"""The machine runs a compiled Triton kernel, branches under masks, and finds faults by name."""

import numpy as np
import pytest
from ptx_text import assemble, run

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.kernel_tools.ptx import PtxError


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(x_ptr + at, inside, 0)
    tl.store(out_ptr + at, x + tl.load(y_ptr + at, inside, 0), inside)


@pytest.mark.parametrize("arch", [89, 90, 100])
def test_a_triton_kernel_runs_end_to_end(arch):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "N": "i32"}
    source = ASTSource(_add, {**signature, "BLOCK": "constexpr"}, {"BLOCK": 256})
    options = {"enable_fp_fusion": False}
    text = triton.compile(source, GPUTarget("cuda", arch, 32), options).asm["ptx"]
    x, y = np.random.default_rng(0).standard_normal((2, 1000), np.float32)
    out = np.zeros_like(x)
    report = run(text, x, y, out, 1000, grid=(4,))
    report.check()
    assert np.array_equal(out, x + y)
    assert report.programs == 4 and report.instructions["add.rn.f32"] == 4 * 4 * 2


def test_a_seed_chooses_the_order_of_programs_and_of_warps():
    body = """
    ld.param.u64 %d0, [p0];
    mov.u32 %r1, %ctaid.x;
    shr.u32 %r2, %r0, 5;
    mad.lo.s32 %r3, %r1, 4, %r2;
    atom.global.gpu.relaxed.exch.b32 %r4, [%d0], %r3;
    """
    last = []
    for seed in (None, 0, 1, 2, 2):
        out = np.zeros(1, np.int32)
        run(assemble(body, ["u64"], threads=128), out, grid=(8,), batch=3, seed=seed).check()
        last.append(int(out[0]))
    assert last[0] == 31  # the last warp of the last program
    assert len(set(last)) > 2 and last[3] == last[4]


def test_an_unknown_instruction_is_named():
    with pytest.raises(PtxError, match=r"line 17: frobnicate\.b32: this instruction is not known"):
        run(assemble("frobnicate.b32 %r1, %r0;"))
