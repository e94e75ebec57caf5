"""The parser reads what compilers write: scopes, labels, guards, vectors, source lines."""

import pytest
from ptx_text import assemble

from scripts.kernel_tools.ptx import PtxError, fusible, parse
from scripts.kernel_tools.ptx.program import Address, Immediate, Register, Special, Symbol, Vector


def parsed(body):
    """The instructions of a body, without the first and the last one of `assemble`."""
    return parse(assemble(body)).instructions[1:-1]


def test_operands():
    (ins,) = parsed("@!%p3 ld.global.L1::evict_first.v2.b32 { %r1, _ }, [ %d1 + -16 ], 0x10;")
    assert (ins.name, ins.type, ins.modifiers[:2]) == ("ld", "b32", ("global", "L1::evict_first"))
    assert ins.guard == Register("%p3", 1, negated=True)
    vector, address, number = ins.operands
    assert vector == Vector((Register("%r1", 32), Symbol("_")))
    assert address == Address(Register("%d1", 64), -16)
    assert number == Immediate(16)
    (ins,) = parsed("setp.lt.and.f32 %p1|%p2, 0f3F800000, 0fBF800000, !%p4;")
    assert (ins.operands[0], ins.second) == (Register("%p1", 1), Register("%p2", 1))
    assert ins.operands[1:] == (
        Immediate(0, 0x3F800000), Immediate(0, 0xBF800000), Register("%p4", 1, True)
    )  # fmt: skip
    (ins,) = parsed("mov.u32 %r1, %ctaid.y;")
    assert ins.operands[1] == Special("%ctaid.y")


def test_registers_of_inner_scopes_are_others():
    outer, first, second, after = parsed("""
    mov.b32 %r1, 1;
    { .reg .b32 a, b<2>; mov.b32 a, %r1; }
    {
    .reg .b64 a; mov.b64 a, 3; }
    mov.b32 %r2, %r1;
    """)
    assert first.operands[0].bits == 32 and second.operands[0].bits == 64
    assert first.operands[0] != second.operands[0]
    assert first.operands[1] == outer.operands[0] == after.operands[1]


def test_blocks_begin_where_branches_go():
    program = parse(
        assemble("NOWHERE:\nadd.s32 %r1, %r0, 1; LOOP: add.s32 %r1, %r1, 1;\nbra LOOP;")
    )
    assert program.labels == {"LOOP": 1}
    assert [len(block) for block in program.blocks] == [2, 2, 1]  # mov; add | add; bra | ret


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "no .entry"),
        (assemble("").rpartition("}")[0], "last brace is missing"),
        (assemble("add.s32 %r1, %q0, 1;"), "no register %q0"),
        (assemble("bra NOWHERE;"), "no label NOWHERE"),
        (assemble("") + ".visible .func f() { ret; }", "a function beside its kernel"),
    ],
)
def test_what_cannot_be_read(text, said):
    with pytest.raises(PtxError, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("product", "sum_", "found"),
    [("mul.f32", "add.f32", 1), ("mul.rn.f32", "add.f32", 0), ("mul.f32", "add.rn.f32", 0)],
)
def test_products_that_ptxas_may_fuse(product, sum_, found):
    text = assemble(f"{product} %f1, %f2, %f3;\n{sum_} %f4, %f5, %f1;\nadd.f32 %f6, %f4, %f2;")
    assert len(fusible(parse(text))) == found
