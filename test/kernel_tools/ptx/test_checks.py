"""Each fault that a run can find, in the smallest kernel that has it; and the kernel mended."""

import numpy as np
import pytest
from ptx_text import assemble, compute, run

from scripts.kernel_tools.ptx import PtxError


def exchange(distance, between):
    """Threads exchange their numbers with those ``distance`` bytes away."""
    return f"""
    shl.b32 %r1, %r0, 2; xor.b32 %r2, %r1, {distance};
    st.shared.b32 [%r1], %r0; {between} ld.shared.b32 %r3, [%r2];"""


def later_write(between):
    return f"""
    mov.b32 %r1, 0; setp.eq.b32 %p1, %r0, 5; @%p1 st.shared.b32 [%r1], %r0;
    bar.sync 0; ld.shared.b32 %r2, [%r1]; {between}
    setp.eq.b32 %p2, %r0, 40; @%p2 st.shared.b32 [%r1], %r0;"""


def reduction(stored):
    """Triton's reduction of four warps: the other lanes take part, and their result is not used."""
    return f"""
    setp.lt.u32 %p1, %r0, 4; shl.b32 %r9, %r0, 2; @%p1 mov.b32 %r1, %r0;
    shfl.sync.bfly.b32 %r2, %r1, 2, 31, -1; max.s32 %r3, %r1, %r2;
    shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1; max.s32 %r5, %r3, %r4;
    setp.lt.u32 %p2, %r0, {stored}; @%p2 st.shared.b32 [%r9], %r5;"""


BY_WARP, BY_ALL = "bar.warp.sync 0xffffffff;", "bar.sync 0;"
HALF = "setp.lt.u32 %p1, %r0, {};\n@%p1 "
SHUFFLE = HALF.format(16) + "shfl.sync.bfly.b32 %r1, %r0, 1, 31, "
POINTERS = "ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r0, 4, %d0; shl.b32 %r2, %r0, 2; "
PROGRAMS = """
ld.param.u64 %d0, [p0]; mov.u32 %r1, %ctaid.x; mad.wide.u32 %d1, %r1, 4, %d0;
st.global.b32 [%d1], %r1; ld.global.b32 %r2, """
FIRST = "setp.eq.b32 %p1, %r0, 3; "
UNWRITTEN = "uninitialised register"

# Statements of 64 threads -> what is found, as a regular expression, or "".
FAULTS = {
    exchange(128, ""): "race",
    exchange(128, BY_WARP): "race",  # of two warps
    exchange(128, BY_ALL): "",
    exchange(4, ""): "race",
    exchange(4, BY_WARP): "",
    exchange(4, BY_ALL): "",
    later_write(""): "race",
    later_write(BY_ALL): "",
    "mov.b32 %r1, 8;\nld.shared.v2.b32 {%r2, %r3}, [%r1];": (
        r"uninitialised shared memory: line \d+: ld.shared.v2.b32: shared address 8 \(64 times\)"
    ),
    HALF.format(62) + "mov.b32 %r1, 7;\nnot.b32 %r2, %r1;": (
        rf"{UNWRITTEN}: .* not.b32: %r1 \(2 times\)"
    ),
    HALF.format(64) + "mov.b32 %r1, 7;\nnot.b32 %r2, %r1;": "",
    # A move, or a value that is not selected, is no use.
    "mov.b16 %h1, 1; mov.b32 %r1, {%h1, %h2}; mov.b32 {%h3, _}, %r1; "
    "shl.b32 %r9, %r0, 1; st.shared.b16 [%r9], %h3;": "",
    "mov.b32 %r2, %r1; mov.b32 %r3, %r2;": "",
    "mov.b32 %r2, %r1; mov.b32 %r3, %r2; not.b32 %r4, %r3;": UNWRITTEN,
    "mov.b32 {%h2, %h3}, %r1; not.b16 %h4, %h3;": UNWRITTEN,
    "setp.eq.b32 %p1, %r0, %r0; selp.b32 %r2, %r0, %r1, %p1;": "",
    "setp.ne.b32 %p1, %r0, %r0; selp.b32 %r2, %r0, %r1, %p1;": UNWRITTEN,
    FIRST + "@%p1 mov.b32 %r0, %r1; not.b32 %r2, %r0;": UNWRITTEN,
    FIRST + "@%p1 mov.b32 %r0, %r1; @!%p1 not.b32 %r2, %r0;": "",
    reduction(1): "",
    reduction(4): "",
    reduction(5): UNWRITTEN + r".*\(1 times\)",
    reduction(64): UNWRITTEN + r".*\(60 times\)",
    POINTERS + "ld.global.b32 %r1, [%d1+4];": (
        "out of bounds: .*4 bytes at byte 256 of buffer 0, of 256"
    ),
    POINTERS + "st.global.b32 [%d1+-4], %r0;": "out of bounds: .*4 bytes at byte -4 of buffer 0",
    POINTERS + "ld.global.v2.b32 {%r1, %r2}, [%d1];": "misaligned: .*8 bytes at address",
    POINTERS + "st.global.b32 [%d1+2], %r0;": "misaligned",
    POINTERS + "ld.shared.b32 %r1, [%r2+512];": "out of bounds: .*shared address 512 of 512",
    POINTERS + "st.shared.b32 [%r2+1], %r0;": "misaligned: .*4 bytes at shared address 1",
    HALF.format(32) + "bra DONE;\nbar.sync 0;\nDONE:": (
        "barrier: .*32 of 64 threads of a program reach it"
    ),
    HALF.format(32) + "bra A;\nbar.sync 0;\nbra DONE;\nA:\nbar.sync 0;\nDONE:": "",  # they meet
    SHUFFLE + "0xffff;": "",
    SHUFFLE + "0xffffffff;": "barrier",
    POINTERS + "mov.b32 %r1, 3; st.global.b32 [%d0], %r1;": "",
    POINTERS + "shr.u32 %r1, %r0, 4; st.global.b32 [%d0], %r1;": "conflicting stores",
    PROGRAMS + "[%d1];": "",
    PROGRAMS + "[%d0];": "program order: .*program 1 reads what program 0 wrote",
    "mov.b32 %r1, 0; div.u32 %r2, %r0, %r1;": "division by zero",
}


