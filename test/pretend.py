"""A GPU where there is none: tensors that say they are on one, and a documented cuBLASLt.

The bytes of a `PretendCuda` tensor are on the CPU. `install_torch_scaled_mm` replaces
``torch._scaled_mm`` by a product in float64 that insists on the rules of cuBLASLt's documentation
and of torch's own checks, and keeps its arguments. The GPU multiplies whatever some GPU does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from assertions import assert_error_within_baseline
from shapes import Case
from torch import Tensor

from float8 import kernels
from float8.kernels import products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
TENSOR, ROW, B1, B128 = (-1, -1), (1, -1), (1, 128), (128, 128)
MX, MX_SQUARE = (1, 32), (32, 32)
PRODUCTS = {
    (TENSOR, TENSOR): "tensorwise",
    (TENSOR, ROW): "rowwise",
    (ROW, TENSOR): "rowwise",
    (ROW, ROW): "rowwise",
    (B1, B128): "blockwise",
    (B128, B1): "blockwise",
    (B1, B1): "blockwise",
    (MX, MX): "mx",
    (MX, MX_SQUARE): "mx",
}
BLOCKWISE = [pair for pair, product in PRODUCTS.items() if product == "blockwise"]
EVERY_PRODUCT = pytest.mark.parametrize(("a_block", "b_block"), PRODUCTS, ids=str)


class PretendCuda(torch.Tensor):
    """A tensor that says it is on a GPU; its bytes are on the CPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def operands(M: int, K: int, N: int, a_block, b_block, b_dtype=E4M3, a_dtype=E4M3) -> list[Tensor]:
    """a and b as (data, scale), cast by the oracle."""
    parts = []
    for rows, block, dtype, seed in ((M, a_block, a_dtype, 1), (N, b_block, b_dtype, 2)):
        scale_format = "e8m0" if block in (MX, MX_SQUARE) else "float32"
        codes, scale = oracle.quantize(
            Case((rows, K), seed=seed).make(), block, dtype, scale_format
        )
        parts += [codes.view(dtype), scale]
    return parts


def matrices(parts, a_block, b_block) -> tuple[kernels.Float8Matrix, kernels.Float8Matrix]:
    """The operands of a product, of (data, scale, data, scale)."""
    a, a_scale, b, b_scale = parts
    return kernels.Float8Matrix(a, a_scale, a_block), kernels.Float8Matrix(b, b_scale, b_block)


def multiply(parts, a_block, b_block, bias=None, out_dtype=BF16, **options) -> Tensor:
    """`kernels.scaled_mm` of operands that say they are on a GPU."""
    pretended = matrices([part.as_subclass(PretendCuda) for part in parts], a_block, b_block)
    bias = None if bias is None else bias.as_subclass(PretendCuda)
    return plain(kernels.scaled_mm(*pretended, bias, out_dtype=out_dtype, **options))


def assert_product_of(actual, parts, a_block, b_block, bias, replay) -> None:
    a, a_scale, b, b_scale = parts
    exact = oracle.matmul(a, a_scale, a_block, b, b_scale, b_block)
    baseline = exact.to(actual.dtype)
    if bias is not None:  # plain arithmetic rounds the product, and then the sum
        exact, baseline = exact + bias.double(), (baseline + bias).to(actual.dtype)
    assert_error_within_baseline(actual, exact, baseline, replay=replay)


