"""`bench_casts`: every cast runs, and a row compares it with a copy."""

import json

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import bench_casts
from benchmarks.bench_casts import CASTS, COMPILED, EAGER, KERNEL, main
from benchmarks.measuring import report


@pytest.mark.parametrize("name", CASTS)
def test_every_cast_runs_and_moves_what_it_says(name):
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    cast = CASTS[name]
    torch.manual_seed(1)  # the other operand of some
    out = cast.on(x)()
    torch.manual_seed(1)
    plain = cast.in_torch(x)()
    out, plain = ((o,) if isinstance(o, torch.Tensor) else o for o in (out, plain))
    for mine, theirs in zip(out, plain, strict=True):
        assert torch.equal(mine.float(), theirs.float())
    data = [t for t in out if t.dtype == torch.float8_e4m3fn]
    written = sum(min(t.numel(), x.numel()) for t in data) / x.numel()  # without groups' padding
    sources = 1 + cast.arguments.count(bench_casts.ANOTHER)
    reads = (cast.bytes_per_element - written) / x.element_size() / sources
    assert reads in (1, 2), "whole passes over the source"
    is_two_pass = "dynamic" in name or name in ("rowwise both", "rowwise tokens")
    assert reads == (2 if is_two_pass else 1)


CASTS_OF = ["static both", "dynamic rows"]
TINY = ["--device", "cpu", "--shapes", "64,128", "--repeats", "2", "--warmup", "1", "--casts"]


def test_every_kernel_that_casts_is_measured():
    """`cast_weight` casts an optimizer's master weight: `bench_optim` measures the step."""
    files = {path.stem for path in (report.ROOT / "float8" / "kernels" / "gpu").glob("*cast*.py")}
    assert {cast.file for cast in CASTS.values()} == files - {"cast_weight"}


def test_rows_compare_with_a_copy(tmp_path):
    file = tmp_path / "casts.json"
    assert main([*TINY, *CASTS_OF, "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["contender"], row["cast"]) for row in rows] == [
        (contender, cast) for contender in (EAGER, COMPILED) for cast in CASTS_OF
    ]
    for row in rows:
        moved = row["bytes_per_element"] * 64 * 128
        assert row["gbps"] == pytest.approx(moved / row["ms"] / 1e6, rel=1e-6)
        assert row["of_copy"] == pytest.approx(row["gbps"] / row["copy_gbps"])
        assert "met" not in row, "the target is the kernels'"


def test_every_kernel_comes_before_every_other_contender(tmp_path, monkeypatch, capsys):
    """On a GPU, for which a stand-in answers; rows are in the file as soon as they are measured."""
    file, seen = tmp_path / "casts.json", []
    of_copy = {"static both": 0.95, "dynamic rows": 0.7}

    def measure(contender, shape, name, options):
        seen.append((contender, shape, name))
        if len(seen) == 6:
            raise KeyboardInterrupt
        row = {"contender": contender, "shape": str(shape), "cast": name, "of_copy": of_copy[name]}
        return row | {"met": "yes" if of_copy[name] >= bench_casts.TARGET else "no"}

    monkeypatch.setattr(bench_casts, "measure", measure)
    monkeypatch.setattr(torch, "device", lambda name: type("Gpu", (), {"type": "cuda"}))
    monkeypatch.setattr(
        report, "environment", lambda device: {"device": "d", "torch": 2, "threads": 1}
    )
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, *CASTS_OF, "--shapes", "64,128", "8,8", "-o", str(file)])
    assert [contender for contender, *_ in seen] == [KERNEL] * 4 + [EAGER] * 2
    assert [shape for _, shape, _ in seen[:4]] == [(64, 128)] * 2 + [(8, 8)] * 2
    assert len(json.loads(file.read_text())["rows"]) == 5
    said = capsys.readouterr().out
    assert "2 of 4 kernels reach 90% of a copy; not: dynamic rows (64, 128) 70%" in said


@pytest.mark.parametrize("text", ["64", "64,", "0,5", "1,2,3"])
def test_refuses_what_is_no_matrix(text, capsys):
    with pytest.raises(SystemExit):
        main(["--shapes", text])
    assert "a shape is M,K" in capsys.readouterr().err
