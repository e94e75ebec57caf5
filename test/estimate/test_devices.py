"""Every figure has a source, files are read back, bad figures are refused; devices are found."""

import dataclasses
import json
from pathlib import Path

import pytest

from float8.estimate import devices
from float8.estimate.devices import ANY_PASS, BF16, DEVICES, SHEETS, Device, GemmSpeed, find_device

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
DEVICE = Device("d", "sm_90", 5.0, 1.0, 132, {BF16: GemmSpeed(50.0, 0.6)})


@pytest.mark.parametrize(
    ("name", "bf16", "float8", "bandwidth"),
    # Dense peaks from the vendors' sheets; NVIDIA prints H100 as 1979 and 3958 "with sparsity".
    [
        ("H100", 1979 / 2, 3958 / 2, 3.35),
        ("H200", 1979 / 2, 3958 / 2, 4.8),
        # HGX boards of eight: 36 and 72 PFLOPS with sparsity, 62 TB/s of B200s
        ("B200", 36e3 / 16, 72e3 / 16, 7.7),
        ("B300", 36e3 / 16, 72e3 / 16, 8),
        ("MI300X", 1307.4, 2614.9, 5.3),
    ],
)
def test_the_table_holds_the_datasheets_dense_figures(name, bf16, float8, bandwidth):
    _, _, peaks, parts, terabytes, copied, *_ = SHEETS[name]
    assert peaks == pytest.approx((bf16, float8), rel=1e-3) and terabytes == bandwidth
    device = DEVICES[name]
    assert device.bandwidth == terabytes * 1e12 * copied
    assert device.products[BF16].rate == pytest.approx(peaks[0] * 1e12 * parts[0])
    for kind in set(device.products) - {BF16}:
        assert device.products[kind].rate <= peaks[1] * 1e12 * parts[1]


def test_a_pass_runs_at_its_own_rate_or_at_any_or_at_the_bandwidth():
    assert DEVICE.pass_seconds("cast rowwise", 20.0) == 20.0 / 5.0 + 1.0
    with_any = dataclasses.replace(DEVICE, passes={ANY_PASS: 4.0})
    assert with_any.pass_seconds("cast rowwise", 20.0) == 20.0 / 4.0 + 1.0
    both = dataclasses.replace(DEVICE, passes={ANY_PASS: 4.0, "cast rowwise": 2.0})
    assert both.pass_seconds("cast rowwise", 20.0) == 20.0 / 2.0 + 1.0
    assert both.pass_seconds("cast 1x128", 20.0) == 20.0 / 4.0 + 1.0


@pytest.mark.parametrize("device", [*DEVICES.values(), DEVICE], ids=lambda device: device.name)
def test_a_device_comes_back_from_its_file(device, tmp_path):
    device = dataclasses.replace(device, passes={"cast given transposed": 1 / 3})
    device.save(tmp_path / "device.json")
    assert Device.load(tmp_path / "device.json") == device


H100 = DEVICES["H100"]


def test_names_are_found_in_any_case_and_devices_are_themselves():
    assert find_device("H100") is find_device("h100") is find_device(H100) is H100
    assert find_device("mi300x") is DEVICES["MI300X"]


@pytest.mark.parametrize("name", ["A100", "", "H100 PCIe", "missing.json", "measured"])
def test_an_unknown_device_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown device '{name}'; known: H100, .*measure_device"):
        find_device(name)


KERNEL_OF_PASS = {
    "amax tensorwise": "amax",
    "amax tensorwise transposed": "amax",
    "amax rowwise": "amax, rows and columns",
    "amax rowwise transposed": "amax, columns",
    "cast tensorwise": "cast, e4m3, rows and columns",
    "cast tensorwise transposed": "cast by a given scale, e4m3, columns",
    "cast given": "cast by a given scale, e5m2, rows and columns, amax",
    "cast given transposed": "cast by a given scale, e4m3, columns",
    "cast rowwise": "cast_rowwise, e4m3, rows and columns",
    "cast rowwise transposed": "cast_rowwise, e4m3, columns",
    "cast 1x128": "cast_blockwise, e4m3, 1x128, rows and columns",
    "cast 128x128": "cast_blockwise, e4m3, 128x128, rows and columns",
    "cast 128x128 transposed": "cast_blockwise, e4m3, 128x128, columns",
    "cast 1x32": "cast_mx, e4m3, rows and columns",
    "cast 1x32 transposed": "cast_mx, e4m3, columns",
}


def test_cast_rates_are_those_that_machine_code_predicts():
    """Of the bandwidth of the data sheet; `kernel_report --predict` compares with a copy's."""
    assert set(KERNEL_OF_PASS) == set(devices.KERNEL_RATES)
    table = json.loads((RESULTS / "predicted_kernels.json").read_text())
    for column, name in enumerate(("H100", "H200")):
        copy = table["devices"][name]["copy"] / (SHEETS[name][4] * 1e12)
        rows = [row for row in table["rows"] if row["device"] == name and row["K"] == 8192]
        reached = {row["kernel"]: row["of_limit"] for row in rows}
        for what, kernel in KERNEL_OF_PASS.items():
            rate = devices.KERNEL_RATES[what][column]
            assert rate == pytest.approx(reached[kernel] * copy, abs=0.0051), (what, name)
