"""`grouped_mm`: one GEMM per group of tokens, all of them in one launch, with any granularity.

Legend: T tokens, sorted by expert; E experts; ``offs`` (E,) int32, the cumulative ends of their
groups; ``starts[g] = offs[g - 1]``. The two forms have the operands of ``blockwise_mm.py``, with
the contraction last:

===================  ============  =============================  ==========================
form                 a             b                              result
===================  ============  =============================  ==========================
tokens by experts    (T, K)        (E, N, K)                      (T, N): each group's rows
                                                                  by its expert's matrix
tokens by tokens     (M, P)        (N, P), groups of columns      (E, M, N): the contraction
                                                                  of each group's columns
===================  ============  =============================  ==========================

In the second form, each group starts at a multiple of ``align`` columns, with zeros behind its
tokens, so that loads are 16 bytes wide. Its first column is the sum of the earlier groups' sizes,
each rounded up.

======================  =============================  =======================================
scales                  tokens by experts              tokens by tokens
======================  =============================  =======================================
one                     a (1, 1), b (E, 1, 1)          (1, 1)
of rows                 a (T, 1), b (E, N, 1)          (E, M), (E, N)
of 128 of contraction   a (T, K / 128), 1x128;         (M, P // 128 + E), 1x128: block j of
                        b (E, N / 128, K / 128),       group g in column first // 128 + g + j
                        128x128, or (E, N, K / 128)
======================  =============================  =======================================

The host knows no group's size, and does not wait for it: the grid is an upper bound, and each
program finds its group from ``offs`` (`jit.group_of_tile`). At most one row of tiles per group is
idle.

A group without tokens gives no rows, or a matrix of zeros. Rows of ``a`` at or beyond ``offs[-1]``
are not read, and their rows of the result not written.

The tiles are those of ``blockwise_mm.py``, chosen in the same way. ``FAST`` leaves the whole
contraction to the tensor core; without it, its sums are added in float32 every 128. A fast product
has one accumulator, so that a tile of 128 x 256 fits (`WIDE`). ``use_fast_accum=None`` is fast if
a sum has at most `SHORT_SUM` terms: see `float8.GemmConfig`.

``torch._scaled_grouped_mm`` is one more way to run a product, where it can: on sm_90, E4M3 by E4M3
with scales of rows, written in bfloat16 (ATen/native/cuda/ScaledGroupMM.cu; on sm_10x it traps,
pytorch#187095). Its sums are fast, or promoted every 128, too, and a group without tokens is a
matrix of zeros. It is measured like a tile, because it is faster for few large experts, and slower
for many small ones if sums are not fast. So is DeepGEMM, where it is installed (`deep_gemm`), for
1x128 by 128x128.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels.gpu import deep_gemm
from float8.kernels.gpu.blockwise_mm import (
    DEEPGEMM,
    FUSION,
    GROUP,
    STEP,
    Tile,
    contract,
    place_of,
    tiles_for,
)
from float8.kernels.gpu.fastest_tile import fastest
from float8.kernels.gpu.jit import group_of_tile
from float8.kernels.gpu.launch import launch, register_op
from float8.kernels.groups import SHORT_SUM, padded_sizes
from float8.kernels.products import family_of

WIDE = Tile(128, 256, 8, 3)
TORCH_TILE = Tile(0, 0, 0, 0)  # no tile: torch's kernel


@triton.jit(do_not_specialize=["M"])  # T is another in each batch
def _kernel(
    a_ptr,  # float8 (T, K), or (M, P) where BY_TOKENS; stride 1 along the contraction
    a_scale_ptr,
    b_ptr,  # float8 (E, N, K), or (N, P)
    b_scale_ptr,
    offs_ptr,  # int32 (E,)
    out_ptr,  # (T, N), or (E, M, N); row-major
    M,  # T, or M
    N,
    K,  # K, or P
    E,
    stride_a,
    stride_b_e,
    stride_b,
    stride_a_scale_e,
    stride_a_scale_m,
    stride_a_scale_k,
    stride_b_scale_e,
    stride_b_scale_n,
    stride_b_scale_k,
    BY_TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, rounded up to a power of two
    ALIGN: tl.constexpr,
    A_ROWS: tl.constexpr,  # rows that share a scale: 0 (all of them), 1, and 128 for an expert
    B_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # scales change every 128 of the contraction
    FAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, TILE_N)
    if BY_TOKENS:
        tiles_m = tl.cdiv(M, TILE_M)
        group = (pid // (tiles_m * tiles_n)).to(tl.int64)
        tile_m, tile_n = place_of(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        e = tl.arange(0, EXPERTS)
        ends = tl.load(offs_ptr + e, e < E, 0)
        sizes = tl.maximum(ends - tl.load(offs_ptr + e - 1, (e > 0) & (e < E), 0), 0)
        sizes = (sizes + ALIGN - 1) // ALIGN * ALIGN
        first_k = tl.minimum(tl.sum(tl.where(e < group, sizes, 0)), K)
        K = tl.minimum(tl.sum(tl.where(e == group, sizes, 0)), K - first_k)
        first_k, K = tl.multiple_of(first_k, ALIGN), tl.multiple_of(K, ALIGN)
        a_row = tile_m.to(tl.int64) * TILE_M
        out_row, rows = group * M + a_row, (M - a_row).to(tl.int32)
        block = first_k // STEP + group
    else:
        slot, tile_n = place_of(pid, tl.num_programs(0) // tiles_n, tiles_n, GROUP)
        group, begin, size, _, first_m = group_of_tile(slot, offs_ptr, E, M, M, TILE_M, 1, EXPERTS)
        rows = (size - first_m).to(tl.int32)
        if rows <= 0:
            return
        a_row, out_row = begin + first_m, begin + first_m
        first_k, block = 0, 0
    first_n = tile_n.to(tl.int64) * TILE_N

    # As in `blockwise_mm`: rows beyond the last of a group read the last one.
    m, n, k = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, STEP)
    columns = (N - first_n).to(tl.int32)
    inside_m, inside_n = m < rows, n < columns
    a_offsets = tl.minimum(m, rows - 1)[:, None] * stride_a + k[None, :]
    b_offsets = tl.minimum(n, columns - 1)[None, :] * stride_b + k[:, None]
    a_scale_ptr += group * stride_a_scale_e + block * stride_a_scale_k
    b_scale_ptr += group * stride_b_scale_e + block * stride_b_scale_k
    if A_ROWS != 0:
        a_scale_ptr += a_row * stride_a_scale_m
    if B_ROWS != 0:
        b_scale_ptr += first_n // B_ROWS * stride_b_scale_n

    out = contract(
        a_ptr + a_row * stride_a + first_k, a_offsets,
        a_scale_ptr, m * stride_a_scale_m, inside_m, stride_a_scale_k,
        b_ptr + group * stride_b_e + first_n * stride_b + first_k, b_offsets,
        b_scale_ptr, n * stride_b_scale_n, inside_n, stride_b_scale_k,
        K, A_ROWS if BLOCKS else 0, B_ROWS, FAST,
    )  # fmt: skip
    if not BLOCKS:  # in turn: the product of two scales alone may leave float32's range
        out *= _scales(a_scale_ptr, m * stride_a_scale_m, inside_m, A_ROWS)[:, None]
        out *= _scales(b_scale_ptr, n * stride_b_scale_n, inside_n, B_ROWS)[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    out_ptr += out_row * N + first_n
    tl.store(out_ptr + m[:, None] * N + n[None, :], out, inside_m[:, None] & inside_n[None, :])


@triton.jit
def _scales(scale_ptr, offsets, inside, ROWS: tl.constexpr):
    if ROWS == 0:
        return tl.broadcast_to(tl.load(scale_ptr), offsets.shape)
    return tl.load(scale_ptr + offsets, inside, 0.0)


def _launch(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, a_block: Sequence[int],
    b_block: Sequence[int], out_dtype: torch.dtype, align: int, use_fast_accum: bool | None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Launch; a test or a benchmark may name the tile."""
    if max(a.stride(0), b.stride(-2)) * 128 >= 2**31:  # the kernel's offsets in a tile
        raise ValueError(
            f"grouped_mm: rows of 2^24 elements or more: strides {a.stride()} and {b.stride()}"
        )
    a_rows, b_rows, blocks = max(a_block[-2], 0), max(b_block[-2], 0), a_block[-1] == 128
    arguments = (a, a_scale, b, b_scale, offs, a_block, b_block, out_dtype, align, use_fast_accum)
    by_tokens, M, N, experts = b.dim() == 2, a.shape[0], b.shape[-2], offs.shape[0]
    if 0 in (M, N, experts):
        return _fake(*arguments)
    if blocks and b_rows == 1 and b_scale.stride(-2) != 1:
        b_scale = b_scale.mT.contiguous().mT  # as in `blockwise_mm`
    # Beside its tokens, each group has up to `align` columns.
    terms = a.shape[1] // experts - align if by_tokens else a.shape[1]
    fast = (terms <= SHORT_SUM if use_fast_accum is None else use_fast_accum) and not blocks
    # One for all tiles that are measured. A cache alone lets each of their threads make its own.
    result, alone = functools.cache(lambda: _fake(*arguments)), threading.Lock()

    def run(tile: Tile) -> Tensor:
        if tile == TORCH_TILE:
            return _by_torch(a, a_scale, b, b_scale, offs, out_dtype, align, fast)
        if tile == DEEPGEMM:
            return deep_gemm.multiply_tokens(a, a_scale, b, b_scale, offs)
        with alone:
            out = result()
        tiles_m = experts * ceil_div(M, tile.M) if by_tokens else M // tile.M + experts
        launch(
            _kernel, tiles_m * ceil_div(N, tile.N),
            a, a_scale, b, b_scale, offs, out, M, N, a.shape[1], experts,
            a.stride(0), 0 if by_tokens else b.stride(0), b.stride(-2),
            *_strides(a_scale, by_tokens, blocks), *_strides(b_scale, by_tokens, blocks),
            BY_TOKENS=by_tokens, EXPERTS=triton.next_power_of_2(experts), ALIGN=align,
            A_ROWS=a_rows, B_ROWS=b_rows, BLOCKS=blocks, FAST=fast,
            TILE_M=tile.M, TILE_N=tile.N, GROUP=GROUP, num_warps=tile.warps,
            num_stages=tile.stages, **FUSION,
        )  # fmt: skip
        return out

    if tile is None:
        rows = M if by_tokens else ceil_div(M, experts)
        by_torch = _torch_multiplies(a, b, a_rows, b_rows, blocks, out_dtype)
        by_deep_gemm = (
            2 * deep_gemm.EXPERT_ROWS * experts < M  # else it multiplies half of the rows twice
            and not by_tokens
            and deep_gemm.multiplies(a, a_scale, b, a_rows, b_rows, out_dtype)
        )
        kinds = a.dtype, b.dtype, out_dtype, by_torch, by_deep_gemm
        form = ("grouped_mm", by_tokens, a_rows, b_rows, blocks, fast, *kinds)
        sizes = (M, N, a.shape[1], experts)
        tiles = tiles_for(rows, N)
        is_near = b.stride(-2) * WIDE.N < 2**31  # its offsets in a tile have 32 bits
        if fast and is_near and N > 128 and rows > 64 and _fits(WIDE, a.device):
            tiles.insert(0, WIDE)
        if by_torch:
            tiles.append(TORCH_TILE)
        if by_deep_gemm:
            tiles.append(DEEPGEMM)
        tile = fastest(form, a, sizes, tiles, run)
        result.cache_clear()  # a thread allocated it: not where the caller's CUDA graphs want it
    return run(tile)


