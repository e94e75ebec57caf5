"""A device by name, by file, or measured; and the datasheet row of what a driver calls it."""

import pytest

from float8.estimate import lookup
from float8.estimate.devices import DEVICES, datasheet_of
from float8.estimate.lookup import find_device

H100 = DEVICES["H100"]


def test_names_are_found_in_any_case_and_devices_are_themselves():
    assert find_device("H100") is find_device("h100") is find_device(H100) is H100
    assert find_device("mi300x") is DEVICES["MI300X"]


def test_a_file_is_a_device(tmp_path):
    H100.save(tmp_path / "mine.json")
    assert find_device(str(tmp_path / "mine.json")) == H100


def test_measuring_is_done_once(monkeypatch):
    calls = []
    lookup._measured.cache_clear()
    monkeypatch.setattr(lookup, "measure", lambda: calls.append("measured") or H100)
    assert find_device("measured") is find_device("measured") is H100
    assert calls == ["measured"]
    lookup._measured.cache_clear()


@pytest.mark.parametrize("name", ["A100", "", "H100 PCIe", "missing.json"])
def test_an_unknown_device_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown device '{name}'; known: H100, H200, B200, MI3"):
        find_device(name)


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


def test_a_name_too_long_for_a_file_is_unknown():
    with pytest.raises(ValueError, match="unknown device 'xxx"):
        find_device("x" * 5000)


def test_a_path_may_be_given(tmp_path):
    DEVICES["H200"].save(tmp_path / "device.json")
    assert find_device(tmp_path / "device.json") == DEVICES["H200"]
