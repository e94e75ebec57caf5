"""Result files are read as the benchmarks write them, and others are refused."""

import json
from pathlib import Path

import pytest

from benchmarks.cost_model.results import ResultFile, TimedGemm, datasheet_of, read_result
from float8.config import RECIPES
from float8.estimate.devices import DEVICES
from float8.estimate.shapes import Shape

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def linear_row(**changes) -> dict:
    row = {"shape": "ffn.w1 (64,32,16)", "layer": "rowwise", "ms": 2.0, "ratio": 0.5}
    return row | {"saved_ratio": 0.75} | changes


def report(rows: list[dict], mode: str = "eager") -> ResultFile:
    return ResultFile("a.json", "bench_linear", "NVIDIA H100", False, mode, rows)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*bench_linear*.json")), ids=lambda p: p.name)
def test_committed_layers_are_read(path):
    layers = list(read_result(path).layers())
    assert {layer.recipe for layer in layers} <= set(RECIPES) and layers
    raw = [row for row in json.loads(path.read_text())["rows"] if row["layer"] in RECIPES]
    assert [layer.seconds for layer in layers] == [row["ms"] / 1e3 for row in raw]
    assert {layer.mode for layer in layers} <= {"eager", "compiled"}


def test_committed_products_are_read():
    read = read_result(RESULTS / "cpu_bench_matmul.json")
    products = list(read.gemms())
    shapes = {product.shape for product in products}
    assert read.on_cpu and read.benchmark == "bench_matmul"
    assert sum(product.kind == "bf16" for product in products) == len(shapes)
    assert min(product.seconds for product in products) > 0


def test_a_row_is_what_it_says():
    (layer,) = report([linear_row()]).layers()
    assert layer.shape == Shape(64, 32, 16) and layer.name == "ffn.w1 (64,32,16)"
    assert (layer.recipe, layer.seconds, layer.ratio) == ("rowwise", 2e-3, 0.5)
    assert layer.mode == "eager"


def test_rows_of_others_and_rows_that_failed_are_passed_over():
    rows = [linear_row(layer="nn.Linear"), linear_row(layer="torchao rowwise"),
            {"shape": "(1,1,1)", "layer": "blockwise", "error": "refused"}]  # fmt: skip
    assert list(report(rows).layers()) == []


def test_a_mode_is_the_rows_or_else_the_files():
    rows = [linear_row(), linear_row(mode="compiled")]
    assert [layer.mode for layer in report(rows).layers()] == ["eager", "compiled"]
    assert [layer.mode for layer in report(rows, "compiled").layers()] == ["compiled"] * 2


def test_emulation_is_compared_in_eager_mode_and_gpus_compiled_where_they_can():
    both = report([linear_row(), linear_row(mode="compiled")])
    assert [layer.mode for layer in both.layers_on(emulates=True)] == ["eager"]
    assert [layer.mode for layer in both.layers_on(emulates=False)] == ["compiled"]
    assert [layer.mode for layer in report([linear_row()]).layers_on(emulates=False)] == ["eager"]


def test_the_baseline_of_a_shape_is_read_once():
    row = {"shape": "(8,16,32)", "ms": 2.0, "baseline_ms": 1.0}
    rows = [row | {"granularity": kind} for kind in ("tensorwise", "rowwise", "other")]
    assert list(report(rows).gemms()) == [
        TimedGemm(Shape(8, 16, 32), "bf16", 1e-3),
        TimedGemm(Shape(8, 16, 32), "tensorwise", 2e-3),
        TimedGemm(Shape(8, 16, 32), "rowwise", 2e-3),
    ]


def test_a_row_without_a_shape_is_named():
    with pytest.raises(ValueError, match="got 'somewhere'"):
        list(report([linear_row(shape="somewhere")]).layers())


ENVIRONMENT = {"device": "d", "capability": None}
DEMO = {"benchmark": "demo", "environment": ENVIRONMENT, "command": "", "rows": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a result file of a benchmark"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        (json.dumps(DEMO), "is by demo; what is needed is bench_matmul or bench_linear"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_result(tmp_path / "file.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.json is not a result file"):
        read_result(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ms": 0}, "ms must be above 0"),
        ({"ms": "fast"}, "ms must be a finite number, got 'fast'"),
        ({"ratio": float("nan")}, "ratio must be a finite number, got nan"),
        ({"ratio": 10**400}, "ratio must be a finite number"),
        ({"shape": f"({10**400},1,1)"}, "integers >= 1"),
        ({"shape": "somewhere"}, "got 'somewhere'"),
        ({"shape": None}, "TypeError"),
    ],
)
def test_a_row_that_cannot_be_read_names_its_file(changes, said, tmp_path):
    fields = {**DEMO, "benchmark": "bench_linear", "rows": [linear_row(**changes)]}
    (tmp_path / "file.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"file\.json has a row that cannot be read.*{said}"):
        read_result(tmp_path / "file.json")


def test_a_directory_and_bytes_are_refused(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(ValueError, match=f"{path.name} is not a result file"):
            read_result(path)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("Intel(R) Xeon(R) Processor", None),
    ],
)
def test_what_a_driver_says_is_matched_to_the_same_board_only(hardware, name):
    assert datasheet_of(hardware) is DEVICES.get(name)
