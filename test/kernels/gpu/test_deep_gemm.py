"""DeepGEMM as one more tile: called as its source says, used only where it may be.

It is not a dependency, so a stand-in multiplies here, written from version 2.6.1: what
csrc/apis/gemm.hpp and csrc/utils/layout.hpp assert, and which expert and which rows
sm90_fp8_gemm_1d2d.cuh and scheduler/gemm.cuh read. On a GPU with DeepGEMM the bits are compared.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType

import oracle
import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from shapes import Case

from float8.kernels import cublas
from float8.kernels.gpu import blockwise_mm, deep_gemm, grouped_mm
from float8.kernels.gpu.blockwise_mm import DEEPGEMM, GEMM_TILES

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
BLOCKS = BY_128, SQUARE = (1, 128), (128, 128)


def multiplied(a, a_scale, b, b_scale):
    return oracle.matmul(a, a_scale, BY_128, b, b_scale, SQUARE).to(BF16)


def operand(rows, columns, block, seed, dtype=E4M3):
    x = Case((rows, columns), fill="wide", seed=seed).make()
    codes, scale = oracle.quantize(x, block, dtype)
    return codes.view(dtype), scale


def operands(M, K, N):
    a, a_scale = operand(M, K, BY_128, 1)
    return a, by_columns(a_scale), *operand(N, K, SQUARE, 2)


def by_columns(scale):
    return scale.t().contiguous().t()


def experts(sizes, K, N, spare, a_dtype=E4M3):
    """a, a_scale, b, b_scale, offs; and the rows of all groups of the result.

    Behind the last group, ``spare`` rows and scales hold NaN.
    """
    T = sum(sizes)
    a, a_scale = operand(T + spare, K, BY_128, 1, a_dtype)
    a.view(torch.uint8)[T:] = 0x7F
    a_scale[T:] = torch.nan
    weights = [operand(N, K, SQUARE, 2 + expert) for expert in range(len(sizes))]
    b, b_scale = (
        torch.stack([part.view(torch.uint8) for part, _ in weights]).view(E4M3),
        torch.stack([scale for _, scale in weights]),
    )
    expected, begin = [], 0
    for size, weight in zip(sizes, weights, strict=True):
        rows = slice(begin, begin + size)
        expected.append(multiplied(a[rows], a_scale[rows], *weight))
        begin += size
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return [a, by_columns(a_scale), b, b_scale, offs], torch.cat(expected)


def check(a, a_scale, b, b_scale, out):
    """Shapes, dtypes and strides."""
    (M, K), N = a.shape, b.shape[-2]
    assert a.dtype == b.dtype == E4M3 and out.dtype == BF16 and out.shape == (M, N)
    assert a.stride(1) == b.stride(-1) == out.stride(1) == 1 and b.shape[-1] == K
    assert a.stride(0) % 16 == b.stride(-2) % 16 == 0 and out.stride(0) % 8 == 0
    assert b.dim() == 2 or b.stride(0) == N * K
    rows, columns = -(-N // 128), -(-K // 128)
    assert a_scale.dtype == b_scale.dtype == torch.float32 and a_scale.shape == (M, columns)
    assert b_scale.shape == (*b.shape[:-2], rows, columns)
    assert b_scale.stride()[-2:] == (columns, 1)
    assert b.dim() == 2 or b_scale.stride(0) == rows * columns


class StandIn(ModuleType):
    """``deep_gemm``. It fills results with NaN first."""

    __version__ = "2.6.1"

    def __init__(self, alignment=128, error=None):
        super().__init__("deep_gemm")
        self.__spec__ = importlib.util.spec_from_loader("deep_gemm", None)
        self.alignment, self.error, self.calls = alignment, error, []

    def fp8_gemm_nt(self, a, b, d):
        if self.error is not None:
            raise self.error
        check(*a, *b, d)
        self.calls.append("dense")
        d.copy_(multiplied(*a, *b))

    def get_mk_alignment_for_contiguous_layout(self):
        return self.alignment

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        check(*a, *b, d)
        assert grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
        assert grouped_layout.shape == (len(d),)
        read = grouped_layout.as_strided((-(-len(d) // 128) * 128,), (1,))  # `is_computation_valid`
        assert ((read >= -1) & (read < len(b[0]))).all()
        self.calls.append("groups")
        d.fill_(torch.nan)
        for first in range(0, len(d), 128):
            rows, expert = slice(first, first + 128), int(read[first])
            d[rows] = multiplied(a[0][rows], a[1][rows], b[0][expert], b[1][expert])
            for half in (first, first + 64):
                if read[half] < 0:
                    d[half : half + 64] = 0


@pytest.fixture
def installed(monkeypatch):
    """Installs a stand-in, on a device that counts as sm_90."""

    def install(**options):
        stand_in = StandIn(**options)
        monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
        deep_gemm.FOUND.clear()
        return stand_in

    monkeypatch.setattr(deep_gemm, "family_of", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield install
    deep_gemm.FOUND.clear()


@pytest.fixture
def tried(monkeypatch):
    """The tiles that a product would measure."""
    seen = []

    def fastest(form, x, sizes, tiles, run):
        seen[:] = tiles
        return GEMM_TILES[-1]

    for module in (blockwise_mm, grouped_mm):
        monkeypatch.setattr(module, "fastest", fastest)
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    return seen


@pytest.mark.parametrize("shape", [(5, 144, 48), (130, 272, 144)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_dense_product(shape, transposed, installed):
    a, a_scale, b, b_scale = operands(*shape)
    stand_in = installed()
    expected = multiplied(a, a_scale, b, b_scale)
    given = b_scale.t().contiguous().t() if transposed else b_scale
    out = blockwise_mm._launch(a, a_scale, b, given, 1, 128, None, BF16, tile=DEEPGEMM)
    assert_bitwise(out, expected, shape)
    assert stand_in.calls == ["dense", "dense"]  # the first one asks whether it runs


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("rows", [(1, 128), (1, 1), (128, 1)], ids=str)
def test_a_dense_product_beside_cublas(rows, is_faster, installed, monkeypatch):
    a, a_scale, b, b_scale = operands(132, 256, 48)
    stand_in, other = installed(), torch.zeros(132, 48, dtype=BF16)
    chosen = "deep_gemm" if is_faster else "other"
    monkeypatch.setattr(deep_gemm, "fastest", lambda *arguments: chosen)
    out = deep_gemm.or_faster(lambda: other, a, a_scale, b, b_scale, *rows, BF16)
    is_used = is_faster and rows == (1, 128)
    assert_bitwise(out, multiplied(a, a_scale, b, b_scale) if is_used else other)
    assert ("dense" in stand_in.calls[1:]) == is_used


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spare", [0, 200], ids="spare={}".format)
@pytest.mark.parametrize(
    "sizes",
    [
        (128, 256, 128),
        (130, 0, 126, 300),
        (0, 5, 1, 0, 17, 200, 0),  # several in one block
        (100, 28, 128, 1),
        (0, 0),
        (1,),
    ],
    ids=str,
)
def test_groups_that_begin_anywhere(sizes, spare, transposed, installed):
    """Rows and scales of no group hold NaN."""
    spare = max(spare, not any(sizes))
    arguments, expected = experts(sizes, 144, 48, spare)
    if transposed:
        arguments[3] = arguments[3].mT.contiguous().mT
    installed()
    out = grouped_mm._launch(*arguments, *BLOCKS, BF16, 16, False, tile=DEEPGEMM)
    assert out.shape == (sum(sizes) + spare, 48) and out.is_contiguous()
    assert_bitwise(out[: sum(sizes)], expected, (sizes, spare))


@pytest.mark.parametrize("offs", [(700, 40, 900), (-5, 2**30, 3)], ids=str)
def test_offsets_that_do_not_ascend_read_nothing_outside(offs, installed):
    arguments, _ = experts((20, 0, 30), 144, 48, 7)
    arguments[4] = torch.tensor(offs, dtype=torch.int32)
    installed()
    out = grouped_mm._launch(*arguments, *BLOCKS, BF16, 16, False, tile=DEEPGEMM)
    assert out.shape == (57, 48)


def try_groups(tokens=600, K=144, N=48, a_dtype=E4M3, out_dtype=BF16, change=None):
    arguments, _ = experts((tokens - 35, 35), K, N, 0, a_dtype)
    if change is not None:
        arguments[0] = change(arguments[0])
    grouped_mm._launch(*arguments, *BLOCKS, out_dtype, 16, False)


def view_of_wider(first, width):
    def view(a):
        wide = torch.zeros(len(a), a.shape[1] + width, dtype=torch.uint8).view(a.dtype)
        part = wide[:, first : first + a.shape[1]]
        part.view(torch.uint8).copy_(a.view(torch.uint8))
        return part

    return view


@pytest.mark.parametrize(
    ("options", "is_tried"),
    [
        ({}, True),
        ({"tokens": 512}, False),  # 2 experts: it would multiply half of them twice
        ({"K": 123}, False),
        ({"N": 40}, False),
        ({"a_dtype": E5M2}, False),
        ({"out_dtype": torch.float32}, False),
        ({"change": view_of_wider(16, 32)}, True),
        ({"change": view_of_wider(8, 32)}, False),
        ({"change": view_of_wider(16, 40)}, False),
    ],
)
def test_groups_for_which_it_is_tried(options, is_tried, installed, tried):
    installed()
    try_groups(**options)
    assert tried and (DEEPGEMM in tried) == is_tried


@pytest.mark.parametrize(
    ("shape", "rows", "bias", "is_tried"),
    [
        ((130, 144, 48), (1, 128), None, True),
        ((130, 144, 40), (1, 128), None, False),
        ((130, 144, 48), (1, 128), torch.ones(48), False),
        ((130, 144, 48), (1, 1), None, False),
        ((130, 144, 48), (128, 1), None, False),
    ],
)
def test_dense_products_for_which_it_is_tried(shape, rows, bias, is_tried, installed, tried):
    M, K, N = shape
    a, _, b, _ = operands(M, K, N)
    scales = [torch.ones(2, -(-n // r)).t() for n, r in zip((M, N), rows, strict=True)]
    installed()
    blockwise_mm._launch(a, scales[0], b, scales[1], *rows, bias, BF16)
    assert tried and (DEEPGEMM in tried) == is_tried


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "DeepGEMM 2.6.1 multiplies"),
        ({"error": AssertionError("no nvcc")}, "not used: AssertionError: no nvcc"),
    ],
    ids=str,
)
def test_one_line_says_whether_it_is_used(options, words, installed, tried, caplog):
    installed(**options)
    with caplog.at_level(logging.INFO, "float8"):
        for _ in range(2):
            try_groups()
            assert (DEEPGEMM in tried) == (not options)
    assert len(caplog.records) == 1 and words in caplog.text


def test_blocks_that_a_user_set_are_not_tried(installed, tried):
    for alignment, is_tried in ((64, True), (224, False), (256, False)):
        installed(alignment=alignment)
        try_groups()
        assert (DEEPGEMM in tried) == is_tried


def test_it_is_not_tried_elsewhere(installed, tried, monkeypatch):
    installed()
    monkeypatch.setattr(deep_gemm, "family_of", lambda device: "sm_100")
    try_groups()
    assert tried and DEEPGEMM not in tried


def test_a_capture_does_not_try_whether_it_runs(installed, tried, monkeypatch):
    """The first product would load a kernel, and be part of the graph."""
    stand_in = installed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    try_groups()
    assert tried and DEEPGEMM not in tried and not stand_in.calls
    for is_captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)  # noqa: B023
        try_groups()
        assert DEEPGEMM in tried


def test_a_product_by_cublas_searches_for_it_once(monkeypatch):
    """Each search asks the file system about every folder of sys.path."""

    class OnGpu(torch.Tensor):
        is_cpu = False

    searched = []
    cublas._has_deep_gemm.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", searched.append)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda a, *_, **__: a)
    for _ in range(2):
        a, a_scale, b, b_scale = operands(16, 256, 48)
        cublas._cublas_blockwise_mm(a.as_subclass(OnGpu), a_scale, b, b_scale, 1, 128, BF16, False)
    cublas._has_deep_gemm.cache_clear()
    assert searched == ["deep_gemm"]


@pytest.mark.cuda
def test_it_has_the_bits_of_a_tile():
    """Ranks measure which of them is the fastest, and may choose differently."""
    pytest.importorskip("deep_gemm")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for sm_90")
    for sizes, K, N in (((130, 0, 126, 300), 272, 144), ((900, 1, 700, 447), 1040, 400)):
        arguments, _ = experts(sizes, K, N, 7)
        arguments = *(x.cuda() for x in arguments), *BLOCKS, BF16, 16, False
        by_tile, by_deep_gemm = (
            grouped_mm._launch(*arguments, tile=tile)[: sum(sizes)].cpu()
            for tile in (GEMM_TILES[0], DEEPGEMM)
        )
        assert_bitwise(by_deep_gemm, by_tile, sizes)
    a, a_scale, b, b_scale = (x.cuda() for x in operands(300, 1040, 400))
    by_tile, by_deep_gemm = (
        blockwise_mm._launch(a, a_scale, b, b_scale, 1, 128, None, BF16, tile=tile).cpu()
        for tile in (GEMM_TILES[0], DEEPGEMM)
    )
    assert_bitwise(by_deep_gemm, by_tile, "dense")
