"""Faults planted in a compiled cast, which the interpreter finds by name.

The kernel is `cast` by a given scale, to both orientations, of a matrix whose rows are wider than
they are used. Each fault edits its PTX, or one argument. The expected codes are the oracle's.
"""

import re

import numpy as np
import oracle
import pytest
import torch
from ptx_text import run

pytest.importorskip("triton")

from float8.kernels.gpu import cast
from scripts.kernel_tools.forms import compile_for, meta, variant
from scripts.kernel_tools.ptx import fusible, parse

E4M3, WHOLE = torch.float8_e4m3fn, (-1, -1)
M, K, STRIDE = 144, 48, 64
WRONG = "wrong codes"  # what a fault without a finding must leave


def launch(text, stride=STRIDE):
    """Run the kernel; the kinds of its findings, and whether its codes are wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, STRIDE, generator=generator).to(torch.bfloat16)
    x *= torch.exp2(torch.randint(-9, 9, (M, 1), generator=generator))
    x[:, K:] = 7.0  # not part of the matrix
    # Two of bfloat16's 128 mantissas round wrongly by way of float16.
    scale = torch.tensor([[0.53]])
    data, data_t = np.zeros((M, K), np.uint8), np.zeros((K, M), np.uint8)
    source = x.view(torch.int16).numpy().reshape(-1)[: (M - 1) * STRIDE + K]
    given = scale.numpy()
    report = run(
        text, source, given, data, data_t, M, K, M, 0, 0, stride, 0, 0, 0, grid=(3, 1),
        shared_bytes=1 << 16,
    )  # fmt: skip
    expected = oracle.cast(x[:, :K], scale, WHOLE, E4M3).numpy()
    wrong = not (np.array_equal(data, expected) and np.array_equal(data_t, expected.T))
    return {f.kind for f in report.findings}, wrong


@pytest.fixture(scope="module")
def text():
    x = meta(M, STRIDE)[:, :K]
    how = WHOLE, E4M3, "float32", False, True, True
    both = variant("cast", cast._launch, x, meta(1, 1, dtype=torch.float32), *how)
    return compile_for(both, "sm_90").asm["ptx"]


def test_the_kernel_without_a_fault(text):
    assert launch(text) == (set(), False)
    assert fusible(parse(text)) == []  # ptxas cannot choose other bits


def _swap_bounds(text):
    """Rows are compared with the number of columns, and columns with that of rows."""
    _rows, columns = re.findall(r"setp\.lt\.s64 \t%p\d+, %rd\d+, (%rd\d+)", text)[:2]
    assert _rows != columns
    pattern = rf"(setp\.lt\.s64 \t%p\d+, %rd\d+, )({_rows}|{columns})\b"
    return re.sub(pattern, lambda m: m[1] + (columns if m[2] == _rows else _rows), text)


def _cut(pattern, replacement=""):
    def edit(text):
        edited, count = re.subn(pattern, replacement, text, flags=re.M)
        assert count, pattern
        return edited

    return edit


_TWICE = (
    r"{ .reg .b32 both; cvt.rn.f16x2.f32 both, \2, \3; cvt.rn.satfinite.e4m3x2.f16x2 \1, both; }"
)

FAULTS = {
    "a swapped mask": (_swap_bounds, "out of bounds"),
    "a store without its mask": (_cut(r"@%p\d+ st\.global", "st.global"), "out of bounds"),
    "a load without its mask": (_cut(r"@%p\d+ ld\.global", "ld.global"), "out of bounds"),
    "missing barriers": (_cut(r"^\s*bar\.sync.*$"), "race"),
    "shared memory that is not written": (
        _cut(r"^\s*st\.shared.*$"), "uninitialised shared memory"
    ),
    "an unaligned vector": (
        _cut(r"(ld\.global\.v4.*\[ %rd\d+ \+ )0 \]", r"\g<1>8 ]"), "misaligned"
    ),
    "a register that is not written": (
        _cut(r"^\s*cvt\.f32\.bf16 .*$"), "uninitialised register"
    ),
    "threads that leave before a barrier": (
        _cut(r"(mov\.u32 \t(%r\d+), %tid\.x;)", r"\1 setp.gt.s32 %p0, \2, 99; @%p0 ret;"), "barrier"
    ),
    "a conversion that rounds twice": (
        _cut(r"cvt\.rn\.satfinite\.e4m3x2\.f32 (\S+), (\S+), (\S+);", _TWICE), WRONG
    ),
    "exchanged halves": (
        _cut(r"mov\.b32 (\S+), \{(low), (high)\}", r"mov.b32 \1, {\3, \2}"), WRONG
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_found_by_name(fault, text):
    edit, name = FAULTS[fault]
    kinds, wrong = launch(edit(text))
    assert name in (kinds | ({WRONG} if wrong else set()))


def test_a_wrong_stride(text):
    assert launch(text, stride=K) == (set(), True)  # reads other elements of x
    kinds, _ = launch(text, stride=STRIDE + 16)
    assert kinds == {"out of bounds"}
    kinds, _ = launch(text, stride=STRIDE + 1)
    assert "misaligned" in kinds