@pytest.mark.parametrize("body", FAULTS)
def test_a_fault_is_found_by_name(body):
    programs = 3 if "%ctaid" in body else 1
    text = assemble(body, ["u64"], threads=64)
    report = run(text, np.zeros(64, np.int32), grid=(programs,), shared_bytes=512)
    assert bool(report.findings) == bool(FAULTS[body]), report.findings
    if FAULTS[body]:
        with pytest.raises(PtxError, match=FAULTS[body]):
            report.check()


def test_loops_that_lanes_and_programs_leave_at_different_times():
    body = """
    mov.u32 %r1, %ctaid.x; add.s32 %r2, %r1, %r0; mov.b32 %r3, 0; mov.b32 %r4, 0;
    LOOP:
    add.s32 %r4, %r4, %r3; add.s32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2;
    @%p1 bra LOOP;
    mov.b32 %r6, 0;
    BARRIERS:
    bar.sync 0; add.s32 %r6, %r6, 1; setp.le.u32 %p1, %r6, %r1;
    @%p1 bra BARRIERS;
    ld.param.u64 %d0, [p0]; mad.lo.s32 %r5, %r1, 64, %r0; mad.wide.u32 %d1, %r5, 4, %d0;
    st.global.b32 [%d1], %r4;
    """
    out = np.zeros((3, 64), np.int32)
    report = run(assemble(body, ["u64"], threads=64), out, grid=(3,))
    n = np.arange(64) + np.arange(3)[:, None]
    assert np.array_equal(out, n * (n + 1) // 2)
    assert not report.findings and report.divergences > 0
    # Program p passes p + 1 barriers, and each of its two warps issues each of them.
    assert report.instructions["bar.sync"] == 2 * (1 + 2 + 3)


def test_atomics_are_done_one_after_the_other():
    body = """
    ld.param.u64 %d0, [p0];
    atom.global.gpu.relaxed.add.u32 %r1, [%d0], 1;
    red.global.gpu.relaxed.max.s32 [%d0+4], %r0;
    atom.global.gpu.relaxed.cas.b32 %r2, [%d0+8], %r0, 7;
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.b32 [%d1+12], %r1;
    """
    out = np.zeros(67, np.int32)
    run(assemble(body, ["u64"], threads=64), out).check()
    assert out[:3].tolist() == [64, 63, 7]
    assert sorted(out[3:].tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("how", "limit", "want"),
    [("ballot", 5, 31), ("any", 1, 1), ("any", 0, 0), ("all", 32, 1), ("all", 31, 0),
     ("uni", 0, 1), ("uni", 7, 0)],
)  # fmt: skip
def test_votes(how, limit, want):
    result, type_ = ("$0", "b32") if how == "ballot" else ("%p2", "pred")
    chosen = "" if how == "ballot" else "selp.b32 $0, 1, 0, %p2;"
    vote = f"vote.sync.{how}.{type_} {result}, %p1, -1; {chosen}"
    lanes = np.arange(32, dtype=np.uint32)
    found = compute(f"setp.lt.u32 %p1, $1, {limit}; {vote}", lanes, output=np.uint32)
    assert found.tolist() == [want] * 32


def test_instructions_count_each_warp_once():
    body = """
    setp.lt.u32 %p1, %r0, 3;
    mov.b32 %f1, 0f3F800000;
    @%p1 add.f32 %f2, %f1, %f1;
    mul.lo.s32 %r2, %r0, 3;
    @%p1 bra NEXT;
    ex2.approx.f32 %f3, %f1;
    NEXT:
    """
    report = run(assemble(body, threads=64))
    assert report.instructions["add.f32"] == 2  # a false guard does not save the issue
    assert report.instructions.total() == 2 * 8


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
