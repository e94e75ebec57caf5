"""The command line, called and once run as people run it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from estimate.result_files import linear_rows, matmul_rows, write

from float8.config import RECIPES
from float8.estimate import DEVICES, Device, estimate
from float8.estimate.__main__ import main
from float8.estimate.roofline import Shape

ROOT = Path(__file__).resolve().parents[2]
H100 = DEVICES["H100"]
SHAPES = [Shape(16384, 8192, 8192), Shape(4096, 4096, 4096)]


def test_shapes_are_predicted_as_by_the_function(capsys):
    assert main(["8192,8192,8192", "512,256,256", "--device", "H200", "--recipes", "delayed"]) == 0
    shapes = [(8192,) * 3, (512, 256, 256)]
    expected = estimate(shapes, device="H200", recipes=["delayed"], show=False)
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_default_is_an_h100(capsys):
    main(["8192,8192,8192"])
    assert "on H100 SXM (sm_90)" in capsys.readouterr().out


def test_options_reach_the_prediction(capsys):
    main(
        [
            "8192,8192,8192",
            "--weights-cached",
            "--gradient-accumulation",
            "8",
            "--recipes",
            *RECIPES,
        ]
    )
    expected = estimate(
        [(8192,) * 3], recipes=list(RECIPES), weights_cached=True, gradient_accumulation=8,
        show=False,
    )  # fmt: skip
    assert capsys.readouterr().out == f"{expected}\n"
    main(["8192,8192,8192", "--forward"])
    assert "Forward of one batch" in capsys.readouterr().out


def test_a_prediction_is_written_as_json(tmp_path, capsys):
    main(["8192,8192,8192", "-o", str(tmp_path / "out.json")])
    fields = json.loads((tmp_path / "out.json").read_text())
    assert fields == estimate([(8192,) * 3], show=False).as_dict()
    assert "speed-up" in capsys.readouterr().out


def test_a_device_is_saved_and_used(tmp_path, capsys):
    file = str(tmp_path / "device.json")
    assert main(["--device", "B200", "--save", file]) == 0
    assert Device.load(file) == DEVICES["B200"]
    assert main(["8192,8192,8192", "--device", file]) == 0
    assert "on B200 (sm_100)" in capsys.readouterr().out


def test_results_are_fitted_and_checked(tmp_path, capsys):
    linear = write(tmp_path / "linear.json", "bench_linear", linear_rows(H100, SHAPES))
    matmul = write(tmp_path / "matmul.json", "bench_matmul", matmul_rows(H100, SHAPES))
    file = tmp_path / "fitted.json"
    assert main(["--fit", str(matmul), str(linear), "--save", str(file)]) == 0
    assert Device.load(file).name == "NVIDIA H100 80GB HBM3"
    assert main(["--check", str(linear), "--device", str(file)]) == 0
    assert "a description, no prediction" in capsys.readouterr().out
    assert main(["--check", str(linear)]) == 0
    out = capsys.readouterr().out
    assert "predicted for H100 SXM" in out and "Median error of time: 0%" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to do: give shapes M,K,N, --check FILE, or --save FILE"),
        (["--device", "H100"], "nothing to do"),
        (["1,2"], "a shape is three numbers M,K,N >= 1, not '1,2'"),
        (["1,2,0"], "not '1,2,0'"),
        (["1,2,x"], "not '1,2,x'"),
        (["16,16,16", "--device", "A100"], "unknown device 'A100'; known: H100"),
        (["16,16,16", "--recipes", "rowwize"], "invalid choice: 'rowwize'"),
        (["16,16,16", "--gradient-accumulation", "0"], "gradient_accumulation=0 must be"),
        (["16,16,16", "--gradient-accumulation", "9" * 30], "999 must be a count of microbatches"),
        (["16,16,16", "--gradient-accumulation", "9" * 5000], "a count is at most 1073741824"),
        (["16,16,16", "--gradient-accumulation", "9" * 100], "999 must be a count of microbatches"),
        (["16,16,16", "--gradient-accumulation", "9" * 101], "a count is at most 1073741824"),
        (["16,16,16", "--gradient-accumulation", "many"], "not 'many'"),
        ([f"16,16,{10**12}"], "at most 1073741824, not '16,16,1000000000000'"),
        (["16,16," + "9" * 5000], "at most 1073741824, not '16,16,999"),
        (["--check", "."], ". is not a result file of a benchmark (IsADirectoryError"),
        (["16,16,16", "-o", "."], "cannot write .: it is a directory"),
        (["--save", "."], "cannot write .: it is a directory"),
        (["--save", f"{__file__}/device.json"], f"cannot write {__file__}/device.json"),
        (["--check", "missing.json"], "missing.json is not a result file"),
        (["--check", "a.json", "-o", "b.json"], "-o writes a prediction: give shapes"),
    ],
)
def test_bad_input_ends_with_what_to_do(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_directories_of_outputs_are_made(tmp_path, capsys):
    files = [tmp_path / "a" / "b" / "out.json", tmp_path / "c" / "device.json"]
    assert main(["64,64,64", "-o", str(files[0]), "--save", str(files[1])]) == 0
    assert all(json.loads(file.read_text()) for file in files)
    capsys.readouterr()


def test_a_file_that_may_not_be_written_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(SystemExit) as ended:
        main(["--save", str(tmp_path / "device.json")])
    assert ended.value.code == 2
    assert f"cannot write {tmp_path / 'device.json'}: permission" in capsys.readouterr().err


def test_figures_beyond_arithmetic_name_the_device(tmp_path, capsys):
    fields = json.loads(json.dumps(dataclasses.asdict(H100)))
    fields["products"]["bf16"]["peak"]["value"] = 1e-200
    fields["products"]["bf16"]["best"]["value"] = 1e-200
    file = tmp_path / "device.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(SystemExit) as ended:
        main(["64,64,64", "--device", str(file)])
    assert ended.value.code == 2
    assert f"figures of device {str(file)!r} are too large or small" in capsys.readouterr().err


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "float8.estimate", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_module_runs():
    done = run("8192,4096,14336", "8192,4096,50", "--device", "MI300X", "--recipes", "tensorwise")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "columns=50 not a multiple of 16" in done.stdout
    assert "NOTHING HERE WAS MEASURED" in done.stdout


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "A shape is M,K,N" in said and "--check" in said
