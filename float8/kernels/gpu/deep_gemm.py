"""DeepGEMM's products of 1x128 by 128x128 scales, where it is installed: one more "tile" on sm_90.

DeepGEMM (github.com/deepseek-ai/DeepGEMM; read in version 2.6.1, csrc/apis/gemm.hpp) multiplies
E4M3 by E4M3 on sm_90 and writes bfloat16. `blockwise_mm` and `grouped_mm` measure it like a tile of
their own (`fastest_tile`), and ``cublas.py`` beside cuBLAS: all three compute the same bits. Each
128 of the contraction is summed by the tensor core alone; one fused multiply-add then scales that
sum by the product of both scales and adds it (sm90_fp8_gemm_1d2d.cuh). Two other forms stay as they
are: 1x128 by 1x128, which adds to a float32 result there, and the grouped weight gradient, for
which the host would have to know sizes.

Groups: DeepGEMM reads one expert per block of 128 rows, and groups begin anywhere. So it multiplies
each block by the expert of the block's first row. A second product multiplies the first 128 rows
of each group, from a copy of E * 128 rows, and replaces what the first product made of them. No
size is read on the host.

It compiles its kernels with nvcc when they are first needed. If that fails it is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels.gpu.fastest_tile import fastest
from float8.kernels.gpu.launch import on_device_of
from float8.kernels.products import family_of

_E4M3, _BF16 = torch.float8_e4m3fn, torch.bfloat16
EXPERT_ROWS = 128  # rows that share an expert
FOUND: dict[torch.device, Any] = {}
_logger = logging.getLogger("float8")


def library(device: torch.device) -> Any:
    """The module, or None if it is not installed or does not run; says once which.

    None while a CUDA graph is captured, unless it ran before: the first product loads a kernel.
    """
    if device not in FOUND and not torch.cuda.is_current_stream_capturing():
        FOUND[device] = _library(device)
    return FOUND.get(device)


def _library(device: torch.device) -> Any:
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    try:
        found = importlib.import_module("deep_gemm")
        codes = torch.zeros(EXPERT_ROWS, EXPERT_ROWS, dtype=_E4M3, device=device)
        scale = torch.ones(1, EXPERT_ROWS, device=device).t(), torch.ones(1, 1, device=device)
        with on_device_of(codes):
            found.fp8_gemm_nt((codes, scale[0]), (codes, scale[1]), codes.to(_BF16))
    except Exception as error:  # it asserts that there is an nvcc, and that its kernels compile
        _logger.warning("DeepGEMM is installed, but not used: %s: %s", type(error).__name__, error)
        return None
    _logger.info("DeepGEMM %s multiplies blockwise operands where it is fastest", found.__version__)
    return found


def multiplies(
    a: Tensor, a_scale: Tensor, b: Tensor, a_rows: int, b_rows: int, out_dtype: torch.dtype
) -> bool:
    """Whether it is there and takes these operands: a (M, K) and b (N, K), or (E, N, K)."""
    is_its_form = (
        (a_rows, b_rows) == (1, 128) and a.dtype == b.dtype == _E4M3 and out_dtype == _BF16
    )
    if not is_its_form or family_of(a.device) != "sm_90":
        return False
    starts = [*(x.data_ptr() for x in (a, a_scale, b)), a.stride(0), b.stride(-2), b.shape[-2]]
    if any(start % 16 for start in starts) or not b.is_contiguous():  # as its TMA loads need
        return False
    found = library(a.device)
    if found is None or b.dim() == 2:
        return found is not None
    # A user may have set other blocks: `multiply_tokens` would name wrong experts.
    return bool(EXPERT_ROWS % found.get_mk_alignment_for_contiguous_layout() == 0)


def multiply_blocks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Write ``(a * a_scale) @ (b * b_scale).T`` into out (M, N)."""
    with on_device_of(a):
        library(a.device).fp8_gemm_nt((a, a_scale), (b, _rows_of(b_scale)), out)


def or_faster(
    other: Callable[[], Tensor], a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor,
    a_rows: int, b_rows: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The product (M, N) by DeepGEMM, or by ``other`` if that is faster or DeepGEMM has no such."""
    if not multiplies(a, a_scale, b, a_rows, b_rows, out_dtype):
        return other()
    form, sizes = ("deep_gemm", a.dtype, out_dtype), (len(a), len(b), a.shape[1])

    def by_deep_gemm() -> Tensor:
        out = a.new_empty((len(a), len(b)), dtype=out_dtype)
        multiply_blocks(a, a_scale, b, b_scale, out)
        return out

    ways = {"other": other, "deep_gemm": by_deep_gemm}
    return ways[fastest(form, a, sizes, list(ways), lambda way: ways[way]())]()


def multiply_tokens(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor) -> Tensor:
    """Tokens by experts as `grouped_mm`: (T, K) by (E, N, K) -> (T, N) in bfloat16."""
    T, E, N = len(a), len(offs), b.shape[1]
    weights = b, _rows_of(b_scale)
    out = a.new_empty((T + 1, N), dtype=_BF16)  # row T: for what is beyond the end of a group
    offs = offs.clamp(0, T)
    # The group of each block's first row. The kernel reads those of a last block that is not whole.
    block = torch.arange(ceil_div(T, EXPERT_ROWS), dtype=torch.int32, device=a.device) * EXPERT_ROWS
    group = torch.searchsorted(offs, block, right=True, out_int32=True)
    group = group.masked_fill(group == E, -1).repeat_interleave(EXPERT_ROWS)[:T]

    rows = F.pad(offs[:-1], (1, 0))[:, None] + torch.arange(EXPERT_ROWS, device=a.device)
    places = torch.where(rows < offs[:, None], rows, T).flatten()
    expert = torch.arange(E, dtype=torch.int32, device=a.device).repeat_interleave(EXPERT_ROWS)
    rows = places.clamp(max=T - 1)
    firsts = a.view(torch.int64)[rows].view(_E4M3), a_scale.t()[:, rows].t()
    part = a.new_empty((E * EXPERT_ROWS, N), dtype=_BF16)
    with on_device_of(a):
        run = library(a.device).m_grouped_fp8_gemm_nt_contiguous
        run((a, a_scale), weights, out[:T], group)
        run(firsts, weights, part, expert)
    return out.index_copy_(0, places, part)[:T]


def _rows_of(scale: Tensor) -> Tensor:
    """Contiguous, and with the strides of it where a dimension is 1 too."""
    return scale.reshape(-1).view(scale.shape)
