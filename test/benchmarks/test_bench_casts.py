"""`bench_casts.py`: every cast does its work, and a row says how near it is to a copy."""

import json

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import bench_casts
from benchmarks.bench_casts import CASTS, EAGER, main


@pytest.mark.parametrize("name", CASTS)
def test_every_cast_runs_and_moves_what_it_says(name):
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    cast = CASTS[name]
    out = cast.on(x)()
    plain = cast.in_torch(x)()
    out, plain = ((o,) if isinstance(o, torch.Tensor) else o for o in (out, plain))
    for mine, theirs in zip(out, plain, strict=True):
        assert torch.equal(mine.float(), theirs.float())
    written = sum(t.numel() for t in out if t.dtype == torch.float8_e4m3fn) / x.numel()
    reads = (cast.bytes_per_element - written) / x.element_size()
    assert reads in (1, 2), "whole passes over the source"
    is_two_pass = "dynamic" in name or name == "rowwise both"
    assert reads == (2 if is_two_pass else 1)


def test_rows_compare_with_a_copy(tmp_path):
    file = tmp_path / "casts.json"
    casts = ["static both", "dynamic rows"]
    arguments = ["--device", "cpu", "--shapes", "64,128", "--repeats", "2", "--warmup", "1"]
    assert main([*arguments, "--casts", *casts, "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["cast"], row["contender"]) for row in rows] == [
        (cast, contender) for cast in casts for contender in (EAGER, bench_casts.COMPILED)
    ]
    for row in rows:
        moved = row["bytes_per_element"] * 64 * 128
        assert row["gbps"] == pytest.approx(moved / row["ms"] / 1e6, rel=1e-6)
        assert row["of_copy"] == pytest.approx(row["gbps"] / row["copy_gbps"])
        assert "met" not in row, "the target is the kernels'"


@pytest.mark.parametrize("text", ["64", "64,", "0,5", "1,2,3"])
def test_refuses_what_is_no_matrix(text, capsys):
    with pytest.raises(SystemExit):
        main(["--shapes", text])
    assert "a shape is M,K" in capsys.readouterr().err
