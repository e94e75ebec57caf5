"""The formats' numbers are those of the bit fields, and every device multiplies its own twin."""

from __future__ import annotations

import importlib

import oracle
import pytest
import torch

from float8.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, format_of

module = importlib.import_module("float8.kernels.products")  # kernels has its function
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


@pytest.mark.parametrize("family", ["gfx94", "gfx95", "sm_90"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_gfx94_multiplies_the_fnuz_twins_and_others_the_format_itself(fmt, family, monkeypatch):
    monkeypatch.setattr(module, "architecture", lambda index: family)
    has_twins = family == "gfx94"
    assert module.on_device(fmt, CUDA) is (TWINS.get(fmt, fmt) if has_twins else fmt)
    assert module.on_device(fmt, CPU) is fmt
