"""Each fault that a run can find, in the smallest kernel that has it; and the kernel mended."""

import numpy as np
import pytest
from ptx_text import assemble, run

from scripts.kernel_tools.ptx import PtxError

EXCHANGE = """
shl.b32 %r1, %r0, 2;
xor.b32 %r2, %r1, {distance};
st.shared.b32 [%r1], %r0;
{between}
ld.shared.b32 %r3, [%r2];
ld.param.u64 %d0, [p0];
mad.wide.u32 %d1, %r0, 4, %d0;
st.global.b32 [%d1], %r3;
"""


def kinds(report):
    return [finding.kind for finding in report.findings]


def exchange(distance, between):
    """Threads exchange their numbers with those ``distance`` bytes away."""
    out = np.zeros(64, np.int32)
    text = assemble(EXCHANGE.format(distance=distance, between=between), ["u64"], threads=64)
    report = run(text, out, shared_bytes=256)
    assert np.array_equal(out, np.arange(64) ^ distance // 4)
    return report


@pytest.mark.parametrize(
    ("distance", "between", "found"),
    [
        (128, "", ["race"]),
        (128, "bar.warp.sync 0xffffffff;", ["race"]),  # of two warps
        (128, "bar.sync 0;", []),
        (4, "", ["race"]),
        (4, "bar.warp.sync 0xffffffff;", []),
        (4, "bar.sync 0;", []),
    ],
)
def test_a_race_between_a_write_and_a_read(distance, between, found):
    assert kinds(exchange(distance, between)) == found


@pytest.mark.parametrize(("again", "found"), [("", ["race"]), ("bar.sync 0;", [])])
def test_a_race_between_reads_and_a_later_write(again, found):
    body = f"""
    mov.b32 %r1, 0; setp.eq.b32 %p1, %r0, 5;
    @%p1 st.shared.b32 [%r1], %r0;
    bar.sync 0;
    ld.shared.b32 %r2, [%r1];
    {again}
    setp.eq.b32 %p2, %r0, 40;
    @%p2 st.shared.b32 [%r1], %r0;
    """
    assert kinds(run(assemble(body, threads=64), shared_bytes=4)) == found


def test_shared_memory_that_was_not_written():
    report = run(assemble("mov.b32 %r1, 8; ld.shared.v2.b32 {%r2, %r3}, [%r1];"), shared_bytes=64)
    assert kinds(report) == ["uninitialised shared memory"]
    assert "line 17: ld.shared.v2.b32: shared address 8 (32 times)" in str(report.findings[0])


def test_a_register_that_was_not_written():
    body = "setp.lt.u32 %p1, %r0, 30;\n@%p1 mov.b32 %r1, 7;\nnot.b32 %r2, %r1;"
    report = run(assemble(body))
    assert kinds(report) == ["uninitialised register"]
    assert "not.b32: %r1 (2 times)" in str(report.findings[0])
    assert kinds(run(assemble(body.replace("%r0, 30", "%r0, 32")))) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("mov.b32 %r1, {%h1, %h2}; mov.b32 {%h3, _}, %r1; st.shared.b16 [%r9], %h3;", False),
        ("mov.b32 %r2, %r1; mov.b32 %r3, %r2;", False),
        ("mov.b32 %r2, %r1; mov.b32 %r3, %r2; not.b32 %r4, %r3;", True),
        ("mov.b32 {%h2, %h3}, %r1; not.b16 %h4, %h3;", True),
        ("setp.eq.b32 %p1, %r0, %r0; selp.b32 %r2, %r0, %r1, %p1;", False),
        ("setp.ne.b32 %p1, %r0, %r0; selp.b32 %r2, %r0, %r1, %p1;", True),
        ("setp.eq.b32 %p1, %r0, 3; @%p1 mov.b32 %r0, %r1; not.b32 %r2, %r0;", True),
        ("setp.eq.b32 %p1, %r0, 3; @%p1 mov.b32 %r0, %r1; @!%p1 not.b32 %r2, %r0;", False),
    ],
)
def test_a_move_or_an_unselected_value_is_not_a_use(body, found):
    body = "mov.b16 %h1, 1;\nshl.b32 %r9, %r0, 1;\n" + body
    assert kinds(run(assemble(body), shared_bytes=64)) == ["uninitialised register"] * found


REDUCTION = """
setp.lt.u32 %p1, %r0, 4;
shl.b32 %r9, %r0, 2;
@%p1 mov.b32 %r1, %r0;
shfl.sync.bfly.b32 %r2, %r1, 2, 31, -1;
max.s32 %r3, %r1, %r2;
shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
max.s32 %r5, %r3, %r4;
setp.lt.u32 %p2, %r0, {stored};
@%p2 st.shared.b32 [%r9], %r5;
"""