def _by_torch(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, out_dtype: torch.dtype,
    align: int, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """`TORCH_TILE`. It takes scales (T,) and (E, N), or (E * M,) and (E * N,), columns padded."""
    if b.dim() == 2:
        a_scale, b_scale = a_scale.flatten(), b_scale.flatten()
        offs = padded_sizes(offs, align).cumsum(0, dtype=torch.int32)
    else:
        a_scale, b_scale = a_scale.squeeze(-1), b_scale.expand(len(b), -1, -1).squeeze(-1)
    return torch._scaled_grouped_mm(
        a, b.mT, a_scale.contiguous(), b_scale.contiguous(), offs=offs, out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )  # fmt: skip


def _fits(tile: Tile, device: torch.device) -> bool:
    """Whether a multiprocessor has the shared memory of a tile."""
    if device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return memory >= 128 * (tile.M + tile.N) * tile.stages


def _torch_multiplies(
    a: Tensor, b: Tensor, a_rows: int, b_rows: int, blocks: bool, out_dtype: torch.dtype
) -> bool:
    """Whether torch's kernel runs a product, and writes its result contiguous, as `_fake` says.

    It refuses rows of operands that start at no multiple of 16 bytes, and pads those of results
    (create_grouped_gemm_output_tensor of ATen/native/cuda/GroupedMMUtils.h).
    """
    is_aligned = a.stride(0) % 16 == b.stride(-2) % 16 == b.shape[-2] % 16 == 0
    is_row_by_row = a_rows == b_rows == 1 and not blocks
    is_bf16 = a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    return is_aligned and is_row_by_row and is_bf16 and family_of(a.device) == "sm_90"


def _strides(scale: Tensor, by_tokens: bool, blocks: bool) -> tuple[int, int, int]:
    """The strides of a scale between experts, rows, and steps of the contraction."""
    experts = 0 if scale.shape[0] == 1 else scale.stride(0)
    if by_tokens and not blocks:
        return experts, scale.stride(1), 0
    return (experts if scale.dim() == 3 else 0), scale.stride(-2), scale.stride(-1)


def _definition(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, a_block: Sequence[int],
    b_block: Sequence[int], out_dtype: torch.dtype, align: int, use_fast_accum: bool | None,
) -> Tensor:  # fmt: skip
    # The op of ``kernels/grouped_products.py``, which imports this file.
    define = torch.ops.float8.grouped_mm.default
    return define(a, a_scale, b, b_scale, offs, a_block, b_block, out_dtype, align)


def _fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, a_block: Sequence[int],
    b_block: Sequence[int], out_dtype: torch.dtype, align: int, use_fast_accum: bool | None,
) -> Tensor:  # fmt: skip
    rows, N = a.shape[0], b.shape[-2]
    shape = (rows, N) if b.dim() == 3 else (offs.shape[0], rows, N)
    return torch.empty(shape, dtype=out_dtype, device=a.device)


grouped_mm_gpu = register_op(
    "grouped_mm_gpu(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, "
    "int[] a_block, int[] b_block, ScalarType out_dtype, int align, bool? use_fast_accum)"
    " -> Tensor",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
