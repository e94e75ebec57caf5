"""Conversions to float8 in compiled code are those of ``gpu/jit.py``.

They are from float32, two of them in one 32-bit register. ptxas 12.8 and 12.9 compile a conversion
wrongly whose 16-bit result is used twice (triton#11111), and some versions of Triton go through
float16 on sm_89, which rounds twice. Their bits are tested in ``test_casts.py``.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from float8.kernels.gpu.launch import NO_FUSION
from scripts.kernel_tools.forms import Variant, compile_for
from scripts.kernel_tools.ptx import fusible, parse
from scripts.kernel_tools.shipped import variants

pytestmark = pytest.mark.slow
# One form of each kernel that writes float8.
FIRST = {
    variant.kernel: variant
    for variant in reversed(variants())
    if ("FORMAT" in variant.constants and "mm" not in variant.name) or "step" in variant.name
}.values()


def others(ptx):
    """The conversions to float8 in a PTX file that are not ours."""
    found = re.findall(r"cvt\.\S*\.(e[45]m[23]x2\.\w+)\s+(\S+),", ptx)
    assert found
    return [f"{kind} {register}" for kind, register in found if not is_ours(kind, register)]


def is_ours(kind, register):
    return kind in ("e4m3x2.f32", "e5m2x2.f32") and register in ("low", "high")


@pytest.mark.parametrize("variant", FIRST, ids=lambda v: v.name)
def test_every_conversion_is_ours_and_ptxas_fuses_nothing(variant):
    """A product that it fused with a sum would have other bits."""
    ptx = compile_for(variant, "sm_89").asm["ptx"]
    assert not others(ptx)
    assert fusible(parse(ptx)) == []


@triton.jit
def _plain(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def test_a_conversion_of_tritons_is_seen():
    types = {"x_ptr": "*fp32", "out_ptr": "*u8"}
    assert others(
        compile_for(Variant("plain", _plain, types, {"N": 512}, NO_FUSION), "sm_89").asm["ptx"]
    )
