"""The formats' numbers are those of the bit fields, and every device multiplies its own twin."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import oracle
import pytest
import torch

from float8 import formats
from float8.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, format_of, on_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_the_numbers_are_those_of_the_bit_fields(dtype):
    assert format_of(dtype).max == oracle.largest(dtype)
    assert format_of(dtype).smallest_subnormal == float(oracle.magnitudes(dtype)[1])


def test_the_published_numbers():
    assert (E4M3.max, E4M3.smallest_subnormal) == (448.0, 2.0**-9)
    assert (E5M2.max, E5M2.smallest_subnormal) == (57344.0, 2.0**-16)
    assert (E4M3FNUZ.max, E5M2FNUZ.max) == (240.0, 57344.0)


def test_every_format_has_its_own_name_and_dtype():
    assert set(FORMATS) == set(oracle.DTYPES)
    assert [str(f) for f in FORMATS.values()] == ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"]
    assert all(format_of(dtype).dtype is dtype for dtype in FORMATS)
    assert all(format_of(fmt) is fmt for fmt in FORMATS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_another_dtype_is_refused_and_the_known_are_listed(dtype):
    with pytest.raises(TypeError, match="is not a float8 format") as error:
        format_of(dtype)
    assert str(dtype) in str(error.value)
    assert all(str(known) in str(error.value) for known in FORMATS)


def test_a_format_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        E4M3.dtype = torch.float8_e5m2


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_without_amd_every_device_multiplies_the_format_itself(fmt, device, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert on_device(fmt, device) is fmt


def pretend_to_be_amd(monkeypatch, arch: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.parametrize(("fmt", "twin"), [(E4M3, E4M3FNUZ), (E5M2, E5M2FNUZ)], ids=str)
def test_gfx94_multiplies_the_fnuz_twins(fmt, twin, monkeypatch):
    pretend_to_be_amd(monkeypatch, "gfx942:sramecc+")
    assert on_device(fmt, CUDA) is twin
    assert on_device(twin, CUDA) is twin
    assert on_device(fmt, CPU) is fmt


def test_gfx95_multiplies_the_ocp_formats(monkeypatch):
    pretend_to_be_amd(monkeypatch, "gfx950")
    assert on_device(E4M3, CUDA) is E4M3


def test_float64_is_not_among_what_is_cast():
    dtypes = set(formats.HIGH_PRECISION_DTYPES)
    assert dtypes == {torch.float32, torch.bfloat16, torch.float16}
