"""The grouped GEMMs of mixtures of experts in float8: the definition, and what runs where.

A GEMM per group of tokens, see `float8.kernels.groups` for the layout of tokens::

    tokens by experts   (T, C) x (E, N, C) -> (T, N)      row t by the expert of its group
    tokens by tokens    (M, P) x (N, P)    -> (E, M, N)   the contraction is each group's tokens

The second operand says which: an expert operand has three dimensions, and a block of
``(1, rows, columns)``, so that no two experts share a scale.

On CUDA, the first of `GROUPED_CANDIDATES` that does not refuse the product runs it. Scales that are
powers of two by their format run as MX products where torch has these, as in `products`. Plain
PyTorch runs it on every other device and with ``emulate=True``: a loop over groups, which reads
``offs`` on the host. There is no other fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block, block_name, ceil_div
from float8.kernels import cpu
from float8.kernels.cublas import ALIGNMENT, aligned_row_major, mx_scales, pad_codes
from float8.kernels.groups import ends_of, padded_sizes, spans_of
from float8.kernels.matrix import BY_32, Float8Matrix
from float8.kernels.products import (
    BLOCKWISE_PRODUCT,
    CPU,
    MX_PRODUCT,
    PLAIN_PYTORCH,
    ROWS_AS_MX,
    ROWWISE_PRODUCT,
    SUPPORT,
    TENSORWISE_PRODUCT,
    Candidate,
    family_of,
    first_candidate,
    gemm_for,
    product_name,
    reason_against_triton,
)
from float8.kernels.registration import define_op, load_kernels

_EMULATE = "set emulate=True to run it in plain PyTorch"


def grouped_mm_definition(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    offs: Tensor,
    a_block: Sequence[int],
    b_block: Sequence[int],
    out_dtype: torch.dtype,
    align: int,
) -> Tensor:
    """The definition of both products, group by group by `cpu.scaled_mm`.

    Args:
        a: (T, C) or (M, P); float8, or in high precision without scales, as b may be.
        a_scale: of a, float32 or E8M0.
        b: (E, N, C) or (N, P).
        b_scale: of b; for experts ``ceil(shape / b_block)``, or (1, 1, 1) for all of them.
        offs: (E,) int32.
        a_block: of a, two extents.
        b_block: of b, two extents, for experts after a 1.
        out_dtype: float32, bfloat16 or float16.
        align: of the transposed layout of tokens.

    Returns:
        (T, N), rows of no group being zero; or (E, M, N), zero for an empty group.
    """
    of_experts = b.dim() == 3
    ends = ends_of(offs, a.shape[0] if of_experts else a.shape[1])
    out = _empty(a, b, offs, out_dtype)
    a_block, b_block = tuple(a_block), tuple(b_block)[-2:]
    for group, (begin, end, start) in enumerate(spans_of(ends, align)):
        if begin == end:
            continue
        rows, columns = slice(begin, end), slice(start, start + end - begin)
        a_part = a[rows] if of_experts else a[:, columns]
        b_part = b[group] if of_experts else b[:, columns]
        where = out[rows if of_experts else group]
        if of_experts:
            a_its = a_scale if a_scale is None or a_block[0] == WHOLE else a_scale[rows]
            b_its = b_scale if b_scale is None else b_scale[group if b_scale.shape[0] > 1 else 0]
        else:
            a_its = _scale_of_group(a_scale, a_block, group, start, end - begin)
            b_its = _scale_of_group(b_scale, b_block, group, start, end - begin)
        if a_its is None or b_its is None:
            if a_its is not None:
                a_part = cpu.dequantize(a_part, a_its, a_block, out_dtype)
            if b_its is not None:
                b_part = cpu.dequantize(b_part, b_its, b_block, out_dtype)
            if not of_experts:
                # oneDNN's 16-bit GEMM (torch 2.13) multiplies what follows an odd row by 0: NaN if
                # that is NaN, as tokens of no group may be. By columns it reads no further.
                a_part = a_part.t().contiguous().t()
            where.copy_(a_part @ b_part.t())
            continue
        blocks = a_block, b_block
        where.copy_(cpu.scaled_mm(a_part, a_its, b_part, b_its, *blocks, None, out_dtype))
    return out


def _scale_of_group(scale: Any, block: Block, group: int, start: int, size: int) -> Any:
    """The scales of one group of a transposed token operand, as of a matrix; None of None."""
    if scale is None or block[0] == WHOLE:
        return scale
    if block[1] == WHOLE:
        return scale[group][:, None]
    first = start // block[1] + group
    return scale[:, first : first - (-size // block[1])]


def _empty(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if b.dim() == 3:
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    return a.new_zeros((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


define_op(
    "grouped_mm(Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale, Tensor offs, int[] a_block, "
    "int[] b_block, ScalarType out_dtype, int align) -> Tensor",
    grouped_mm_definition,
    lambda a, a_scale, b, b_scale, offs, *how: _empty(a, b, offs, how[-2]),
)


# --- the candidates


def _reason_against_torch_mx(
    family: str, product: str, out_dtype: torch.dtype, is_e4m3: bool
) -> str | None:
    """What ``torch._scaled_grouped_mm`` does not run in MX formats, in torch 2.11 and 2.13.

    GroupedBlas.cpp hands them to MSLK's kernel for sm_100a, where torch was built with it. Torch
    tests it on that architecture alone (PLATFORM_SUPPORTS_MXFP8_GROUPED_GEMM of
    torch/testing/_internal/common_cuda.py).
    """
    if family != "sm_100":
        return "multiplies MX formats on sm_100 (B200) only: use the recipe blockwise"
    if torch.version.cuda is not None and not _has_mslk():
        return "multiplies MX formats only if torch was built with MSLK, which this one was not"
    if not is_e4m3:
        return "multiplies E4M3 by E4M3 only"
    return None if out_dtype == torch.bfloat16 else f"writes bfloat16 only, not {out_dtype}"


def _has_mslk() -> bool:
    built_with = torch.__config__.show()
    return "USE_MSLK" in built_with or "USE_FBGEMM_GENAI" in built_with  # its earlier name


def _torch_multiply_mx(
    a: Float8Matrix,
    b: Float8Matrix,
    offs: Tensor,
    out_dtype: torch.dtype,
    align: int,
    use_fast_accum: bool | None,
) -> Tensor:
    """MX products by torch, with the scales of ``gpu/cast_tokens`` and ``gpu/cast``."""
    data, weights = a.data, b.data
    columns, contraction = weights.shape[-2:]
    of_experts = weights.dim() == 3
    # The kernel counts whole blocks, and 16 columns at a time. The scales have room for both.
    inner, rows = -contraction % 32 if of_experts else 0, -columns % ALIGNMENT
    if inner or rows:
        data, weights = pad_codes(data, 0, inner), pad_codes(weights, rows, inner)
    sizes = None if of_experts else padded_sizes(offs, align)
    out = torch._scaled_grouped_mm(
        aligned_row_major(data),
        aligned_row_major(weights).mT,
        _contiguous(a.scale),
        _contiguous(b.scale),
        offs=offs if sizes is None else sizes.cumsum(0, dtype=torch.int32),
        out_dtype=out_dtype,
    )
    # It writes nothing for a group without tokens.
    return out if sizes is None else out.masked_fill((sizes == 0).view(-1, 1, 1), 0)


def _multiply_as_mx(a: Float8Matrix, b: Float8Matrix, offs: Tensor, *others: Any) -> Tensor:
    """Multiply powers of two as an MX product; by Triton if experts lack whole blocks of 1x32."""
    by_tokens = b.data.dim() == 2
    if not by_tokens and b.data.shape[-1] % 32:
        return _triton_multiply(a, b, offs, *others)
    load_kernels("expand_scales")
    expand = torch.ops.float8.expand_scales.default
    a_scale = expand(a.scale, a.block, *a.data.shape, offs, by_tokens)
    if by_tokens:
        b_scale = expand(b.scale, b.block, *b.data.shape, offs, True)
    else:
        b_scale = b.scale.expand(len(b.data), -1, -1)
        b_scale = expand(b_scale, b.block, *b.data.shape[-2:])
    a, b = Float8Matrix(a.data, a_scale, BY_32), Float8Matrix(b.data, b_scale, BY_32)
    return _torch_multiply_mx(a, b, offs, *others)


def _contiguous(x: Tensor) -> Tensor:
    # Tensor.contiguous() needs a CUDA build even for FakeTensors.
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _triton_multiply(a: Float8Matrix, b: Float8Matrix, offs: Tensor, *others: Any) -> Tensor:
    load_kernels("grouped_mm")
    run, blocks = torch.ops.float8.grouped_mm_gpu.default, (a.block, b.block)
    operands = aligned_row_major(a.data), a.scale, aligned_row_major(b.data), b.scale
    return run(*operands, offs, *blocks, *others)


TORCH_MX = Candidate(
    "torch._scaled_grouped_mm of MX formats",
    _reason_against_torch_mx,
    _torch_multiply_mx,
    align=128,
)
AS_MX = TORCH_MX._replace(
    name=ROWS_AS_MX.name, multiply=_multiply_as_mx, needs_power_of_two_scales=True
)
TRITON_GROUPED_GEMM = Candidate("the Triton grouped GEMM", reason_against_triton, _triton_multiply)
# product -> its candidates; the first that does not refuse runs it
GROUPED_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    TENSORWISE_PRODUCT: (TRITON_GROUPED_GEMM,),
    ROWWISE_PRODUCT: (AS_MX, TRITON_GROUPED_GEMM),
    BLOCKWISE_PRODUCT: (AS_MX, TRITON_GROUPED_GEMM),
    MX_PRODUCT: (TORCH_MX,),
}
GROUPED_CANDIDATES_BY_NAME = {
    candidate.name: candidate for row in GROUPED_CANDIDATES.values() for candidate in row
}


def grouped_gemm_for(
    family: str,
    a_block: Block,
    b_block: Block,
    out_dtype: torch.dtype,
    emulate: bool = False,
    is_e4m3: bool = True,
    has_power_of_two_scales: bool = False,
) -> tuple[str, str | None]:
    """The candidate that runs a product, as `multiply_groups` takes it.

    ``b_block`` has a 1 for the first dimension if the second operand is the weights of experts.
    ``emulate`` runs plain PyTorch on every device; ``is_e4m3`` says whether both operands are E4M3.
    ``has_power_of_two_scales``: as of `products.gemm_for`. Returns the candidate's name and None;
    or "" and the reason why there is none.
    """
    for block in (a_block, b_block) if len(b_block) == 2 else (a_block,):
        if block[0] > 1:
            return "", (
                f"tokens in blocks {block_name(block)}: two experts would share a scale; cast "
                "tokens by Blockwise(1, 128), Rowwise() or Tensorwise()"
            )
    if family == CPU or emulate:
        return PLAIN_PYTORCH, None
    b_block = b_block[-2:]
    product = product_name(a_block, b_block)
    if product is None or family not in SUPPORT:
        return gemm_for(family, a_block, b_block, out_dtype)
    what = family, product, out_dtype, is_e4m3
    name, reasons = first_candidate(GROUPED_CANDIDATES[product], has_power_of_two_scales, *what)
    why = reasons or "no GEMM is written for it, use the recipe blockwise"
    return name, None if name else (
        f"{family} does not run a grouped {product} product written in {out_dtype}: {why}. "
        f"Or {_EMULATE}"
    )


def group_alignment(gemm: str) -> int:
    """The multiple to which a GEMM needs groups padded in the transposed layout of tokens."""
    return GROUPED_CANDIDATES_BY_NAME[gemm].align if gemm in GROUPED_CANDIDATES_BY_NAME else 1


def multiply_groups(a: Float8Matrix, b: Float8Matrix, gemm: Any, offs: Tensor) -> Tensor:
    """`grouped_mm_definition` of float8 operands, by the candidate that `grouped_gemm_for` chose.

    Args:
        a, b: operands of `grouped_mm_definition`.
        gemm: a `products.Product`, or what has its fields.
        offs: (E,) int32, the ends of the groups.

    Raises ValueError on a GPU if no GEMM multiplies, if K or N of experts is no multiple of 16
    without ``gemm.pad``, or if the scales of blocks of 1x32 are not E8M0.
    """
    (a_data, a_scale, a_block), (b_data, b_scale, b_block) = a, b
    if gemm.name == PLAIN_PYTORCH:
        blocks = a_block, b_block
        out: Tensor = torch.ops.float8.grouped_mm.default(
            a_data, a_scale, b_data, b_scale, offs, *blocks, gemm.out_dtype, gemm.align
        )
        return out
    if 0 in (*a_data.shape, *b_data.shape, *offs.shape):
        return _empty(a_data, b_data, offs, gemm.out_dtype)
    if gemm.refusal is not None:
        raise ValueError(f"grouped_mm: {gemm.refusal}")
    if b_block[-1] == BY_32[-1] and b_scale.dim() == 3:  # not those that are swizzled
        b_scale = mx_scales(b_scale, b_block, b_data.shape[-2])
    if b_data.dim() == 3 and b_scale.shape == (1, 1):
        b_scale = b_scale.view(1, 1, 1)  # one static scale for all experts
    columns = b_data.shape[-2]
    rows, inner = -columns % ALIGNMENT, -b_data.shape[-1] % ALIGNMENT
    if b_data.dim() == 3 and (rows or inner):
        if not gemm.pad:
            raise ValueError(
                f"grouped_mm: experts of {columns} by {b_data.shape[-1]} features, but a GPU "
                f"multiplies multiples of {ALIGNMENT}; pad them or set pad_inner_dim=True"
            )
        a_data, b_data = pad_codes(a_data, 0, inner), pad_codes(b_data, rows, inner)
        if b_block[-2] != WHOLE and b_scale.dim() == 3:  # not those that are swizzled
            missing = ceil_div(b_data.shape[1], b_block[-2]) - b_scale.shape[1]
            b_scale = F.pad(b_scale, (0, 0, 0, missing), value=1.0)
    a, b = Float8Matrix(a_data, a_scale, a_block), Float8Matrix(b_data, b_scale, b_block)
    options = gemm.out_dtype, gemm.align, gemm.use_fast_accum
    out = GROUPED_CANDIDATES_BY_NAME[gemm.name].multiply(a, b, offs, *options)
    return out if out.shape[-1] == columns else out.narrow(-1, 0, columns)


def multiply_groups_plainly(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The product of operands in high precision; the tokens of each group are not padded."""
    if a.device.type == "cuda":
        # Torch takes no expanded gradient, such as that of a sum.
        a = _contiguous(a.t()).t() if b.dim() == 2 else _contiguous(a)
        out: Tensor = F.grouped_mm(a, b.mT, offs=offs)
        if b.dim() == 2 and family_of(a.device).startswith("sm_10"):
            # There torch leaves garbage for groups without tokens (pytorch#172439).
            is_empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
            out = out.masked_fill(is_empty.view(-1, 1, 1), 0)
        return out
    whole = (WHOLE, WHOLE)
    out = torch.ops.float8.grouped_mm.default(a, None, b, None, offs, whole, whole, a.dtype, 1)
    return out
