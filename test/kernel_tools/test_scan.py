"""The scan of machine code on small listings: planted faults are found, clean code is left alone.

Listings are written by hand (`listings.txt`); `test/kernels/gpu/test_machine_code.py` scans the
kernels that ship.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from scripts.kernel_tools.__main__ import main
from scripts.kernel_tools.sass.findings import Scan, scan

_, *parts = re.split(
    r"^== (.*)\n", Path(__file__).with_name("listings.txt").read_text(), flags=re.M
)
LISTINGS = dict(zip(parts[::2], parts[1::2], strict=True))
HEAD = LISTINGS.pop("HEAD")


def scanned(body: str) -> Scan:
    """Of a listing; lines that end with a colon are labels."""
    address, lines = 0, [".text.kernel:"]
    for text in filter(None, map(str.strip, (HEAD + body).splitlines())):
        if text.endswith(":"):
            lines.append(text)
        else:
            lines.append(f"        /*{address:04x}*/                   {text} ;")
            address += 16
    return scan("\n".join(lines))


@pytest.mark.parametrize("name", LISTINGS)
def test_what_is_stored_and_no_result(name):
    origin, found = name.partition(":")[0], scanned(LISTINGS[name])
    if origin == "nothing":
        assert not found.findings, str(found)
    else:
        assert [f.origin for f in found.findings if f.store.name != "STL"] == [origin]
    assert not found.unknown


def test_a_finding_names_the_byte_its_origin_and_the_store():
    found = scanned(LISTINGS["the stack pointer: in the upper byte, through a shift and a sum"])
    store = "00b0 STG.E desc[UR4][R2.64], R8"
    assert str(found) == f"byte 1 of R8 may come from the stack pointer: {store}"


def test_an_unknown_instruction_is_named_and_hands_on_garbage():
    found = scanned("NEWOP.X R8, R1\nSTG.E desc[UR4][R2.64], R8\nEXIT")
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


def test_the_command_reads_files_and_directories(tmp_path, capsys):
    good, bad, broken = tmp_path / "good", tmp_path / "bad", tmp_path / "broken.cubin"
    good.write_text("        /*0000*/  MOV R8, RZ ;\n        /*0010*/  STS [R8], R8 ;\n")
    bad.write_text("        /*0000*/  MOV R8, R1 ;\n        /*0010*/  STS [RZ], R8 ;\n")
    broken.write_bytes(b"\x7fELF and nothing more")
    for files, status, said in (
        ((broken, good), 1, r"nvdisasm of .* cannot read it(.|\n)*nothing found"),
        ((tmp_path,), 1, "cannot read it"),
        ((good,), 0, "nothing found"),
        ((good, bad), 1, "the stack pointer"),
        ((__file__,), 1, "has no instructions"),
    ):
        assert main(["scan", *map(str, files)]) == status
        assert re.search(said, capsys.readouterr().out)
    broken.unlink()
    with pytest.raises(SystemExit, match=r"a directory without a \.cubin"):
        main(["scan", str(tmp_path)])
