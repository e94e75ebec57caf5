"""The grouped GEMMs of mixtures of experts in float8: the definition, and what runs where.

A GEMM per group of tokens, see `float8.kernels.groups` for the layout of tokens::

    tokens by experts   (T, C) x (E, N, C) -> (T, N)      row t by the expert of its group
    tokens by tokens    (M, P) x (N, P)    -> (E, M, N)   the contraction is each group's tokens

The second operand says which: an expert operand has three dimensions, and a block of
``(1, rows, columns)``, so that no two experts share a scale.

On CUDA, the first of `CANDIDATES` that does not refuse the product runs it. Plain PyTorch runs it
on every other device and with ``emulate=True``: a loop over groups, which reads ``offs`` on the
host. There is no other fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import cpu
from float8.kernels.groups import ends_of, spans_of
from float8.kernels.scaled_mm import (
    BLOCKWISE,
    CPU,
    MX,
    PLAIN,
    ROWWISE,
    SUPPORT,
    TENSORWISE,
    product_of,
    refuses_granularity,
)

_EMULATE = "set emulate=True to run it in plain PyTorch"


def grouped_mm(
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
        a: (T, C) or (M, P); float8, or in high precision without scales.
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
        if a_scale is None or b_scale is None:
            where.copy_(a_part @ b_part.t())
            continue
        if of_experts:
            a_scale_part = a_scale[rows] if a_block[0] != WHOLE else a_scale
            b_scale_part = b_scale[group if b_scale.shape[0] > 1 else 0]
        else:
            a_scale_part = _scale_of_group(a_scale, a_block, group, start, end - begin)
            b_scale_part = _scale_of_group(b_scale, b_block, group, start, end - begin)
        cpu.scaled_mm(
            a_part, a_scale_part, b_part, b_scale_part, a_block, b_block, None, out_dtype, where
        )
    return out


def _scale_of_group(scale: Tensor, block: Block, group: int, start: int, size: int) -> Tensor:
    """The scales of one group of a transposed token operand, as of a matrix."""
    if block[0] == WHOLE:
        return scale
    if block[1] == WHOLE:
        return scale[group][:, None]
    first = start // block[1] + group
    return scale[:, first : first - (-size // block[1])]


def _empty(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if b.dim() == 3:
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    return a.new_zeros((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


def _fake_grouped_mm(
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
    return _empty(a, b, offs, out_dtype)


_LIBRARY = torch.library.Library("float8", "FRAGMENT")
_LIBRARY.define(
    "grouped_mm(Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale, Tensor offs, int[] a_block, "
    "int[] b_block, ScalarType out_dtype, int align) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("grouped_mm", grouped_mm, "CompositeExplicitAutograd")
torch.library.register_fake("float8::grouped_mm", _fake_grouped_mm, lib=_LIBRARY)


# --- the candidates


class GroupedCandidate(NamedTuple):
    """One way to run a grouped product on a GPU.

    ``refuses(architecture, product, out_dtype)`` returns the reason why it does not run, or None; a
    message puts it after ``name``. ``multiply`` takes the arguments of `grouped_mm`. ``multiple``:
    K and N must be multiples of it. ``align``: what it needs of groups in the transposed layout.
    """

    name: str
    refuses: Callable[[str, str, torch.dtype], str | None]
    multiply: Callable[..., Tensor]
    multiple: int = 16
    align: int = 16


# product -> its candidates; the first that does not refuse runs it
CANDIDATES: dict[str, tuple[GroupedCandidate, ...]] = {
    TENSORWISE: (),
    ROWWISE: (),
    BLOCKWISE: (),
    MX: (),
}


def _named() -> dict[str, GroupedCandidate]:
    return {candidate.name: candidate for row in CANDIDATES.values() for candidate in row}


def _willing(family: str, product: str, out_dtype: torch.dtype) -> list[GroupedCandidate]:
    if family not in SUPPORT:
        return []
    return [c for c in CANDIDATES[product] if c.refuses(family, product, out_dtype) is None]


def grouped_gemm_for(
    family: str, a_block: Block, b_block: Block, out_dtype: torch.dtype, emulate: bool = False
) -> tuple[str, str | None]:
    """The candidate that runs a product, as `multiply_groups` takes it.

    Args:
        family: the device family, see `float8.kernels.family_of`.
        a_block, b_block: of matrices, without the 1 of experts.
        out_dtype: of the result.
        emulate: run plain PyTorch on every device.

    Returns:
        its name and None; or "" and the reason why there is none.
    """
    if family == CPU or emulate:
        return PLAIN, None
    product = product_of(a_block, b_block)
    if product is None:
        return "", refuses_granularity(a_block, b_block)
    if willing := _willing(family, product, out_dtype):
        return willing[0].name, None
    reasons = [f"{c.name} {c.refuses(family, product, out_dtype)}" for c in CANDIDATES[product]]
    return "", (
        f"{family} does not run a grouped {product} product written in {out_dtype}: "
        f"{'; '.join(reasons) or 'no GEMM is written for it'}. Or {_EMULATE}"
    )


def group_alignment(gemm: str) -> int:
    """The multiple to which a GEMM needs groups padded in the transposed layout of tokens."""
    return _named()[gemm].align if gemm in _named() else 1


def multiply_groups(
    gemm: str,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_block: Block,
    b_block: Block,
    out_dtype: torch.dtype,
    align: int,
) -> Tensor:
    """`grouped_mm` by the candidate that `grouped_gemm_for` chose."""
    is_plain = gemm == PLAIN or 0 in (*a.shape, *b.shape)
    run = torch.ops.float8.grouped_mm.default if is_plain else _named()[gemm].multiply
    out: Tensor = run(a, a_scale, b, b_scale, offs, a_block, b_block, out_dtype, align)
    return out


def multiply_groups_plainly(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The product of operands in high precision; the tokens of each group are not padded."""
    if a.device.type == "cuda":
        return F.grouped_mm(a, b.mT, offs=offs)
    whole = (WHOLE, WHOLE)
    out: Tensor = torch.ops.float8.grouped_mm.default(
        a, None, b, None, offs, whole, whole, a.dtype, 1
    )
    return out
