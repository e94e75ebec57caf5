"""`bench_linear`: its command line, on small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

from benchmarks import bench_linear
from benchmarks.measuring import contenders, harness, limit, targets
from benchmarks.measuring.contenders import SCALED
from benchmarks.measuring.shapes import Shape

M, K, N = 48, 128, 64
TINY = ["--device", "cpu", "--shapes", f"{M},{K},{N}", "--repeats", "3", "--warmup", "1"]
OURS = [*SCALED, "static"]


def run(tmp_path: Path, *arguments: str) -> list[dict]:
    """The rows that the benchmark writes when run with `arguments`, without torchao."""
    file = tmp_path / "out.json"
    assert bench_linear.main([*TINY, "--no-peer", *arguments, "-o", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


def assert_ratios_are_paired(rows: list[dict]) -> None:
    """Every row's ratio is the median of ratios to the same mode's nn.Linear."""
    base = {row["mode"]: row["samples_s"] for row in rows if row["layer"] == "nn.Linear"}
    for row in rows:
        pairs = zip(row["samples_s"], base[row["mode"]], strict=True)
        assert row["ratio"] == median(mine / other for mine, other in pairs)


@pytest.fixture
def compiled(monkeypatch) -> list[object]:
    """The models given to torch.compile, which returns them unchanged."""
    given: list[object] = []

    def note(model: object, **kwargs: object) -> object:
        given.append(model)
        return model

    monkeypatch.setattr(torch, "compile", note)
    return given


def test_every_recipe_is_measured(tmp_path, capsys):
    rows = run(tmp_path, "--no-floor")
    assert [row["layer"] for row in rows] == ["nn.Linear", *OURS]
    assert [row["error"] for row in rows if "error" in row] == []
    assert {(row["shape"], row["M"], row["K"], row["N"]) for row in rows} == {
        (f"({M},{K},{N})", M, K, N)
    }
    assert_ratios_are_paired(rows)
    printed = capsys.readouterr().out
    assert [row["layer"] for row in rows if row["layer"] not in printed] == []
    for row in rows:
        assert row["tflops"] == pytest.approx(3 * 2 * M * K * N / row["ms"] / 1e9)


def test_what_is_saved_for_backward_is_weighed(tmp_path):
    plain, tensorwise = run(tmp_path, "--no-floor", "--recipes", "tensorwise")
    assert plain["saved_mib"] == M * K * 2 / 2**20
    assert tensorwise["saved_ratio"] == tensorwise["saved_mib"] / plain["saved_mib"]
    assert 0.5 <= tensorwise["saved_ratio"] <= 0.52


def test_outputs_resemble_those_of_nn_linear(tmp_path):
    # E4M3 keeps 3 mantissa bits: a random operand is off by about 2^-5 of itself, both by 28 dB.
    plain, *rows = run(tmp_path, "--no-floor")
    assert "sqnr_db" not in plain
    assert {row["layer"]: row["sqnr_db"] for row in rows if not 24 < row["sqnr_db"] < 40} == {}


def test_on_a_cpu_the_floor_is_a_row_and_the_limit_is_not(tmp_path):
    rows = run(tmp_path, "--recipes", "rowwise", "delayed")
    assert [row["layer"] for row in rows] == ["nn.Linear", "rowwise", "delayed", "floor rowwise"]
    assert rows[-1]["ratio"] > 1  # nn.Linear's step, and casts
    assert [row for row in rows if "of_limit" in row or "launches" in row] == []


def test_the_limit_is_measured_on_demand(tmp_path):
    plain, *rows = run(tmp_path, "--no-floor", "--limit", "--recipes", "rowwise", "static")
    assert "of_limit" not in plain
    assert [row for row in rows if not (row["limit_ms"] > 0 and row["of_limit"] > 0)] == []


def test_nearness_is_paired_with_the_row_of_its_mode():
    operands = contenders.Operands.random(Shape(M, K, N), "cpu", 0)
    plan = contenders.config_of("static", operands).plan
    products, steps = [1.0, 2.0, 3.0], [2.0, 2.0, 12.0]
    copy = limit.Copy(torch.zeros(1), torch.zeros(1))
    samples = {
        limit.signature(plan): products,
        limit.COPY: [0.0] * 3,
        "eager static": steps,
        "compiled static": products,
    }
    rounds = harness.Rounds({limit.COPY: copy}, {}, samples)
    row = bench_linear.nearness("static", "eager", Shape(M, K, N), operands, rounds)
    assert row == {"limit_ms": 2000.0, "of_limit": 0.5}
    assert bench_linear.nearness("nn.Linear", "eager", Shape(M, K, N), operands, rounds) == {}


def test_eager_and_compiled_are_measured_in_one_run(tmp_path, compiled):
    rows = run(tmp_path, "--modes", "eager", "compiled", "--recipes", "rowwise", "--no-floor")
    assert [type(layer).__name__ for layer in compiled] == ["Linear", "Float8Linear"]
    assert [(row["mode"], row["layer"]) for row in rows] == [
        ("eager", "nn.Linear"),
        ("eager", "rowwise"),
        ("compiled", "nn.Linear"),
        ("compiled", "rowwise"),
    ]
    assert_ratios_are_paired(rows)


def test_eager_is_in_the_file_before_anything_is_compiled(tmp_path, monkeypatch):
    """Asked for in the other order too; a compilation that ends the run costs no eager row."""

    file = tmp_path / "out.json"

    def killed(model, **kwargs):
        assert len(json.loads(file.read_text())["rows"]) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", killed)
    arguments = ["--modes", "compiled", "eager", "--recipes", "rowwise", "--no-floor", "--no-peer"]
    with pytest.raises(KeyboardInterrupt):
        bench_linear.main([*TINY, *arguments, "-o", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["mode"], row["layer"]) for row in rows] == [
        ("eager", "nn.Linear"),
        ("eager", "rowwise"),
    ]


def test_compiled_is_compared_with_compiled(tmp_path, compiled):
    rows = run(tmp_path, "--compile", "--recipes", "rowwise")
    assert [row["mode"] for row in rows] == ["compiled"] * 3
    assert len(compiled) == 4  # nn.Linear, the layer, and the floor's nn.Linear and casts


def broken(operands: object, recipe: str) -> nn.Module:
    raise ImportError("no such symbol")


def test_a_peer_that_fails_is_shown_and_fails_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "torchao_layer", broken)
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: object())
    file = tmp_path / "out.json"
    arguments = ["--recipes", "tensorwise", "delayed", "--no-floor", "-o", str(file)]
    assert bench_linear.main([*TINY, *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["layer"] for row in rows] == [
        "nn.Linear",
        "tensorwise",
        "torchao tensorwise",
        "delayed",
    ]
    assert rows[2]["error"] == "ImportError: no such symbol"


def test_a_layer_of_ours_that_fails_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(contenders, "float8_layer", broken)
    arguments = [*TINY, "--no-peer", "--no-floor", "--recipes", "tensorwise"]
    assert bench_linear.main(arguments) == 1
    assert "ImportError: no such symbol" in capsys.readouterr().out


def test_the_targets_shape_is_judged_on_cuda_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "SIZES", (M, K, N))
    run(tmp_path, "--no-floor", "--recipes", "tensorwise")
    assert "against" not in capsys.readouterr().out


def test_speed_ups_are_drawn(tmp_path):
    picture = tmp_path / "out.png"
    run(tmp_path, "--no-floor", "--recipes", "static", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_recipe_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_linear.main([*TINY, "--recipes", "int8"])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert [name for name in ("int8", *OURS) if name not in message] == []


def test_compiling_without_a_compiler_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(contenders.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        bench_linear.main([*TINY, "--compile"])
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_casts_that_the_compiler_does_not_get_are_not_measured_as_its_own(
    tmp_path, monkeypatch, capsys
):
    """With an older ptxas the kernels would run, under the name of the compiler's casts."""
    monkeypatch.setattr(bench_linear, "compiler_may_cast", lambda family: False)
    file = tmp_path / "out.json"
    asked = [*TINY, "--no-peer", "--compile", "--compiled-casts", "aten", "-o", str(file)]
    assert bench_linear.main(asked) == 0
    assert "older than 13.1" in capsys.readouterr().out
    assert not file.exists()