@pytest.mark.parametrize(("stored", "times"), [(1, 0), (4, 0), (5, 1), (32, 28)])
def test_four_lanes_reduce_what_only_they_have(stored, times):
    """Triton's reduction of four warps: the other lanes take part, and their result is not used."""
    report = run(assemble(REDUCTION.format(stored=stored)), shared_bytes=128)
    assert [f.count for f in report.findings] == [times] * (times > 0)
    assert kinds(report) == ["uninitialised register"] * (times > 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ld.global.b32 %r1, [%d1+4];", "out of bounds: .*4 bytes at byte 128 of buffer 0, of 128"),
        ("st.global.b32 [%d1+-4], %r0;", "out of bounds: .*4 bytes at byte -4 of buffer 0"),
        ("ld.global.v2.b32 {%r1, %r2}, [%d1];", "misaligned: .*8 bytes at address"),
        ("st.global.b32 [%d1+2], %r0;", "misaligned"),
        ("ld.shared.b32 %r1, [%r2+512];", "out of bounds: .*shared address 512 of 512"),
        ("st.shared.b32 [%r2+1], %r0;", "misaligned: .*4 bytes at shared address 1"),
    ],
)
def test_accesses_out_of_bounds_or_misaligned(body, said):
    body = f"ld.param.u64 %d0, [p0];\nmad.wide.u32 %d1, %r0, 4, %d0;\nshl.b32 %r2, %r0, 2;\n{body}"
    report = run(assemble(body, ["u64"]), np.zeros(32, np.int32), shared_bytes=512)
    with pytest.raises(PtxError, match=said):
        report.check()


def test_a_barrier_that_half_of_the_threads_miss():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:"
    report = run(assemble(body, threads=64))
    assert kinds(report) == ["barrier"]
    assert "32 of 64 threads of a program reach it" in str(report.findings[0])


def test_two_barriers_with_one_number_meet():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra A;\nbar.sync 0;\nbra DONE;\nA:\nbar.sync 0;\nDONE:"
    assert kinds(run(assemble(body, threads=64))) == []


def test_a_shuffle_whose_mask_names_an_absent_thread():
    shuffle = "shfl.sync.bfly.b32 %r1, %r0, 1, 31, {};"
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 " + shuffle
    assert kinds(run(assemble(body.format("0xffff")))) == []
    assert kinds(run(assemble(body.format("0xffffffff")))) == ["barrier"]


def test_two_threads_that_store_different_values_at_one_address():
    body = "ld.param.u64 %d0, [p0];\n{}\nst.global.b32 [%d0], %r1;"
    same, different = "mov.b32 %r1, 3;", "shr.u32 %r1, %r0, 4;"
    assert kinds(run(assemble(body.format(same), ["u64"]), np.zeros(1, np.int32))) == []
    report = run(assemble(body.format(different), ["u64"]), np.zeros(1, np.int32))
    assert kinds(report) == ["conflicting stores"]


def test_a_program_that_reads_what_another_one_writes():
    body = """
    ld.param.u64 %d0, [p0];
    mov.u32 %r1, %ctaid.x;
    mad.wide.u32 %d1, %r1, 4, %d0;
    st.global.b32 [%d1], %r1;
    ld.global.b32 %r2, [%d{}];
    """
    assert kinds(run(assemble(body.format(1), ["u64"]), np.zeros(3, np.int32), grid=(3,))) == []
    report = run(assemble(body.format(0), ["u64"]), np.zeros(3, np.int32), grid=(3,))
    assert kinds(report) == ["program order"]
    assert "program 1 reads what program 0 wrote" in str(report.findings[0])


def test_loops_that_lanes_and_programs_leave_at_different_times():
    body = """
    mov.u32 %r1, %ctaid.x;
    add.s32 %r2, %r1, %r0;
    mov.b32 %r3, 0; mov.b32 %r4, 0;
    LOOP:
    add.s32 %r4, %r4, %r3;
    add.s32 %r3, %r3, 1;
    setp.le.u32 %p1, %r3, %r2;
    @%p1 bra LOOP;
    mov.b32 %r6, 0;
    BARRIERS:
    bar.sync 0;
    add.s32 %r6, %r6, 1;
    setp.le.u32 %p1, %r6, %r1;
    @%p1 bra BARRIERS;
    ld.param.u64 %d0, [p0];
    mad.lo.s32 %r5, %r1, 64, %r0;
    mad.wide.u32 %d1, %r5, 4, %d0;
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
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.b32 [%d1+8], %r1;
    """
    out = np.zeros(66, np.int32)
    run(assemble(body, ["u64"], threads=64), out).check()
    assert out[:2].tolist() == [64, 63]
    assert sorted(out[2:].tolist()) == list(range(64))


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
