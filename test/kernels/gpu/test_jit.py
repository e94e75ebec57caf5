"""The device functions of ``gpu/jit.py``: the bits of ``definition.py``, and safe conversions.

Float8 conversions are from float32, two of them in one 32-bit register. ptxas 12.8 and 12.9 compile
a conversion wrongly whose 16-bit result is used twice (triton#11111), and some versions of Triton
go through float16 on sm_89, which rounds twice.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import probe_jit
from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS

from float8.kernels import definition
from scripts.kernel_tools.forms import compile_for
from scripts.kernel_tools.shipped import variants

# One form of each kernel that writes float8.
FIRST = {
    variant.kernel: variant
    for variant in reversed(variants())
    if ("FORMAT" in variant.constants and "mm" not in variant.name) or "step" in variant.name
}.values()
N = 1 << 14


def every_kind_of_float():
    """Random bits, so every exponent; values next to powers of two; the special values."""
    bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    edges = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    edges = torch.cat([edges, edges.nextafter(edges * 2), edges.nextafter(edges * 0)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 57344.0])
    x[: len(edges)], x[-len(special) :] = edges, special
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_twins(dtype, power_of_two, device):
    x = every_kind_of_float().to(device)
    probe = launcher("probe_jit", "probe", device)
    scale, factor, bits, codes, fitting = probe(x, dtype, power_of_two)
    scale_format = definition.scale_format_of(power_of_two)
    expected = definition.scale_from_amax(x.abs(), torch.finfo(dtype).max, scale_format)
    assert_bitwise(scale, expected, what="scale")
    assert_bitwise(factor, expected.reciprocal(), what="reciprocal")
    assert_bitwise(bits.view(torch.float32), x.abs(), what="magnitude")
    one = torch.ones(1, device=device)
    assert_bitwise(codes, definition.cast_by_scale(x, one, (-1,), dtype), what="codes")
    own = definition.cast_by_scale(x, expected, (1,), dtype)
    assert_bitwise(fitting, own, what="codes under the scale of their own amax")


def test_integers_order_amaxes_with_nan_on_top():
    x = torch.tensor([torch.nan, 0.0, 3.0, -5.0, torch.inf, 1e-45])
    x = torch.cat([x, torch.zeros(10)])
    bits = launcher("probe_jit", "probe", "cpu")(x, torch.float8_e4m3fn, False)[2]
    assert bits.argsort(stable=True).tolist()[-5:] == [5, 2, 3, 4, 0]


# --- conversions


def others(ptx):
    """The conversions to float8 in a PTX file that are not ours."""
    found = re.findall(r"cvt\.\S*\.(e[45]m[23]x2\.\w+)\s+(\S+),", ptx)
    assert found
    return [f"{kind} {register}" for kind, register in found if not is_ours(kind, register)]


def is_ours(kind, register):
    return kind in ("e4m3x2.f32", "e5m2x2.f32") and register in ("low", "high")


@pytest.mark.slow
@pytest.mark.parametrize("variant", FIRST, ids=lambda v: v.name)
def test_every_conversion_is_ours(variant):
    assert not others(compile_for(variant, "sm_89").asm["ptx"])


@pytest.mark.slow
def test_a_conversion_of_tritons_is_seen():
    assert others(compile_for(probe_jit.PLAIN, "sm_89").asm["ptx"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_four_tiles_pack_and_unpack(dtype, device):
    """In float32 with 16 mantissa bits more than float8, so that rounding twice would be seen."""
    x = torch.randn(4, 512).mul(torch.randn(4, 512).exp2()).to(device)
    x[0, :4] = torch.tensor([0.0, -0.0, float("nan"), -float("inf")])
    x[1, :256] = 1 + 2.0**-4 + torch.arange(-128, 128, device=device) * 2.0**-20
    packed, again, rows = launcher("probe_jit", "pack", device)(x, dtype)
    codes = definition.cast_by_scale(x, torch.ones(1, 1, device=device), (-1, -1), dtype)
    assert_bitwise(rows.view(dtype), codes, what="unpacked")
    assert_bitwise(packed.view(torch.uint8).view(512, 4).t().view(dtype), codes, what="packed")
    assert_bitwise(again, packed, what="packed again")
