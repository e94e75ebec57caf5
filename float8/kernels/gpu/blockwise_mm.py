"""`blockwise_mm`: the GEMM of operands with 1x128 and 128x128 scales, promoted every 128 of K.

A float8 tensor core keeps fewer bits of a sum than float32 has, and one sum cannot carry scales
that change along the contraction. So each step of 128 is summed by the tensor core alone and then
added, scaled, to an accumulator in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2, with its
interval of 128):

    out[m, n] = sum over K-blocks i of (a[m, i] . b[n, i]) * a_scale[m, i] * b_scale[n, i]

where ``.`` contracts 128 codes. Where one side has a 128x128 scale, which is one number for a tile,
the two scales are multiplied first: one fused multiply-add per element and step instead of a
multiplication more. A product of two scales that leaves float32's range (below 2^-126, say) thus
costs precision only where the result is itself that small, or overflows.

Layout: ``a`` (M, K) and ``b`` (N, K) with the contraction contiguous; scales of any strides (1x128
scales of ``b`` are copied unless N is contiguous, as the casts of ``gpu/`` write them). Sizes need
not be multiples of anything, but operands whose rows do not start at multiples of 16 bytes are
loaded byte by byte (`scaled_mm` hands over others).

Tiles: the accumulator and the step's sum both stay in registers, 2 x 128 x 128 / 256 threads = 128
of each thread's 255, so that is the largest tile that does not spill. Two programs of half that
tile fill each other's waits, but read 1.5 times as many bytes from the L2 cache. `GEMM_TILES` is
the whole list. Which of them runs is measured on the device (`fastest_tile`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import definition
from float8.kernels.gpu import deep_gemm
from float8.kernels.gpu.fastest_tile import fastest
from float8.kernels.gpu.launch import launch, register_op
from float8.kernels.gpu.proxy_fence import IS_LEFT_OUT, fence, stages

STEP = tl.constexpr(128)  # of the contraction: between promotions, and that share a scale
# The kernel needs a * b + c with one rounding; Triton's default for that is about to change.
FUSION = {"enable_fp_fusion": True}


class Tile(NamedTuple):
    """The tile that one program computes, and its launch options.

    ``M`` rows and ``N`` columns of the output, by ``warps`` of 32 threads; ``stages`` steps of the
    operands are on their way or in shared memory at once. Where scales are of blocks, M and N are
    divisors of 128.
    """

    M: int
    N: int
    warps: int
    stages: int


# From the largest, which reads least per product, to the smallest, which leaves the fewest
# multiprocessors idle. Shared memory: 128 * (M + N) bytes a stage; sm_89 and sm_120 have 99 KiB of
# it and use a stage less.
GEMM_TILES = (
    Tile(128, 128, 8, 4),
    Tile(64, 128, 4, 3),
    Tile(64, 64, 4, 4),
)
DEEPGEMM = Tile(-1, 0, 0, 0)  # no tile: `deep_gemm`
GROUP = 8  # tiles along M that share what they read of b: see the order of programs


def tiles_for(M: int, N: int) -> list[Tile]:
    """The tiles that are not half empty."""
    return [tile for tile in GEMM_TILES if tile.M < 2 * M and tile.N < 2 * N] or [GEMM_TILES[-1]]


@triton.jit
def place_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row and column of program number pid in a matrix of tiles.

    Programs that run at the same time should read the same rows of a and b, which then come from
    the L2 cache: GROUP tiles down, then one to the right, and so on.
    """
    first = pid // (GROUP * tiles_n) * GROUP
    down = tl.minimum(tiles_m - first, GROUP)
    return first + pid % (GROUP * tiles_n) % down, pid % (GROUP * tiles_n) // down


@triton.jit
def contract(
    a_ptr,  # a's tile, without its offsets (TILE_M, 128)
    a_offsets,
    a_scale_ptr,  # the scales of its first step
    a_scale_offsets,  # of its rows
    inside_m,
    a_scale_step,  # from the scales of one step to those of the next
    b_ptr,  # b's tile, with offsets (128, TILE_N)
    b_offsets,
    b_scale_ptr,
    b_scale_offsets,
    inside_n,
    b_scale_step,
    K,
    A_ROWS: tl.constexpr,  # rows that share a scale: 1 or 128; 0 where scales do not change along K
    B_ROWS: tl.constexpr,
    FAST: tl.constexpr,  # the tensor core alone sums all of K; where scales do not change
):
    """A tile of the product in float32, (TILE_M, TILE_N), with the scales that change along K."""
    out = tl.zeros((a_offsets.shape[0], b_offsets.shape[1]), tl.float32)
    k = tl.arange(0, STEP)
    for first_k in tl.range(0, K, STEP, num_stages=stages() if IS_LEFT_OUT else None):
        inside = k < K - first_k
        a = tl.load(a_ptr + a_offsets, inside[None, :], 0.0)
        b = tl.load(b_ptr + b_offsets, inside[:, None], 0.0)
        if IS_LEFT_OUT:
            fence()
        if FAST:
            out = tl.dot(a, b, out)
        elif A_ROWS == 0:
            # With the number, no compiler merges the addition into the tensor core's sum.
            out += tl.dot(a, b, max_num_imprecise_acc=STEP)
        else:
            if A_ROWS == 1:
                a_scale = tl.load(a_scale_ptr + a_scale_offsets, inside_m, 0.0)
            else:
                a_scale = tl.load(a_scale_ptr)
            if B_ROWS == 1:
                b_scale = tl.load(b_scale_ptr + b_scale_offsets, inside_n, 0.0)
            else:
                b_scale = tl.load(b_scale_ptr)
            step = tl.dot(a, b)
            if A_ROWS == 1 and B_ROWS == 1:
                out += step * a_scale[:, None] * b_scale[None, :]
            elif A_ROWS == 1:
                out += step * (a_scale * b_scale)[:, None]
            else:
                out += step * (a_scale * b_scale)[None, :]
            a_scale_ptr += a_scale_step
            b_scale_ptr += b_scale_step
        a_ptr += STEP
        b_ptr += STEP
    return out


