"""Tensor cores and asynchronous copies: exact products in every layout, and each missing wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_text import assemble, run

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch.torch_version import TorchVersion

from scripts.kernel_tools.ptx import PtxError
from scripts.kernel_tools.ptx.launch import compiled

# Triton 3.6 and 3.7.0 leave out the fence between the copies of the operands and wgmma or tcgen05.
FOUND = {"proxy"} if TorchVersion(triton.__version__) < (3, 7, 1) else set()
BF16, F16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def _dot(
    a_ptr, b_ptr, out_ptr, stride_am, stride_ak, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    m, n, total = tl.arange(0, M), tl.arange(0, N), tl.zeros((M, N), tl.float32)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        a = tl.load(a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak)
        b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)


def dot(arch, a, b, sizes, K):
    """The product of matrices, and the report of its execution."""
    (M, N, STEP), out = sizes, torch.empty(len(a), b.shape[1])
    with compiled(arch) as runs:
        _dot[(1,)](a, b, out, *a.stride(), *b.stride(), M, N, K, STEP, enable_fp_fusion=False)
    assert {finding.kind for finding in runs[0].findings} <= FOUND
    return out, runs[0]


# A's and B's rows are contiguous ("row"), or their columns: other fragments, swizzles, transposes.
@pytest.mark.parametrize(
    ("arch", "dtype", "a_order", "b_order", "sizes", "opcode"),
    [
        ("sm_89", E4M3, "row", "column", (64, 64, 64), "mma.sync.aligned.m16n8k32"),
        ("sm_89", BF16, "column", "row", (32, 32, 32), "mma.sync.aligned.m16n8k16"),
        ("sm_90", BF16, "row", "row", (64, 64, 64), "wgmma.mma_async.sync.aligned.m64n64k16"),
        ("sm_90", F16, "column", "column", (64, 32, 32), "wgmma.mma_async.sync.aligned.m64n32k16"),
        ("sm_90", E5M2, "row", "column", (128, 64, 32), "wgmma.mma_async.sync.aligned.m64n64k32"),
        ("sm_100", BF16, "column", "row", (64, 64, 32), "tcgen05.mma.cta_group::1.kind::f16"),
        ("sm_100", E4M3, "row", "column", (128, 32, 64), "tcgen05.mma.cta_group::1.kind::f8f6f4"),
    ],
)
def test_exact_products(arch, dtype, a_order, b_order, sizes, opcode):
    """Sums of small integers are exact in every order of addition."""
    M, N, STEP = sizes
    K = 3 * STEP
    a, b = (torch.randint(-4, 5, shape).float().to(dtype) for shape in ((M, K), (K, N)))
    a = a if a_order == "row" else a.t().contiguous().t()
    b = b if b_order == "row" else b.t().contiguous().t()
    out, report = dot(arch, a, b, sizes, K)
    assert torch.equal(out, a.float() @ b.float())
    assert any(name.startswith(opcode) for name in report.instructions), report.instructions


def test_special_values_go_through():
    a = torch.tensor([float("inf"), -0.0, 2.0**-9, float("nan")]).to(E5M2).repeat(16, 16)[:, :32]
    a[0], a[1], a[2] = 1.0, 0.0, 2.0**-16  # E5M2's smallest
    a[3, 1:] = 0.0
    b = torch.ones(32, 16).to(E5M2)
    out, _ = dot("sm_89", a, b, (16, 16, 32), 32)
    for row, value in ((0, 32.0), (1, 0.0), (2, 2.0**-11), (3, float("inf")), (4, float("nan"))):
        assert torch.equal(out[row].nan_to_num(7.0), torch.full((16,), value).nan_to_num(7.0))


def kinds(report):
    return [finding.kind for finding in report.findings]


COPY = """
ld.param.u64 %d0, [p0];
mad.wide.u32 %d1, %r0, 16, %d0;
shl.b32 %r1, %r0, 4;
cp.async.cg.shared.global [%r1], [%d1], 16;
cp.async.commit_group;
{wait}
xor.b32 %r2, %r1, {distance};
ld.shared.b32 %r3, [%r2];
ld.param.u64 %d2, [p1];
mad.wide.u32 %d3, %r0, 4, %d2;
st.global.b32 [%d3], %r3;
"""


@pytest.mark.parametrize(
    ("wait", "distance", "found"),
    [
        ("cp.async.wait_group 0;", 0, []),
        ("cp.async.wait_all; bar.sync 0;", 512, []),
        ("cp.async.wait_group 0;", 512, ["race"]),  # another thread's copy
        ("bar.sync 0;", 0, ["unfinished"]),
        ("cp.async.wait_group 1; bar.sync 0;", 0, ["unfinished"]),  # one group may be on its way
    ],
)
def test_a_copy_is_read_after_its_wait(wait, distance, found):
    x, out = np.arange(256, dtype=np.int32), np.zeros(64, np.int32)
    text = assemble(COPY.format(wait=wait, distance=distance), ["u64", "u64"], threads=64)
    report = run(text, x, out, shared_bytes=1024)
    assert kinds(report) == found
    if "unfinished" not in found:
        assert np.array_equal(out, x[::4][np.arange(64) ^ distance // 16])


# 64 rows of A and 8 of B, 32 ones in E4M3 each: 8 rows of 16 bytes, 128 bytes to the next 16.
PRODUCT = """
mov.b32 %r1, 0x38383838;
shl.b32 %r2, %r0, 4;
st.shared.v4.b32 [%r2], {{%r1, %r1, %r1, %r1}};
st.shared.v4.b32 [%r2+2048], {{%r1, %r1, %r1, %r1}};
bar.sync 0;
{fence}
mov.b64 %d1, {a};
mov.b64 %d2, {b};
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f1, %f2, %f3, %f4}}, %d1, %d2, 0, 1, 1;
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f1, %f2, %f3, %f4}}, %d1, %d2, 1, 1, 1;
wgmma.commit_group.sync.aligned;
{early}
wgmma.wait_group.sync.aligned {left};
ld.param.u64 %d0, [p0];
mad.wide.u32 %d3, %r0, 4, %d0;
st.global.f32 [%d3], %f4;
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"early": "add.f32 %f5, %f2, %f2;"}, ["uninitialised register"]),
        ({"left": 1}, ["uninitialised register"]),
        ({"fence": ""}, ["proxy"]),
        ({"early": "bar.sync 0; st.shared.b32 [%r2], %r0;"}, ["unfinished"]),
    ],
)
def test_a_product_is_waited_for(change, found):
    strides = 128 >> 4 << 16 | 256 >> 4 << 32
    parts = {"fence": "fence.proxy.async.shared::cta;", "early": "", "left": 0, **change}
    body = PRODUCT.format(a=strides, b=strides | 2048 >> 4, **parts)
    out = np.zeros(128, np.float32)
    report = run(assemble(body, ["u64"], threads=128), out, shared_bytes=4096)
    assert [*dict.fromkeys(kinds(report))] == found
    if "left" not in change:
        assert (out == 64).all()


@pytest.mark.parametrize(
    "statement",
    [
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f3};",
        "cp.async.bulk.commit_group;",
        "tcgen05.cp.cta_group::1.128x256b [%r1], %d1;",
        "wgmma.mma_async.sp.sync.aligned.m64n8k64.f32.e4m3.e4m3 {%f1}, %d1, %d2, %r1, 0, 1, 1, 1;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
    ],
)
def test_what_is_not_supported_is_refused_by_name(statement):
    with pytest.raises(PtxError, match=r"not supported|only matrices") as raised:
        run(assemble(statement))
    assert statement.split()[0].rstrip(";") in str(raised.value)
