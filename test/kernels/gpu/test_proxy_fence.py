"""The fence between copies and tensor cores: where it is in the PTX, and that it is needed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from float8.kernels.gpu import blockwise_mm
from float8.kernels.gpu.proxy_fence import IS_LEFT_OUT, fence, stages
from scripts.kernel_tools.forms import Variant, compile_for
from scripts.kernel_tools.shipped import variants

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "executed_ptx.json"
OURS = "fence.proxy.async.shared::cta; mov"  # Triton writes its own without a move


@triton.jit
def _pipelined(a_ptr, b_ptr, out_ptr, K, UNPIPELINED: tl.constexpr):
    m, k = tl.arange(0, 64), tl.arange(0, 128)
    out = tl.zeros((64, 64), tl.float32)
    for first in tl.range(0, K, 128, num_stages=stages() if UNPIPELINED else None):
        a = tl.load(a_ptr + m[:, None] * K + first + k[None, :])
        b = tl.load(b_ptr + m[None, :] * K + first + k[:, None])
        fence()
        out += tl.dot(a, b)
    tl.store(out_ptr + m[:, None] * 64 + m[None, :], out)


def ptx(arch, unpipelined):
    types = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "out_ptr": "*fp32", "K": "i32"}
    options = {"num_warps": 4, "num_stages": 3, **blockwise_mm.FUSION}
    form = Variant("probe", _pipelined, types, {"UNPIPELINED": unpipelined}, options)
    return compile_for(form, arch).asm["ptx"]


def test_on_sm_90_it_stands_between_the_wait_for_copies_and_the_product():
    loop = ptx("sm_90", False).split("cp.async.wait_group")[1]
    before, product, _ = loop.partition("wgmma.mma_async")
    assert product and before.index("bar.sync") < before.index(OURS)


def test_on_sm_100_there_is_no_pipeline_instead():
    text = ptx("sm_100", True)
    assert "tcgen05.mma" in text and "cp.async" not in text and OURS not in text


def test_tensor_cores_that_read_registers_need_none():
    text = ptx("sm_89", True)
    assert "cp.async" in text and "fence.proxy" not in text


def test_a_gemm_has_one_fence_before_its_products():
    """By Triton or by this library, not by both."""
    form = next(v for v in variants(("blockwise_mm",)) if "64x64" in v.name)
    loop = compile_for(form, "sm_90").asm["ptx"].split("cp.async.wait_group")[1]
    before, product, _ = loop.partition("wgmma.mma_async")
    assert product and before.count("fence.proxy.async") == 1
    assert (OURS in before) == bool(IS_LEFT_OUT)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["blockwise_mm", "grouped_mm"])
def test_with_triton_3_6_the_executed_forms_have_no_finding(kernel, arch):
    rows = json.loads(RESULTS.read_text())["rows"]
    (row,) = (r for r in rows if (r["triton"], r["arch"], r["kernel"]) == ("3.6.0", arch, kernel))
    assert row["forms"] and row["findings"] == {} and row["failed"] == 0