@triton.jit
def _kernel(
    a_ptr,  # float8 (M, K), stride 1 along K
    a_scale_ptr,  # float32 (cdiv(M, A_ROWS), cdiv(K, 128))
    b_ptr,  # float8 (N, K), stride 1 along K
    b_scale_ptr,  # float32 (cdiv(N, B_ROWS), cdiv(K, 128))
    bias_ptr,  # (N,), read where BIAS
    out_ptr,  # (M, N), row-major
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_bias,
    stride_a_scale_m,
    stride_a_scale_k,
    stride_b_scale_n,
    stride_b_scale_k,
    A_ROWS: tl.constexpr,  # 1 or 128
    B_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = place_of(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    first_m, first_n = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N

    # Offsets inside a tile fit in 32 bits. Rows beyond the last read the last one, which costs less
    # than a mask; their results are not stored.
    m, n, k = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, STEP)
    a_tile_ptr, b_tile_ptr = a_ptr + first_m * stride_a, b_ptr + first_n * stride_b
    a_offsets = tl.minimum(m, (M - 1 - first_m).to(tl.int32))[:, None] * stride_a + k[None, :]
    b_offsets = tl.minimum(n, (N - 1 - first_n).to(tl.int32))[None, :] * stride_b + k[:, None]
    # Masked loads of scales: adjacent scales are then loaded together, which saves registers.
    inside_m, inside_n = first_m + m < M, first_n + n < N
    a_scale_ptr += first_m // A_ROWS * stride_a_scale_m
    b_scale_ptr += first_n // B_ROWS * stride_b_scale_n

    out = contract(
        a_tile_ptr, a_offsets, a_scale_ptr, m * stride_a_scale_m, inside_m, stride_a_scale_k,
        b_tile_ptr, b_offsets, b_scale_ptr, n * stride_b_scale_n, inside_n, stride_b_scale_k,
        K, A_ROWS, B_ROWS, False,
    )  # fmt: skip
    if BIAS:
        bias = tl.load(bias_ptr + (first_n + n) * stride_bias, inside_n, 0.0)
        out += bias.to(tl.float32)[None, :]
    offsets = (first_m + m)[:, None] * N + (first_n + n)[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, inside_m[:, None] & inside_n[None, :])


def _launch(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_rows: int, b_rows: int,
    bias: Tensor | None, out_dtype: torch.dtype, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Launch; a test or a benchmark may name the tile."""
    out = _fake(a, a_scale, b, b_scale, a_rows, b_rows, bias, out_dtype)
    if out.numel() == 0:
        return out
    (M, K), N = a.shape, b.shape[0]
    bias = None if bias is None else bias.expand(N)  # torch's error where it has another shape
    if b_rows == 1 and b_scale.stride(0) != 1:
        # A thread reads the scales of up to 64 columns; loads one by one would spill.
        b_scale = b_scale.t().contiguous().t()

    def run(tile: Tile) -> None:
        if tile == DEEPGEMM:
            deep_gemm.multiply_blocks(a, a_scale, b, b_scale, out)
            return
        launch(
            _kernel, ceil_div(M, tile.M) * ceil_div(N, tile.N),
            a, a_scale, b, b_scale, a_scale if bias is None else bias, out, M, N, K,
            a.stride(0), b.stride(0), 1 if bias is None else bias.stride(0),
            *a_scale.stride(), *b_scale.stride(),
            A_ROWS=a_rows, B_ROWS=b_rows, BIAS=bias is not None, TILE_M=tile.M, TILE_N=tile.N,
            GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages, **FUSION,
        )  # fmt: skip

    others = []
    if bias is None and deep_gemm.multiplies(a, a_scale, b, a_rows, b_rows, out_dtype):
        others = [DEEPGEMM]
    form = ("blockwise_mm", a_rows, b_rows, a.dtype, b.dtype, out_dtype, bias is None, *others)
    run(tile or fastest(form, a, (M, N, K), tiles_for(M, N) + others, run))
    return out


def _definition(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_rows: int, b_rows: int,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    blocks = (a_rows, 128), (b_rows, 128)
    return definition.scaled_mm(a, a_scale, b, b_scale, *blocks, bias, out_dtype)


def _fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_rows: int, b_rows: int,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


blockwise_mm = register_op(
    "blockwise_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int a_rows, int b_rows, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
