"""The machine's order of programs and warps, and what it does not know."""

import numpy as np
import pytest
from ptx_text import assemble, run

from scripts.kernel_tools.ptx import PtxError


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
