"""The scan of machine code on small listings: planted faults are found, clean code is left alone.

Listings are written by hand; `test/kernels/gpu/test_machine_code.py` scans the kernels that ship.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from scripts.kernel_tools.__main__ import main
from scripts.kernel_tools.sass.findings import Scan, scan
from scripts.kernel_tools.sass.instructions import parse

CONVERT = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
HEAD = """
    LDC R1, c[0x0][0x28]
    LDC.64 R2, c[0x0][0x210]
    S2R R4, SR_TID.X
    LDG.E R6, desc[UR4][R2.64]
    LDG.E R7, desc[UR4][R2.64+0x4]
    FMUL R6, R6, R7
    ISETP.NE.AND P0, PT, R4, RZ, PT
"""


def scanned(body: str, head: str = HEAD) -> Scan:
    """Of a listing; lines that end with a colon are labels."""
    address, lines = 0, [".text.kernel:"]
    for line in (head + body).strip().splitlines():
        text = line.strip()
        if text.endswith(":"):
            lines.append(text)
        elif text:
            lines.append(f"        /*{address:04x}*/                   {text} ;")
            address += 16
    return scan("\n".join(lines))


STORE = "STG.E desc[UR4][R2.64], R8\n EXIT"

FAULTS = {
    "the stack pointer": f"""
        LOP3.LUT R8, R1, 0xffff, RZ, 0xc0, !PT
        {STORE}""",
    "in the upper byte, through a shift and a sum": f"""
        {CONVERT} R9, R6, R7, RZ
        LOP3.LUT R9, R9, 0xff, RZ, 0xc0, !PT
        LOP3.LUT R10, R1, 0xff, RZ, 0xc0, !PT
        IMAD R8, R10, 0x100, R9
        {STORE}""",
    "merged into a conversion": f"""
        {CONVERT} R8, R6, R7, R1
        {STORE}""",
    "converted": f"""
        {CONVERT} R8, R1, R7, RZ
        {STORE}""",
    "in one branch of two": f"""
        MOV R8, R6
        @!P0 BRA `(.L_x_0)
        MOV R8, R1
        .L_x_0:
        {STORE}""",
    "overwritten under a predicate only": f"""
        MOV R8, R1
        @P0 MOV R8, R6
        {STORE}""",
    "under a predicate that was set anew": """
        MOV R8, R1
        @P0 MOV R8, R6
        ISETP.NE.AND P0, PT, R4, 0x1, PT
        @P0 STG.E desc[UR4][R2.64], R8
        EXIT""",
    "carried once around a loop": """
        MOV R8, R6
        MOV R9, R6
        .L_x_0:
        STG.E desc[UR4][R2.64], R8
        MOV R8, R9
        MOV R9, R1
        IADD3 R4, R4, -0x1, RZ
        ISETP.NE.AND P0, PT, R4, RZ, PT
        @P0 BRA `(.L_x_0)
        EXIT""",
    "returned by a function": f"""
        MOV R10, 0x90
        CALL.REL.NOINC `($function)
        MOV R8, R9
        {STORE}
        $function:
        MOV R9, R1
        RET.REL.NODEC R10 `(kernel)""",
    "in the last of four registers": """
        CS2R R8, SRZ
        CS2R R10, SRZ
        MOV R11, R1
        STG.E.128 desc[UR4][R2.64], R8
        EXIT""",
    "through a uniform register": f"""
        R2UR UR6, R1
        MOV R8, UR6
        {STORE}""",
    "through local memory": f"""
        STL [R1], R1
        LDL R8, [R1]
        {STORE}""",
    "in a reduction": """
        MOV R8, R1
        RED.E.MAX.S32.STRONG.GPU [R2.64], R8
        EXIT""",
    "in a byte store": """
        LOP3.LUT R8, R1, 0xff, RZ, 0xc0, !PT
        STS.U8 [R4], R8
        EXIT""",
    "in the high word of a sum of 64 bits": """
        MOV R0, R6
        MOV R7, R6
        IADD.64 R8, R0, R6
        STG.E.64 desc[UR4][R2.64], R8
        EXIT""",
    "in the high word of a copy of 64 bits": """
        MOV R0, R6
        MOV.64 R8, R0
        STG.E.64 desc[UR4][R2.64], R8
        EXIT""",
    "through the lanes of a warp": f"""
        SHFL.BFLY PT, R8, R1, 0x2, 0x1f
        {STORE}""",
}  # fmt: skip


@pytest.mark.parametrize("body", FAULTS.values(), ids=FAULTS)
def test_a_stored_stack_pointer_is_found(body):
    found = scanned(body)
    assert [f.origin for f in found.findings if f.store.name != "STL"] == ["the stack pointer"]
    assert not found.unknown


OTHER_FAULTS = {
    "a register that nothing wrote": f"""
        PRMT R8, R6, 0x5410, R20
        {STORE}""",
    "floating-point arithmetic": f"""
        {CONVERT} R9, R6, R7, RZ
        LOP3.LUT R10, R6, 0xffff, RZ, 0xc0, !PT
        PRMT R8, R9, 0x5410, R10
        {STORE}""",
    "device memory": f"""
        {CONVERT} R8, R6, R6, R7
        {STORE}""",
    "an integer": """
        F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C R8, R6, R6, RZ
        STS.U8 [R4], R8
        STS.U8 [R4+0x1], R4
        EXIT""",
}  # fmt: skip


@pytest.mark.parametrize(("origin", "body"), OTHER_FAULTS.items(), ids=OTHER_FAULTS)
def test_what_else_is_no_result_is_found(origin, body):
    assert [f.origin for f in scanned(body).findings] == [origin]


CLEAN = {
    "addresses in local memory": f"""
        VIADD R1, R1, 0xfffffff8
        STL [R1+0x4], R6
        LDL R8, [R1+0x4]
        {STORE}""",
    "overwritten in both branches": f"""
        MOV R8, R1
        @P0 BRA `(.L_x_0)
        MOV R8, R6
        BRA `(.L_x_1)
        .L_x_0:
        MOV R8, R7
        .L_x_1:
        {STORE}""",
    "overwritten under the predicate of the branch": f"""
        MOV R8, R1
        @!P0 MOV R8, RZ
        @!P0 BRA `(.L_x_0)
        MOV R8, R6
        .L_x_0:
        {STORE}""",
    "overwritten under the predicate of the store": """
        MOV R8, R1
        @P0 MOV R8, R6
        @P0 STG.E desc[UR4][R2.64], R8
        EXIT""",
    "masked": f"""
        LOP3.LUT R8, R1, 0xff, RZ, 0xc0, !PT
        LOP3.LUT R8, R8, 0xff00, RZ, 0xc0, !PT
        {STORE}""",
    "masked by a register": f"""
        IMAD.MOV.U32 R9, RZ, RZ, 0xff00
        LOP3.LUT R8, R1, 0xff, RZ, 0xc0, !PT
        LOP3.LUT R8, R8, R9, RZ, 0xc0, !PT
        {STORE}""",
    "the garbage half shifted out": f"""
        PRMT R8, R6, 0x7632, R20
        IMAD.U32 R8, R8, 0x10000, RZ
        {STORE}""",
    "four conversions, and integers from them": f"""
        {CONVERT} R9, R6, R7, RZ
        {CONVERT} R9, R7, R6, R9
        STG.E desc[UR4][R2.64], R9
        PRMT R8, R9, 0x3120, R9
        SHF.R.U32.HI R10, RZ, 0x8, R9
        IMAD R8, R10, 0x100, R9
        {STORE}""",
    "a float32 beside float8": f"""
        {CONVERT} R9, R6, R7, RZ
        STG.E.U16 desc[UR4][R2.64], R9
        MOV R8, R6
        {STORE}""",
    "64 bits, and floats of uniform registers": """
        UMOV.64 UR6, 0x3fe62e42fefa39ef
        MOV R7, R6
        IADD.64 R8, R6, UR6
        STG.E.64 desc[UR4][R2.64], R8
        IADD R9, -R6, UR7
        UI2F.U32.RP UR8, UR6
        UFFMA UR9, -UR8, UR7, 1
        UFMUL UR9, UR9, UR8
        UFADD UR9, UR9, UR8
        MOV R8, UR9
        STG.E.64 desc[UR4][R2.64], R8
        EXIT""",
    "what one caller keeps": f"""
        MOV R11, R1
        MOV R10, 0xa0
        CALL.REL.NOINC `($function)
        MOV R11, R6
        MOV R10, 0xd0
        CALL.REL.NOINC `($function)
        MOV R8, R11
        {STORE}
        $function:
        FADD R9, R6, R6
        RET.REL.NODEC R10 `(kernel)""",
    "never reached": f"""
        MOV R8, R6
        {STORE}
        MOV R8, R1
        {STORE}""",
}  # fmt: skip


@pytest.mark.parametrize("body", CLEAN.values(), ids=CLEAN)
def test_clean_code_is_left_alone(body):
    found = scanned(body)
    assert not found.findings, str(found)
    assert not found.unknown


def test_a_finding_names_the_byte_its_origin_and_the_store():
    found = scanned(FAULTS["in the upper byte, through a shift and a sum"])
    store = "00b0 STG.E desc[UR4][R2.64], R8"
    assert str(found) == f"byte 1 of R8 may come from the stack pointer: {store}"


def test_an_unknown_instruction_is_named_and_hands_on_garbage():
    found = scanned(f"NEWOP.X R8, R1\n{STORE}")
    assert found.unknown == {"NEWOP.X"}
    assert len(found.findings) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("BRX R8 -0x10\nEXIT", "where does this jump to"),
        ("BRA `(.L_x_7)", "where does this jump to"),
        ("CALL.REL.NOINC `($f)\nEXIT\n$f:\nRET.REL.NODEC R4 `(k)", "where does this return to"),
        ("RET.REL.NODEC R4 `(k)", "returns from no call"),
    ],
)
def test_what_cannot_be_followed_is_an_error(body, said):
    with pytest.raises(ValueError, match=said):
        scanned(body)


def test_nothing_is_not_clean():
    with pytest.raises(ValueError, match="has no instructions"):
        scan("no listing")


def test_operands_and_predicates_are_told_apart():
    found = parse(16, "@!P3 LOP3.LUT P4, R8, R6.reuse, 0xff, RZ, 0xc0, !PT")
    assert (found.guard, found.name, found.predicates) == ("!P3", "LOP3", ("P4",))
    assert found.operands == ("R8", "R6", "0xff", "RZ", "0xc0")


def test_the_command_reads_files_and_directories(tmp_path, capsys):
    good, bad, none = tmp_path / "good", tmp_path / "bad", tmp_path / "empty"
    good.write_text("        /*0000*/  MOV R8, RZ ;\n        /*0010*/  STS [R8], R8 ;\n")
    bad.write_text("        /*0000*/  MOV R8, R1 ;\n        /*0010*/  STS [RZ], R8 ;\n")
    none.mkdir()
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"\x7fELF and nothing more")
    assert main(["scan", str(broken), str(good)]) == 1, "and the next file is read"
    assert re.search(r"nvdisasm of .* cannot read it(.|\n)*nothing found", capsys.readouterr().out)
    assert main(["scan", str(good)]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["scan", str(good), str(bad)]) == 1
    assert "the stack pointer" in capsys.readouterr().out
    assert main(["scan", __file__]) == 1
    assert "has no instructions" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"a directory without a \.cubin"):
        main(["scan", str(none)])
