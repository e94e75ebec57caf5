"""The formats' numbers are those of the bit fields, and every device multiplies its own twin."""

from __future__ import annotations

from types import SimpleNamespace

import oracle
import pytest
import torch

from float8.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, format_of, on_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_the_numbers_are_those_of_the_bit_fields(dtype):
    assert format_of(dtype).max == oracle.largest(dtype)
    assert format_of(dtype).smallest_subnormal == float(oracle.magnitudes(dtype)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_another_dtype_is_refused_and_the_known_are_listed(dtype):
    with pytest.raises(TypeError, match=f"{dtype} is not a float8 format.*float8_e5m2fnuz"):
        format_of(dtype)


TWINS = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}


@pytest.mark.parametrize(
    ("hip", "arch", "has_twins"),
    [(None, "", False), ("6.4", "gfx942:sramecc+", True), ("6.4", "gfx950", False)],
)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_gfx94_multiplies_the_fnuz_twins_and_others_the_format_itself(
    fmt, hip, arch, has_twins, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert on_device(fmt, CUDA) is (TWINS.get(fmt, fmt) if has_twins else fmt)
    assert on_device(fmt, CPU) is fmt