def install_torch_scaled_mm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make ``torch._scaled_mm`` cuBLASLt as documented; its calls are kept in the list returned."""
    calls = []

    def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum, blocks=None):
        call = SimpleNamespace(a=a, b=b, bias=bias, scale_a=scale_a, out_dtype=out_dtype)
        call.fast = use_fast_accum
        calls.append(call)
        a, b, scale_a, scale_b = (plain(x) for x in (a, b, scale_a, scale_b))
        (M, K), N = a.shape, b.shape[1]
        assert a.stride() == (K, 1), "a must be row-major"
        assert b.stride() == (1, K), "b must be column-major"
        assert a.storage_offset() % 16 == b.storage_offset() % 16 == 0, "operands start unaligned"
        assert b.shape[0] == K
        assert (K % 16, N % 16) == (0, 0)
        assert not a.dtype == b.dtype == E5M2
        if scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu:
            a_block = b_block = MX
            read = out_of_squares
            if torch.version.hip is not None:  # ScaledBlas.cpp, of torch 2.9 and of later ones
                assert (M % 32, N % 32, K % 128) == (0, 0, 0), "hipBLASLt: M, N in 32s, K in 128s"
                assert out_dtype in (BF16, torch.float16)
                read = out_of_rows
            scale_a, scale_b = read(scale_a, M, -(-K // 32)), read(scale_b, N, -(-K // 32)).t()
        else:
            assert scale_a.dtype == scale_b.dtype == torch.float32
            a_block, b_block = blocks or _blocks_of(scale_a, scale_b, M, N)
        if PRODUCTS[a_block, b_block] == "blockwise":
            assert M % 4 == N % 4 == 0, "cuBLASLt: M and N in fours for scales of 128"
            assert not use_fast_accum, "CUDABlas.cpp: no fast accumulation with scales of 128"
            assert out_dtype in (BF16, torch.float32)
        out = oracle.matmul(
            a, scale_a.reshape(oracle.scale_shape((M, K), a_block)), a_block,
            b.t(), scale_b.t().reshape(oracle.scale_shape((N, K), b_block)), b_block,
        )  # fmt: skip
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert bias.shape == (N,)
            assert bias.is_contiguous(), "torch hands over the address alone"
            assert bias.storage_offset() * bias.element_size() % 16 == 0, "bias starts unaligned"
            out = out + plain(bias).double()
        return out.to(out_dtype)

    def scaled_mm_v2(a, b, scale_a, how_a, scale_b, how_b, *, output_dtype, use_fast_accum):
        """``F.scaled_mm`` for blockwise scales; those of ``b`` belong to rows of ``b.T``."""
        blocks = {F.ScalingType.BlockWise1x128: B1, F.ScalingType.BlockWise128x128: B128}
        K, natural = a.shape[1], []
        for rows, scale, how in ((a.shape[0], scale_a, how_a), (b.shape[1], scale_b, how_b)):
            shape = oracle.scale_shape((rows, K), blocks[how])
            if blocks[how] == B128:  # ScaledBlas.cpp: (L4, rows / 128), strides (1, L4)
                L4 = -(-shape[1] // 4) * 4
                assert scale.shape == (L4, shape[0])
                assert scale.stride() in ((1, L4), (1, 1)[: 2 * (shape[0] == 1)])
                natural.append(scale.t()[:, : shape[1]])
            else:
                assert scale.shape == shape
                assert scale.stride() in ((1, rows), (1, 1)[: 2 * (shape[1] == 1)])
                natural.append(scale)
            assert scale.storage_offset() % 4 == 0, "scales start unaligned"
        return scaled_mm(
            a, b, scale_a=natural[0], scale_b=natural[1].t(), bias=None, out_dtype=output_dtype,
            use_fast_accum=use_fast_accum, blocks=(blocks[how_a], blocks[how_b]),
        )  # fmt: skip

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_v2)
    for row in products.SUPPORT.values():
        monkeypatch.setitem(row, "mx", None)
    return calls


def into_squares(scale: Tensor) -> Tensor:
    """Bytes (rows, blocks) where cuBLAS documents the scales of 1x32 blocks, one by one.

    (cuBLAS documentation, "1D block scaling factors layout".) Zeros are elsewhere.
    """
    rows, blocks = scale.shape
    placed = torch.zeros(-(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8)
    placed[_places(rows, blocks)] = scale
    return placed


def out_of_squares(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """The scales (rows, blocks) that cuBLASLt reads; all others must be zeros."""
    assert scale.dim() == 1
    assert scale.is_contiguous()
    assert scale.storage_offset() % 16 == 0, "scales start unaligned"
    codes = scale.view(torch.uint8)
    found = codes[_places(rows, blocks)]
    assert torch.equal(into_squares(found), codes), "padding that is not 0, or another size"
    return found.view(scale.dtype)


def out_of_rows(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """The scales (rows, blocks) that hipBLASLt reads; torch wants as many as of `out_of_squares`.

    Behind them it reads nothing, so what is there is not looked at.
    """
    assert scale.is_contiguous()
    assert scale.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    assert scale.storage_offset() % 16 == 0, "scales start unaligned"
    return scale.flatten()[: rows * blocks].view(rows, blocks)


def _places(rows: int, blocks: int) -> Tensor:
    tiles = -(-blocks // 4)
    places = [
        ((r // 128) * tiles + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4
        for r in range(rows)
        for b in range(blocks)
    ]
    return torch.tensor(places, dtype=torch.int64).reshape(rows, blocks)


def _blocks_of(scale_a: Tensor, scale_b: Tensor, M: int, N: int):
    """The blocks that torch._scaled_mm reads from the shapes and strides of the scales.

    ATen/native/cuda/ScaledBlas.cpp, get_joint_scaling. Blockwise products do not come here.
    """
    if scale_a.numel() == scale_b.numel() == 1:
        return TENSOR, TENSOR
    are_rowwise = scale_a.shape == (M, 1) and scale_b.shape == (1, N)
    if are_rowwise and scale_a.is_contiguous() and scale_b.is_contiguous():
        return ROW, ROW
    raise AssertionError(f"no scaling has scales {scale_a.stride()} and {scale_b.stride()}")
