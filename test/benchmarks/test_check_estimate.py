"""The programs that measure a device and compare predictions with results."""

from __future__ import annotations

import pytest
from result_files import linear_rows, matmul_rows, write

from benchmarks import check_estimate, measure_device
from float8.estimate import DEVICES, Device
from float8.estimate.shapes import Shape

H100 = DEVICES["H100"]
SHAPES = [Shape(16384, 8192, 8192), Shape(4096, 4096, 4096)]


def test_results_are_fitted_and_checked(tmp_path, capsys):
    linear = write(tmp_path / "linear.json", "bench_linear", linear_rows(H100, SHAPES))
    matmul = write(tmp_path / "matmul.json", "bench_matmul", matmul_rows(H100, SHAPES))
    file = tmp_path / "new" / "fitted.json"
    assert measure_device.main(["--fit", str(matmul), str(linear), "--save", str(file)]) == 0
    assert Device.load(file).name == "NVIDIA H100 80GB HBM3"
    assert f"wrote {file}" in capsys.readouterr().out
    assert check_estimate.main([str(linear), "--device", str(file)]) == 0
    assert "a description, no prediction" in capsys.readouterr().out
    assert check_estimate.main([str(linear)]) == 0
    out = capsys.readouterr().out
    assert "predicted for H100 SXM" in out and "Median error of time: 0%" in out


def test_this_machine_is_measured_where_asked(tmp_path, monkeypatch, capsys):
    for program in (measure_device, check_estimate):
        monkeypatch.setattr(program, "measure", lambda: H100)
    assert measure_device.main(["--save", str(tmp_path / "here.json")]) == 0
    assert Device.load(tmp_path / "here.json") == H100
    linear = write(tmp_path / "linear.json", "bench_linear", linear_rows(H100, SHAPES))
    assert check_estimate.main([str(linear), "--device", "measured"]) == 0
    assert "predicted for H100 SXM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (measure_device, [], "required: --save"),
        (measure_device, ["--save", "a.json", "--device", "H100"], "--device is for --fit"),
        (measure_device, ["--fit", __file__, "--save", "/dev/null"], "not a result file"),
        (measure_device, ["--save", f"{__file__}/device.json"], "test_check_estimate.py"),
        (check_estimate, ["."], ". is not a result file of a benchmark (IsADirectoryError"),
        (check_estimate, ["missing.json"], "missing.json is not a result file"),
    ],
)
def test_bad_input_ends_with_what_to_do(program, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
